"""The comparison at the scale of a laptop: dense, routed and randomly routed at equal training FLOPs, on real text.

python -m mod_jax.train --config=configs/cpu_demo.py:mod --workdir=runs/mod
"""

from mod_jax.config import default_config

VARIANTS = {
    "dense": dict(depth=2, layout="F"),
    "mod": dict(depth=4, layout="FR"),
    "stochastic": dict(depth=4, layout="FR"),
    "every": dict(depth=4, layout="R"),
}


def get_config(arg="mod"):
    """`arg`: dense | mod | stochastic | every (all blocks routed), with `:long` for four times the FLOPs."""
    variant, *rest = arg.split(":")
    if variant not in VARIANTS or rest not in ([], ["long"]):
        raise ValueError(f"configs/cpu_demo.py:{arg}: must be one of {', '.join(VARIANTS)}, optionally with :long")
    config = default_config()
    config.model.update(width=64, num_heads=2, rope_base=500.0, scan=False, **VARIANTS[variant])
    config.data.eval_windows = 192
    config.optimizer.learning_rate = 6e-3
    config.train.update(batch_size=4, flops=4e12 if rest else 1e12, log_every=50)
    if variant == "dense":
        config.routing.predictor = False
    if variant in ("mod", "every"):
        config.routing.aux_weight = 0.1  # trains the causal selection `router` too
    if variant == "stochastic":
        config.routing.update(score="stochastic", predictor=False)
    return config
