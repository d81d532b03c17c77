"""Causal sampling from trained models: compact caches, prefill, decoding, budgets, and the loop around them."""

from mod_jax.errors import CacheOverflowError, RequestError
from mod_jax.sampling.choice import Options
from mod_jax.sampling.generate import Sampler, generate
from mod_jax.sampling.text import Completion, Prompt
from mod_jax.trained import TrainedModel, restore

__all__ = [
    "CacheOverflowError",
    "Completion",
    "Options",
    "Prompt",
    "RequestError",
    "Sampler",
    "TrainedModel",
    "generate",
    "restore",
]
