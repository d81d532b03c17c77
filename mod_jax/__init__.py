"""Mixture-of-Depths transformers in JAX and Flax (Raposo et al. 2024, arXiv 2404.02258).

The names below are what scripts and notebooks need; everything else is found in the module that owns it. Training is a
command, `python -m mod_jax.train`, since a run needs a workdir and has to survive being killed.

>>> import mod_jax
>>> config = mod_jax.make_config(**{"model.width": 64, "model.depth": 4, "train.steps": 100})
>>> "".join("R" if block.capacity < 1 else "F" for block in config.blocks)
'FRFR'
>>> dense = mod_jax.make_config(**{"model.width": 64, "model.depth": 4, "model.layout": "F", "train.steps": 100})
>>> cost, whole = (mod_jax.forward_flops(c, vocab_size=257).total for c in (config, dense))
>>> round(cost / whole, 2)  # of one forward pass
0.58

With the workdir of a run, here a tiny one of 12 steps:

>>> model = mod_jax.restore("runs/tiny")
>>> model.step
12
>>> [completion] = mod_jax.generate(model, "def ", max_new_tokens=8, seed=1)
>>> completion.finish_reason
'length'
>>> sampler = mod_jax.Sampler(model, selection="threshold")  # compiled once, kept for many calls
>>> len(sampler.generate(["import ", "class "], temperature=0, max_new_tokens=4))
2
>>> [score] = mod_jax.log_likelihoods(sampler, ["import "], ["os"])
>>> score.log_p < 0, score.num_tokens
(True, 2)
>>> metrics = mod_jax.evaluate_run("runs/tiny").metrics
>>> sorted(name for name in metrics if name.startswith("eval/causal_loss"))
['eval/causal_loss/predictor', 'eval/causal_loss/threshold']
"""

import importlib
import typing

from mod_jax import host

__version__ = "0.1.0"
__all__ = [
    "Choice",
    "Completion",
    "Config",
    "Options",
    "Sampler",
    "TrainedModel",
    "default_config",
    "evaluate_run",
    "forward_flops",
    "generate",
    "log_likelihoods",
    "make_config",
    "make_model",
    "restore",
    "train_flops",
]

host.spare_search_for_tpu()

# Imported at first use: a command reads its flags, and sets up its threads, before JAX starts.
_HOMES = {
    "Config": "config",
    "default_config": "config",
    "make_config": "config",
    "make_model": "models.model",
    "Choice": "models.blocks",
    "forward_flops": "models.flops",
    "train_flops": "models.flops",
    "restore": "trained",
    "TrainedModel": "trained",
    "generate": "sampling",
    "Sampler": "sampling",
    "Options": "sampling",
    "Completion": "sampling",
    "evaluate_run": "evaluation.finished",
    "log_likelihoods": "evaluation.likelihoods",
}
__all__ = list(_HOMES)

if typing.TYPE_CHECKING:
    from mod_jax.config import Config, default_config, make_config
    from mod_jax.evaluation.finished import evaluate_run
    from mod_jax.evaluation.likelihoods import log_likelihoods
    from mod_jax.models.blocks import Choice
    from mod_jax.models.flops import forward_flops, train_flops
    from mod_jax.models.model import make_model
    from mod_jax.sampling import Completion, Options, Sampler, generate
    from mod_jax.trained import TrainedModel, restore


def __getattr__(name: str) -> typing.Any:
    if name not in _HOMES:
        raise AttributeError(f"module mod_jax has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(f"mod_jax.{_HOMES[name]}"), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
