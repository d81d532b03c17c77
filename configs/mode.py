"""Depth and experts together (the paper's section on MoDE), with the controls without which it means nothing.

    python -m mod_jax.train --config=configs/mode.py:integrated --workdir=runs/integrated
    python experiments/mode.py                                     # all of them, three seeds, one table and figure

Models of equal training FLOPs, counted by the MLPs that a token is expected to pass (`models/flops.py`):

  dense       2 full blocks
  mod         4 blocks, every other routed
  moe         2 blocks of 4 experts, one per token
  staged      4 blocks of experts, every other routed: who is bypassed, bypasses attention too
  integrated  2 blocks of 4 experts and 4 no-op experts in one router: attention for all, an MLP for about half
  reduced     control: 2 blocks of 4 experts with slots for half of the tokens; the later ones are dropped
  paced       control: the same, by a quota that does not starve the end of a row
  chosen      2 blocks of experts that choose their tokens, as many as there are
  halfchosen  control: the same with slots for half of the tokens

`:long` trains four times as long. `:paper` is the paper's setting in place of the laptop's (size 220m of
`configs/paper.py`, 16 experts); not run by us. Hardware: two CPU cores, one to two minutes each. Expected
held-out loss by the training rule, mean of three seeds, which differ by up to 0.05: dense 1.728, mod 1.767, moe 1.726,
staged 1.752, integrated 1.725, reduced 1.832, paced 1.790, chosen 1.702, halfchosen 1.718 (experiments/README.md).
"""

from mod_jax.config import default_config

HALF = dict(capacity=0.5)
# variant: (depth, layout, experts)
VARIANTS = {
    "dense": (2, "F", {}),
    "mod": (4, "FR", {}),
    "moe": (2, "E", {}),
    "staged": (4, "Ee", {}),
    "integrated": (2, "E", dict(noop=4, capacity=0.625)),
    "reduced": (2, "E", HALF),
    "paced": (2, "E", dict(overflow="paced", **HALF)),
    "chosen": (2, "E", dict(choice="expert", capacity=1.0, balance_weight=0.0)),
    "halfchosen": (2, "E", dict(choice="expert", balance_weight=0.0, **HALF)),
}
OPTIONS = ("long", "paper")


def get_config(arg="integrated"):
    variant, *options = arg.split(":")
    if variant not in VARIANTS or not set(options) <= set(OPTIONS):
        raise ValueError(
            f"configs/mode.py:{arg}: must be one of {', '.join(VARIANTS)}, optionally with :{' or :'.join(OPTIONS)}"
        )
    depth, layout, experts = VARIANTS[variant]
    config = default_config()
    if "paper" in options:
        paper_scale(config, depth)
        experts = dict(experts, count=16) | ({"noop": 16} if "noop" in experts else {})
    else:
        laptop_scale(config, depth)
        experts = dict(experts, count=4)
    config.model.layout = layout
    config.experts.update(experts)
    if "long" in options:
        config.train.flops *= 4
    if not any(letter in layout for letter in "Re"):
        config.routing.predictor = False
    return config


def laptop_scale(config, depth: int) -> None:
    config.model.update(width=64, num_heads=2, depth=depth, rope_base=500.0, scan=False)
    config.data.eval_windows = 192
    config.optimizer.learning_rate = 6e-3
    config.train.update(batch_size=4, flops=1e12, log_every=50)


def paper_scale(config, depth: int) -> None:
    """Size 220m: 14 blocks for 2 of the laptop's, 28 for 4; the batch over all devices, experts over 16 of them."""
    config.model.update(
        vocab_size=32_768,
        width=1024,
        num_heads=16,
        depth=7 * depth,
        activation="gelu",
        tie_embedding=True,
        dtype="bfloat16",
        remat="full",
    )
    config.experts.balance_weight = 0.01
    config.data.update(source="tfds:c4/en", tokenizer="sentencepiece:tokenizer.model", seq_len=2048, eval_windows=1024)
    config.optimizer.update(learning_rate=1e-3, warmup_fraction=0.02, final_fraction=0.1)
    config.train.update(batch_size=128, flops=6e18, log_every=50, eval_every=1000, save_every=500)
    config.mesh.update(data=-1, expert=16)
