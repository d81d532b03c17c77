"""AdamW with named parameter groups, and the learning-rate schedule as a pure function of the step.

Groups go by name, never by rank: stacking layers turns norm vectors into matrices, and a rule "decay what has two
dimensions" would then decay norms and routers. The predictor's gradient is clipped apart, so that it cannot scale the
language model's gradient through the global norm.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from mod_jax.config import OptimizerConfig

DECAYED = frozenset(
    {"q_DNH", "k_DKH", "v_DKH", "o_NHD", "up_DF", "down_FD", "table_VD", "unembed_DV"},
)
ROUTING_DECAYED = frozenset({"weight_D", "up_DP", "down_P"})


def names(path) -> tuple[str, ...]:
    """The names along a parameter's path: ("units", "blocks", "1", "router", "weight_D")."""
    return tuple(str(getattr(part, "key", part)) for part in path)


def group_of(path) -> str:
    """The parameter's group: "predictor", "router" or "trunk" (all the rest)."""
    parts = names(path)
    return next((group for group in ("predictor", "router") if group in parts), "trunk")


def mask(condition: Callable[[tuple], bool]) -> Callable:
    """A function from a parameter tree to a tree of booleans, by path."""
    return lambda params: jax.tree_util.tree_map_with_path(lambda path, _: condition(path), params)


def is_decayed(path) -> bool:
    """Whether `weight_decay` applies: the trunk's matrices and embeddings; no norm, router or predictor."""
    return group_of(path) == "trunk" and names(path)[-1] in DECAYED


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


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Everything between gradient and update except the learning rate, which the step multiplies itself.

    So the rate depends on the step alone, also after skipped updates and across resumes.
    """
    in_predictor = mask(lambda path: group_of(path) == "predictor")
    not_in_predictor = mask(lambda path: group_of(path) != "predictor")
    in_routing = mask(lambda path: group_of(path) != "trunk")
    decayed_routing = mask(lambda path: group_of(path) != "trunk" and names(path)[-1] in ROUTING_DECAYED)
    return optax.chain(
        optax.masked(optax.clip_by_global_norm(config.clip_norm), not_in_predictor),
        optax.masked(optax.clip_by_global_norm(config.clip_norm), in_predictor),
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=mask(is_decayed)),
        optax.add_decayed_weights(config.router_weight_decay, mask=decayed_routing),
        optax.masked(optax.scale(config.router_learning_rate_scale), in_routing),
    )
