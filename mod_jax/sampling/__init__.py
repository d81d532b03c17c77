"""Causal sampling from trained models: compact caches, prefill, decoding, budgets, and the loop around them."""

from mod_jax.sampling.choice import Options, RequestError
from mod_jax.sampling.generate import CacheOverflowError, Sampler, generate
from mod_jax.sampling.restore import TrainedModel, restore
from mod_jax.sampling.text import Completion

__all__ = [
    "CacheOverflowError",
    "Completion",
    "Options",
    "RequestError",
    "Sampler",
    "TrainedModel",
    "generate",
    "restore",
]
