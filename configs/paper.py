"""The paper's setting, as far as it is stated; every choice it leaves open is marked "ours".

    python -m mod_jax.train --config=configs/paper.py:size=220m --workdir=runs/220m
    python -m mod_jax.train --config=configs/paper.py:size=220m,model=dense,budget=2e19 --workdir=runs/220m-dense

`size`: 60m 120m 220m 400m 1b 3b. `model`: mod (default) or dense. `budget`: training FLOPs, 6e18 (default), 2e19 or
1e20 in the paper. Hardware: a TPU or GPU slice (`python -m mod_jax.plan` says which); not run by us, so there is no
number to expect yet. Needs C4 prepared for TFDS (array_record) and a SentencePiece model at ./tokenizer.model:

    --config.data.source=tfds:c4/en --config.data.tokenizer=sentencepiece:tokenizer.model

or, prepared beforehand and in parallel (docs/data.md), --config.data.source=tokens:FOLDER, which has its tokenizer.

Stated: every other block routed, 12.5 % of 2048 tokens kept, raw router score as the gate, router on the raw residual,
auxiliary loss and predictor for sampling, batch 128 x 2048 tokens, cosine over exactly the training steps. Ours: the
data, the vocabulary, the shapes behind each size, AdamW and its rates, rotary positions, qk-norm, router init,
auxiliary coefficient, and that block 0 is full.
"""

from mod_jax.config import default_config

# size: (width, depth, head_dim, peak rate), all ours; parameters are about 12 * depth * width^2 + 32768 * width.
SHAPES = {
    "60m": (512, 12, 64, 2e-3),
    "120m": (768, 12, 64, 1.5e-3),
    "220m": (1024, 14, 64, 1e-3),
    "400m": (1280, 18, 128, 8e-4),
    "1b": (2048, 18, 128, 5e-4),
    "3b": (2560, 36, 128, 3e-4),
}
MODELS = ("mod", "dense")
# The fastest of three by estimate, as compiled (python -m mod_jax.plan --search), not run: of 60m on v5e:4x4, of 3b on
# v5e:16x16; a smaller slice may need full. Not compared: 120m, none; the others, full.
REMAT = {"60m": "full", "120m": "none", "3b": "dots"}


def get_config(arg="size=220m"):
    options = {"size": "220m", "model": "mod", "budget": "6e18"}
    for part in arg.split(","):
        name, _, value = part.partition("=")
        if name not in options:
            raise ValueError(f"configs/paper.py:{arg}: {name!r} must be one of {', '.join(options)}")
        options[name] = value
    if options["size"] not in SHAPES or options["model"] not in MODELS:
        raise ValueError(
            f"configs/paper.py:{arg}: size is one of {', '.join(SHAPES)}, model one of {', '.join(MODELS)}"
        )
    width, depth, head_dim, learning_rate = SHAPES[options["size"]]
    dense = options["model"] == "dense"

    config = default_config()
    config.model.update(
        vocab_size=32_768,
        width=width,
        depth=depth,
        num_heads=width // head_dim,
        head_dim=head_dim,
        activation="gelu",
        tie_embedding=True,
        dtype="bfloat16",
        layout="F" if dense else "FR",
        remat=REMAT.get(options["size"], "full"),
    )
    config.routing.update(
        capacity=0.125,
        gate="raw",
        router_input="raw",
        router_init_scale=1.0,
        aux_weight=0.0 if dense else 0.01,
        predictor=not dense,
    )
    config.data.update(source="tfds:c4/en", tokenizer="sentencepiece:tokenizer.model", seq_len=2048, eval_windows=1024)
    config.optimizer.update(learning_rate=learning_rate, warmup_fraction=0.02, final_fraction=0.1)
    config.train.update(batch_size=128, flops=float(options["budget"]), log_every=50, eval_every=1000, save_every=500)
    if width >= 1280:
        config.mesh.update(data=1, fsdp=-1)
    return config
