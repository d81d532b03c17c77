"""Whether a step is finite, and if not, where: one small array of booleans, and the name of each entry.

The step computes the array on the device. Names are put to it on the host, and only after a bad step. The order is that
of the computation, so the first entry that is False is where the trouble was first seen. Vocabulary: L routed blocks.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mod_jax.errors import NumericsError

IN_EACH_BLOCK = ("router scores", "predictor logits", "update", "cut-off")
SHOWN_EXAMPLES = 4


def part_names(depths: tuple[int, ...], state: Any, trained: Any = None) -> list[str]:
    """The name of each entry of `finite_parts`.

    Args:
      depths: of the routed blocks.
      state: the train state, or its shapes.
      trained: those of its parameters that have a gradient; default: all.
    """
    names = [path for path, _ in _float_leaves(state)]
    names += [f"{kind} of block {depth}" for depth in depths for kind in IN_EACH_BLOCK]
    gradients = [f"gradient of {path}" for path, _ in _float_leaves({"params": trained or state.params})]
    return [*names, "loss", *gradients, "norm of the gradient"]


def finite_parts(state: Any, blocks_L4: jax.Array, loss: jax.Array, squares: list[jax.Array]) -> jax.Array:
    """bool, one entry per name of `part_names`.

    Args:
      state: what the step starts from. It is checked in place of what the step gives, which would have to be kept in
        memory until the answer is known. A finite state stays finite under Adam if the gradient is finite.
      blocks_L4: whether each of `IN_EACH_BLOCK` is finite in each routed block.
      squares: the summed squares of each leaf of the gradient.
    """
    gradient = jnp.isfinite(jnp.stack([loss, *squares, sum(squares)]))
    return jnp.concatenate([_finite_leaves(state), blocks_L4.ravel(), gradient])


def check_state(state: Any, what: str) -> None:
    """Checks every leaf of a train state, in every process alike.

    Args:
      what: opens the message, such as "the state after step 7".

    Raises:
      NumericsError: naming the first leaf that holds a number that is not finite.
    """
    finite = np.asarray(jax.jit(_finite_leaves)(state))
    bad = [path for (path, _), good in zip(_float_leaves(state), finite, strict=True) if not good]
    if bad:
        raise NumericsError(f"{what} is not finite: {len(bad)} of {finite.size} arrays, the first is {bad[0]}")


class BadSteps:
    """Follows a streak of bad steps: how long it is, and what was wrong in its first step."""

    def __init__(self, names: list[str], seq_len: int):
        """`names`: of `part_names`. `seq_len`: tokens per example."""
        self._names, self._seq_len = names, seq_len
        self.count = 0  # consecutive bad steps up to the last one added, those before a resume included
        self.longest = 0
        self.first = ""  # describes the first bad step of the newest streak

    def add(self, step: int, parts: np.ndarray, count: int, example_ids_B: np.ndarray) -> bool:
        """Takes a step in its turn; returns whether a streak began.

        Args:
          parts: `finite_parts` of the step.
          count: consecutive bad steps up to this one.
          example_ids_B: of the rows of the batch that this process loaded.
        """
        begins = bool(count) and not self.count
        if begins:
            bad = [name for name, good in zip(self._names, parts, strict=True) if not good]
            also = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            ids = ", ".join(str(i) for i in example_ids_B[:SHOWN_EXAMPLES])
            more = ", ..." if len(example_ids_B) > SHOWN_EXAMPLES else ""
            self.first = (
                f"at step {step}: {bad[0]}{also}; its examples: {ids}{more} "
                f"(example i is the train tokens from {self._seq_len} * i on)"
            )
        self.count, self.longest = count, max(self.longest, count)
        return begins


def _finite_leaves(tree: Any) -> jax.Array:
    """bool per leaf, by its sum: the cheapest pass over it (on a CPU a seventh of asking each number)."""
    return jnp.stack([jnp.isfinite(jnp.sum(leaf)) for _, leaf in _float_leaves(tree)])


def _float_leaves(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf of floats, such as ("params/embedder/table_VD", array)."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size
    ]
