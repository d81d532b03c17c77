"""The leaves of a train state as a checkpoint knows them: by path, "params/embed/w", each in one item on disk."""

from typing import Any

import jax
import jax.numpy as jnp

from mod_jax.errors import CheckpointMismatch


def flatten(tree: Any) -> dict[str, Any]:
    """Leaves by path, in tree order: {"params/embed/w": leaf}. Saved flat, a step is exactly what its record lists."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def items(leaves: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What goes into each item on disk. Orbax refuses what is empty: such leaves stand in the record alone."""
    grouped: dict[str, dict[str, Any]] = {}
    for path, leaf in leaves.items():
        if leaf.size:
            grouped.setdefault(item(path), {})[path] = leaf
    return grouped


def empty(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=leaf.sharding)()


def item(path: str) -> str:
    return "params" if path.split("/")[0] == "params" else "rest"


def describe(leaves: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {path: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for path, leaf in leaves.items()}


def check_abstract(tree: Any) -> None:
    """Raises ValueError for a leaf without sharding, lest the caller's slip be taken for a damaged step."""
    for path, leaf in flatten(tree).items():
        if getattr(leaf, "sharding", None) is None:
            raise ValueError(f"abstract leaf {path} must have a sharding; found {leaf}")


def check_structure(step: int, saved: dict[str, dict], wanted: dict[str, dict], shown: int = 5) -> None:
    """Raises CheckpointMismatch unless both describe the same leaves."""
    differing = [path for path in {**wanted, **saved} if saved.get(path) != wanted.get(path)]
    if not differing:
        return

    def text(leaf):
        return f"{leaf['dtype']}{leaf['shape']}" if leaf else "absent"

    lines = [f"  {path}: {text(saved.get(path))} -> {text(wanted.get(path))}" for path in differing[:shown]]
    if len(differing) > shown:
        lines.append(f"  and {len(differing) - shown} more")
    raise CheckpointMismatch(f"step {step} is of another model (checkpoint -> model):\n" + "\n".join(lines))
