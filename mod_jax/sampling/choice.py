"""How the next token is chosen from logits, and what a caller may ask for.

Vocabulary: B rows, V vocabulary. *Knobs* are temperature, top-k and top-p of each row as arrays, so that other values
need no other program. Randomness: token n of a row draws from `fold_in(key, n)`, where `key` is made of the row's own
seed and of its prompt. So a row's text depends on its prompt and its options, never on its place in the batch or on
what else is in it; and different prompts draw independently, whatever their seeds.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import reprlib
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mod_jax.errors import RequestError

MAX_TOP_K = 2**31 - 1
MAX_TEMPERATURE = 1e38  # in float32; all logits are equal long before


@dataclasses.dataclass(frozen=True)
class Options:
    """What a caller may ask for, checked.

    Attributes:
      max_new_tokens: None: up to the model's context.
      temperature: 0 is greedy, exactly: the first of the largest logits.
      top_k: only the k likeliest tokens; None: all.
      top_p: only the likeliest tokens whose probabilities, before the last of them, sum to less than p.
      seed: of the random choices, in [0, 2**31). The same prompt with the same options gives the same text: to get
        several texts for one prompt, give each its own seed.
      stop_tokens: ids that end a completion, beside the separator, which always does.
      stop_strings: texts that end a completion; they are not part of it.
      truncate: keep the end of a prompt that is too long for the context; otherwise it is refused.

    Raises:
      RequestError: naming the option, its value and what is allowed.
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
        check_integer("seed", self.seed, f"an integer in [0, {2**31 - 1}]", lambda x: 0 <= x < 2**31)
        if self.top_k is not None:
            check_integer("top_k", self.top_k, "None (all tokens) or an integer >= 1", lambda x: x >= 1)
        if self.max_new_tokens is not None:
            expected = "None (up to the context) or an integer >= 1"
            check_integer("max_new_tokens", self.max_new_tokens, expected, lambda x: x >= 1)
        if isinstance(self.stop_tokens, str | bytes) or not isinstance(self.stop_tokens, Sequence | np.ndarray):
            raise RequestError(f"stop_tokens = {shown(self.stop_tokens)}: must be a list of token ids")
        if isinstance(self.stop_strings, str | bytes) or not isinstance(self.stop_strings, Sequence):
            raise RequestError(f"stop_strings = {shown(self.stop_strings)}: must be a list of strings")
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop_strings: {shown(text)} must be a string that is not empty")
        if not isinstance(self.truncate, bool):
            raise RequestError(f"truncate = {shown(self.truncate)}: must be True or False")


OPTION_NAMES = tuple(field.name for field in dataclasses.fields(Options))


def make_options(options: Options | Sequence[Options] | None, changes: dict, num_prompts: int) -> list[Options]:
    """The options of each prompt, from one for all, one per prompt, or keyword arguments that stand for one.

    Raises:
      RequestError: for a keyword that is no option, and where the number of options is not that of the prompts.
    """
    for name in changes:
        if name not in OPTION_NAMES:
            near = difflib.get_close_matches(name, OPTION_NAMES, n=1)
            raise RequestError(
                f"{name}: no such option; "
                + (f"did you mean {near[0]}?" if near else f"there are {', '.join(OPTION_NAMES)}")
            )
    if options is not None and changes:
        raise RequestError(f"{next(iter(changes))}: give it within options, or leave options out")
    if options is None or isinstance(options, Options):
        return [options or Options(**changes)] * num_prompts
    if not isinstance(options, Sequence) or not all(isinstance(option, Options) for option in options):
        raise RequestError(f"options = {shown(options)}: must be Options, or a list with one per prompt")
    if len(options) != num_prompts:
        raise RequestError(f"options: {len(options)} for {num_prompts} prompts; give one for all, or one per prompt")
    return list(options)


class Knobs(NamedTuple):
    """One entry per row: float32 temperature, int32 top-k (MAX_TOP_K: all tokens), float32 top-p."""

    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array


def make_knobs(options: Sequence[Options]) -> Knobs:
    """The knobs of a batch whose rows have these options."""
    return Knobs(
        np.array([min(o.temperature, MAX_TEMPERATURE) for o in options], np.float32),
        np.array([min(o.top_k or MAX_TOP_K, MAX_TOP_K) for o in options], np.int32),
        np.array([o.top_p for o in options], np.float32),
    )


