"""How the next token is chosen from logits, and what a caller may ask for.

Vocabulary: B rows, V vocabulary. *Knobs* are temperature, top-k and top-p as arrays, so that other values need no other
program. Randomness: token n of row b draws from `fold_in(fold_in(key(seed), b), n)`, whatever else is in the batch.
"""

import dataclasses
import numbers
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mod_jax.errors import RequestError

MAX_TOP_K = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Options:
    """What a caller may ask for, checked.

    Attributes:
      max_new_tokens: per prompt; None: up to the model's context.
      temperature: 0 is greedy, exactly: the first of the largest logits.
      top_k: only the k likeliest tokens; None: all.
      top_p: only the likeliest tokens whose probabilities, before the last of them, sum to less than p.
      stop_tokens: ids that end a completion, beside the separator, which always does.
      stop_strings: texts that end a completion; they are not part of it.
      truncate: keep the end of a prompt that is too long for the context; otherwise it is refused.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    truncate: bool = False

    def __post_init__(self):
        _check_number("temperature", self.temperature, "a finite number >= 0", lambda x: x >= 0)
        _check_number("top_p", self.top_p, "a number in (0, 1]", lambda x: 0 < x <= 1)
        _check_integer("seed", self.seed, f"an integer in [0, {2**31 - 1}]", lambda x: 0 <= x < 2**31)
        if self.top_k is not None:
            _check_integer("top_k", self.top_k, "None (all tokens) or an integer >= 1", lambda x: x >= 1)
        if self.max_new_tokens is not None:
            expected = "None (up to the context) or an integer >= 1"
            _check_integer("max_new_tokens", self.max_new_tokens, expected, lambda x: x >= 1)
        if isinstance(self.stop_tokens, str | bytes) or not isinstance(self.stop_tokens, Sequence):
            raise RequestError(f"stop_tokens = {self.stop_tokens!r}: must be a list of token ids")
        if isinstance(self.stop_strings, str) or not isinstance(self.stop_strings, Sequence):
            raise RequestError(f"stop_strings = {self.stop_strings!r}: must be a list of strings")
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop_strings: {text!r} must be a string that is not empty")

    def knobs(self) -> "Knobs":
        top_k = min(self.top_k or MAX_TOP_K, MAX_TOP_K)
        return Knobs(jnp.float32(self.temperature), jnp.int32(top_k), jnp.float32(self.top_p))


class Knobs(NamedTuple):
    """Scalars, shared by the rows of a batch."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array


def row_keys(seed: int, num_rows: int) -> jax.Array:
    """One random key per row. [B]."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(num_rows))


def choose(logits_BV: jax.Array, knobs: Knobs, keys_B: jax.Array) -> jax.Array:
    """The next token of each row, int32 [B]."""

    def sampled():
        # The Gumbel-max trick, written out so that equal draws give equal tokens on every version of JAX.
        noise_BV = jax.vmap(lambda key: jax.random.gumbel(key, logits_BV.shape[1:]))(keys_B)
        return jnp.argmax(adjust(logits_BV, knobs) + noise_BV, axis=-1)

    def greedy():
        return jnp.argmax(logits_BV, axis=-1)

    return jax.lax.cond(knobs.temperature > 0, sampled, greedy).astype(jnp.int32)


def adjust(logits_BV: jax.Array, knobs: Knobs) -> jax.Array:
    """Logits of the distribution to sample from, at a temperature > 0: -inf where top-k or top-p exclude a token."""
    # Relative to the largest, so that a tiny temperature cannot overflow.
    logits_BV = logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)
    logits_BV = logits_BV / jnp.maximum(knobs.temperature, 1e-20)

    def restricted():
        keep_BV = jax.vmap(_kept, (0, None, None))(logits_BV, knobs.top_k, knobs.top_p)
        return jnp.where(keep_BV, logits_BV, -jnp.inf)

    unrestricted = (knobs.top_k >= logits_BV.shape[1]) & (knobs.top_p >= 1)
    return jax.lax.cond(unrestricted, lambda: logits_BV, restricted)


def probabilities(logits_BTV: jax.Array, knobs: Knobs) -> jax.Array:
    """What `choose` draws from, as probabilities [B, ..., V]: at temperature 0 all of it is on one token."""
    flat_MV = logits_BTV.reshape(-1, logits_BTV.shape[-1])

    def soft():
        return jax.nn.softmax(adjust(flat_MV, knobs), axis=-1)

    def greedy():
        return jax.nn.one_hot(jnp.argmax(flat_MV, axis=-1), flat_MV.shape[1], dtype=flat_MV.dtype)

    return jax.lax.cond(knobs.temperature > 0, soft, greedy).reshape(logits_BTV.shape)


def _kept(logits_V: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Which tokens top-k and top-p leave, of one row: always the likeliest; of equal ones the lower ids first."""
    order_V = jnp.argsort(logits_V, descending=True, stable=True)
    probs_V = jax.nn.softmax(logits_V[order_V])
    before_V = jnp.cumsum(probs_V) - probs_V
    rank_V = jnp.arange(logits_V.shape[0])
    keep_V = (rank_V == 0) | ((rank_V < top_k) & (before_V < top_p))
    return jnp.zeros(logits_V.shape, bool).at[order_V].set(keep_V)


def _check_number(name, value, expected, allowed) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not -sys.float_info.max <= value <= sys.float_info.max or not allowed(value):  # NaN fails too
        raise RequestError(f"{name} = {value!r}: must be {expected}")


def _check_integer(name, value, expected, allowed) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not allowed(value):
        raise RequestError(f"{name} = {value!r}: must be {expected}")
