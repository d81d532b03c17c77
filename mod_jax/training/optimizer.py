"""AdamW with named parameter groups, and the learning-rate schedule as a pure function of the step.

Each parameter declares its group (see `sharding.GROUPS`). The predictor's gradient is clipped apart, so that it cannot
scale the language model's gradient through the global norm. What `optimizer.train` leaves out, the *frozen* parameters,
has neither gradient nor moments.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mod_jax.config import OptimizerConfig

ROUTING = "router", "predictor", "predictor_bias"
TRAINED = {"routing": ROUTING, "lora": (*ROUTING, "vector", "lora")}  # groups, by `optimizer.train`


def make_schedule(config: OptimizerConfig, num_steps: int) -> Callable[[jax.Array], jax.Array]:
    """Learning rate at step 0 .. num_steps - 1: linear warm-up that never wastes a step at 0, then a cosine that
    reaches `final_fraction` of the peak at the last step, and stays there beyond."""
    warmup = round(config.warmup_fraction * num_steps)

    def schedule(step: jax.Array) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        progress = jnp.clip((step - warmup) / max(1, num_steps - 1 - warmup), 0.0, 1.0)
        cosine = config.final_fraction + (1 - config.final_fraction) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        rising = (step + 1) / (warmup + 1)
        return config.learning_rate * jnp.where(step < warmup, rising, cosine)

    return schedule


def make_optimizer(config: OptimizerConfig, groups: dict[str, Any]) -> optax.GradientTransformation:
    """Everything between gradient and update except the learning rate, which the step multiplies itself.

    So the rate depends on the step alone, also after skipped updates and across resumes.

    Args:
      groups: the group of each parameter (`Model.groups`).
    """

    def those_in(*names: str):
        return jax.tree.map(lambda group: group in names, groups)

    trunk = "matrix", "vector", "lora"
    predictor = "predictor", "predictor_bias"
    everything = optax.chain(
        optax.masked(optax.clip_by_global_norm(config.clip_norm), those_in("router", *trunk)),
        optax.masked(optax.clip_by_global_norm(config.clip_norm), those_in(*predictor)),
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=those_in("matrix", "lora")),
        optax.add_decayed_weights(config.router_weight_decay, mask=those_in("router", "predictor")),
        optax.masked(optax.scale(config.router_learning_rate_scale), those_in("router", *predictor)),
    )
    if config.train == "all":
        return everything
    trained = is_trained(config, groups)
    others = jax.tree.map(lambda is_one: not is_one, trained)
    return optax.chain(optax.masked(everything, trained), optax.masked(optax.set_to_zero(), others))


def is_trained(config: OptimizerConfig, groups: dict[str, Any]) -> dict[str, Any]:
    """Whether each parameter is one that `optimizer.train` names."""
    return jax.tree.map(lambda group: config.train == "all" or group in TRAINED[config.train], groups)


def split(params: dict[str, Any], config: OptimizerConfig, groups: dict[str, Any]) -> tuple[dict, dict]:
    """(those that are trained, those that are frozen), each a tree like `params` with None in place of the others."""
    trained = is_trained(config, groups)
    return (
        jax.tree.map(lambda is_one, p: p if is_one else None, trained, params),
        jax.tree.map(lambda is_one, p: None if is_one else p, trained, params),
    )


def join(trained: dict[str, Any], frozen: dict[str, Any]) -> dict[str, Any]:
    """Inverse of `split`."""
    return jax.tree.map(lambda t, f: f if t is None else t, trained, frozen, is_leaf=lambda leaf: leaf is None)