def row_keys(seeds: Sequence[int], prompt_ids: Sequence[np.ndarray]) -> jax.Array:
    """One random key per row, of its own seed and prompt alone. [B]."""
    hashes = [zlib.crc32(np.ascontiguousarray(ids)) for ids in prompt_ids]
    return _fold_in(np.array(seeds, np.uint32), np.array(hashes, np.uint32))


@jax.jit
def _fold_in(seeds_B: jax.Array, hashes_B: jax.Array) -> jax.Array:
    return jax.vmap(lambda seed, hashed: jax.random.fold_in(jax.random.key(seed), hashed))(seeds_B, hashes_B)


def choose(logits_BV: jax.Array, knobs: Knobs, keys_B: jax.Array) -> jax.Array:
    """The next token of each row, int32 [B]."""

    def sampled():
        # The Gumbel-max trick, written out so that equal draws give equal tokens on every version of JAX.
        noise_BV = jax.vmap(lambda key: jax.random.gumbel(key, logits_BV.shape[1:]))(keys_B)
        drawn_B = jnp.argmax(adjust(logits_BV, knobs) + noise_BV, axis=-1)
        return jnp.where(knobs.temperature_B > 0, drawn_B, greedy())

    def greedy():
        return jnp.argmax(logits_BV, axis=-1)

    return jax.lax.cond(jnp.any(knobs.temperature_B > 0), sampled, greedy).astype(jnp.int32)


def adjust(logits_BV: jax.Array, knobs: Knobs) -> jax.Array:
    """Logits of the distribution to sample from, at a temperature > 0: -inf where top-k or top-p exclude a token."""
    # Relative to the largest, so that a tiny temperature cannot overflow.
    logits_BV = logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)
    logits_BV = logits_BV / jnp.maximum(knobs.temperature_B, 1e-20)[:, None]

    def restricted():
        keep_BV = jax.vmap(_kept)(logits_BV, knobs.top_k_B, knobs.top_p_B)
        return jnp.where(keep_BV, logits_BV, -jnp.inf)

    unrestricted = jnp.all((knobs.top_k_B >= logits_BV.shape[1]) & (knobs.top_p_B >= 1))
    return jax.lax.cond(unrestricted, lambda: logits_BV, restricted)


def probabilities(logits_BTV: jax.Array, knobs: Knobs) -> jax.Array:
    """What `choose` draws from, as probabilities [B, ..., V]: at temperature 0 all of it is on one token."""
    flat_MV = logits_BTV.reshape(-1, logits_BTV.shape[-1])
    knobs = jax.tree.map(lambda knob_B: jnp.repeat(knob_B, flat_MV.shape[0] // knob_B.shape[0]), knobs)

    def soft():
        return jnp.where(knobs.temperature_B[:, None] > 0, jax.nn.softmax(adjust(flat_MV, knobs), axis=-1), greedy())

    def greedy():
        return jax.nn.one_hot(jnp.argmax(flat_MV, axis=-1), flat_MV.shape[1], dtype=flat_MV.dtype)

    return jax.lax.cond(jnp.any(knobs.temperature_B > 0), soft, greedy).reshape(logits_BTV.shape)


def _kept(logits_V: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Which tokens top-k and top-p leave, of one row: always the likeliest; of equal ones the lower ids first."""
    order_V = jnp.argsort(logits_V, descending=True, stable=True)
    probs_V = jax.nn.softmax(logits_V[order_V])
    before_V = jnp.cumsum(probs_V) - probs_V
    rank_V = jnp.arange(logits_V.shape[0])
    # The sum may round to 1 before the last token: without top-p all are kept, whatever a row's batch mates ask for.
    keep_V = (rank_V == 0) | ((rank_V < top_k) & ((before_V < top_p) | (top_p >= 1)))
    return jnp.zeros(logits_V.shape, bool).at[order_V].set(keep_V)


def shown(value) -> str:
    """The value as an error message shows it: short, however large it is."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"<{type(value).__name__} too large to show>"


def _check_number(name, value, expected, allowed) -> None:
    try:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(float(value))
    except OverflowError:  # an integer beyond every float
        is_number = False
    if not is_number or not allowed(float(value)):
        raise RequestError(f"{name} = {shown(value)}: must be {expected}")


def check_integer(name, value, expected, allowed) -> None:
    """Raises RequestError unless `value` is an integer, and `allowed(value)`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not allowed(value):
        raise RequestError(f"{name} = {shown(value)}: must be {expected}")
