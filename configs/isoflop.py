"""One cell of the isoFLOP study: a variant at a size, trained for a budget of training FLOPs by our own count.

    python -m mod_jax.train --config=configs/isoflop.py:preset=cpu,variant=mod,budget=3e12,width=64 --workdir=runs/cell
    python experiments/isoflop.py plan --preset=cpu --out=runs/isoflop          # all cells, one command each

`preset`: `cpu` (hours on one core), `paper` (the paper's setting and budgets; a pod), `tiny` (seconds; for tests). What
came out of `cpu` so far stands in experiments/README.md; `paper` was not run by us.

`variant`, all at the size's width:

  dense       L full blocks
  mod         L blocks, every other routed at 12.5 %
  stochastic  the same, routed at random: the paper's control
  shallow     L / 2 full blocks: `mod` without its routed blocks, and nearly its FLOPs per token

The size rule. One number, the width D, gives all others:

  depth   L = D / 64, to the nearest even number, and at least 4. The ratio of 64 is that of the table of models in
          Hoffmann et al. 2022 (arXiv 2203.15556, table A9: 512 x 8, 768 x 12, 1024 x 16). Four blocks are the fewest
          in which a second routed block reads what a full block made of the first; so all sizes of `cpu` have four.
  heads   of 128 from width 1280 on, of 64 from width 512 on, below as near to 32 as divides.
  MLP     4 D.
  rate    proportional to 1 / D, as Yang et al. 2022 (arXiv 2203.03466) derive for the hidden matrices under Adam. At
          the preset's reference width it is that of configs/cpu_demo.py or configs/paper.py. `rate=2` doubles it: what
          the learning-rate check needs.

A cell's length is the budget over the FLOPs of a step, to the nearest step: within 0.5 % where it has 100 steps.
"""

import dataclasses

from mod_jax.config import default_config

VARIANTS = ("dense", "mod", "stochastic", "shallow")


@dataclasses.dataclass(frozen=True)
class Preset:
    """`widths`: by budget in training FLOPs. The peak rate is `rate` at width `reference`."""

    widths: dict[str, tuple[int, ...]]
    rate: float
    reference: int


PRESETS = {
    "tiny": Preset({"1e9": (8, 12, 16, 20), "2e9": (8, 12, 16, 20)}, rate=1e-2, reference=16),
    "cpu": Preset(
        {
            "3e12": (32, 48, 64, 80, 96, 128),
            "1e13": (48, 64, 80, 96, 128, 160),
            "3e13": (64, 80, 96, 128, 160, 192),
        },
        rate=6e-3,
        reference=64,
    ),
    "paper": Preset(
        {
            "6e18": (512, 640, 768, 896, 1024, 1280, 1536),
            "2e19": (640, 768, 896, 1024, 1280, 1536, 1792),
            "1e20": (768, 1024, 1280, 1536, 1792, 2048, 2560),
        },
        rate=1e-3,
        reference=1024,
    ),
}


def get_config(arg="preset=cpu,variant=mod,budget=3e12,width=64"):
    """`arg`: preset, variant, budget and width, and optionally rate, a factor on the rule's learning rate."""
    options = {"rate": "1"} | dict(part.partition("=")[::2] for part in arg.split(","))
    if options.keys() != {"preset", "variant", "budget", "width", "rate"}:
        raise ValueError(f"configs/isoflop.py:{arg}: must give preset, variant, budget, width, and optionally rate")
    if options["preset"] not in PRESETS or options["variant"] not in VARIANTS:
        raise ValueError(
            f"configs/isoflop.py:{arg}: preset is one of {', '.join(PRESETS)}, variant one of {', '.join(VARIANTS)}"
        )
    try:
        width, budget, factor = int(options["width"]), float(options["budget"]), float(options["rate"])
    except ValueError:
        raise ValueError(f"configs/isoflop.py:{arg}: width is an integer, budget and rate are numbers") from None
    preset, variant = PRESETS[options["preset"]], options["variant"]

    config = default_config()
    {"tiny": tiny_scale, "cpu": cpu_scale, "paper": paper_scale}[options["preset"]](config, width)
    depth = blocks(width)
    config.model.update(
        width=width,
        depth=depth // 2 if variant == "shallow" else depth,
        num_heads=heads(width),
        layout="F" if variant in ("dense", "shallow") else "FR",
    )
    if variant != "mod":
        config.routing.update(predictor=False, aux_weight=0.0)
    if variant == "stochastic":
        config.routing.score = "stochastic"
    config.optimizer.learning_rate = factor * preset.rate * preset.reference / width
    config.train.flops = budget
    return config


def blocks(width: int) -> int:
    """L, the depth of the models of this width."""
    return max(4, 2 * round(width / 128))


def heads(width: int) -> int:
    head_dim = 128 if width >= 1280 else 64 if width >= 512 else 32
    return max(1, round(width / head_dim))


def tiny_scale(config, width: int) -> None:
    config.data.update(source="synthetic", seq_len=16, eval_windows=16)
    config.train.update(batch_size=4, log_every=50, eval_every=0, save_every=50)


def cpu_scale(config, width: int) -> None:
    config.model.update(rope_base=500.0, scan=False)
    config.data.eval_windows = 512
    config.train.update(batch_size=4, log_every=50, eval_every=0, save_every=500)


def paper_scale(config, width: int) -> None:
    """What configs/paper.py says, stated there: data, vocabulary, router and schedule."""
    config.model.update(
        vocab_size=32_768,
        activation="gelu",
        tie_embedding=True,
        dtype="bfloat16",
        remat="full" if width >= 1024 else "none",
    )
    config.routing.update(router_input="raw", router_init_scale=1.0, aux_weight=0.01)
    config.data.update(source="tfds:c4/en", tokenizer="sentencepiece:tokenizer.model", seq_len=2048, eval_windows=1024)
    config.optimizer.update(warmup_fraction=0.02, final_fraction=0.1)
    config.train.update(batch_size=128, log_every=50, eval_every=1000, save_every=500)
    if width >= 1280:
        config.mesh.update(data=1, fsdp=-1)
