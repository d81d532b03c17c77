"""Low-rank additions to weight matrices (LoRA, Hu et al. 2021): W + (alpha / rank) A B, with B zero at the start.

They stand beside the weights that they are added to, as `params["lora"]`: the same tree, with {"a": A, "b": B} where a
matrix is. `merged` makes plain weights of both, so that no block knows of them. Every matrix inside blocks has an
addition; embeddings have none. Vocabulary: R rank.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mod_jax.config import OptimizerConfig

STACKED = ("layers", "experts")  # axes along which each matrix has an addition of its own
LORA_STREAM = 2  # of the seed; 0 draws the initial weights, 1 is routing's


class Addition(NamedTuple):
    """Shapes and logical axes of one addition, and the product of its factors as an einsum."""

    shapes: dict[str, tuple[int, ...]]
    axes: dict[str, PartitionSpec]
    product: str


def additions(abstract_params: dict[str, Any], specs: dict[str, Any], groups: dict[str, Any], rank: int):
    """The tree of all `Addition`s; None for what has none."""
    inside = {name: part for name, part in abstract_params.items() if name != "embedder"}

    def plan(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec, group: str) -> Addition | None:
        return _plan(leaf.shape, tuple(spec), rank) if group == "matrix" else None

    trees = ({name: tree[name] for name in inside} for tree in (specs, groups))
    return jax.tree.map(plan, inside, *trees)


def _plan(shape: tuple[int, ...], axes: tuple[str | None, ...], rank: int) -> Addition:
    """A matrix maps the residual stream ("embed") to the rest of its axes, or the rest to the stream."""
    axes += (None,) * (len(shape) - len(axes))
    first = sum(axis in STACKED for axis in axes)
    last = len(shape) - 1 if axes[-1] == "embed" and axes[first] != "embed" else first + 1
    letters = "abcdefgh"[: len(shape)]
    a, b = letters[:last] + "r", letters[:first] + "r" + letters[last:]
    return Addition(
        shapes={"a": (*shape[:last], rank), "b": (*shape[:first], rank, *shape[last:])},
        axes={
            "a": PartitionSpec(*axes[:last], None),
            "b": PartitionSpec(*axes[:first], None, *axes[last:]),
        },
        product=f"{a},{b}->{letters}",
    )


def _of_each(plans: Any, make) -> Any:
    return jax.tree.map(make, plans, is_leaf=lambda plan: isinstance(plan, Addition))


def abstract(plans: Any) -> dict[str, Any]:
    def shapes(plan: Addition):
        return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in plan.shapes.items()}

    return _of_each(plans, shapes)


def logical_specs(plans: Any) -> dict[str, Any]:
    return _of_each(plans, lambda plan: plan.axes)


def groups(plans: Any) -> dict[str, Any]:
    return _of_each(plans, lambda plan: dict.fromkeys(plan.shapes, "lora"))


def init(plans: Any, seed: int) -> dict[str, Any]:
    """A: normal, such that A x has the size of x. B: zero."""
    key, count = jax.random.fold_in(jax.random.key(seed), LORA_STREAM), iter(range(2**31))

    def draw(plan: Addition) -> dict[str, jax.Array]:
        stacked = len(plan.product.split(",")[1].split("r")[0])
        size_in = math.prod(plan.shapes["a"][stacked:-1])
        a = jax.random.normal(jax.random.fold_in(key, next(count)), plan.shapes["a"], jnp.float32) * size_in**-0.5
        return {"a": a, "b": jnp.zeros(plan.shapes["b"], jnp.float32)}

    return _of_each(plans, draw)


def merged(params: dict[str, Any], plans: Any, config: OptimizerConfig) -> dict[str, Any]:
    """Plain weights: each matrix with its addition in it."""
    scale, plain = config.lora_alpha / config.lora_rank, {n: part for n, part in params.items() if n != "lora"}

    def add(weight: jax.Array, plan: Addition | None, factors: dict[str, jax.Array] | None) -> jax.Array:
        return weight if plan is None else weight + scale * jnp.einsum(plan.product, factors["a"], factors["b"])

    inside = {name: plain[name] for name in plans}
    return plain | jax.tree.map(add, inside, plans, params["lora"])
