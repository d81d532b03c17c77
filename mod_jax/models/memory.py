"""Tokens, what they leave behind for later tokens, and the places where that is kept.

A mixer (see `blocks`) turns each token into a query and an *item*, which is all that later tokens will ever see of it:
for attention, a key and a value. A *memory* takes items and shows them:

    seen, memory = memory.append(items, tokens)

`seen` is what the tokens just appended may look at. There are two memories. `Present` holds nothing: tokens see those
of the same call, as in training. `Slots` is a cache: it keeps the items of each row in order of arrival, with their
positions. Two views of `Slots` append in another way: `for_prompts` and `rows`. `Filled` shows what was appended
before.

Invariants:
- Tokens with segment 0 are not there. They leave nothing, and nobody sees them.
- A slot says when an item arrived, never its position, which is stored beside it. A block that sees every token and a
  routed block, which sees few, therefore have the same kind of cache.
- Arrays of items have the shape [B, ..., T, H]: the rows first, the tokens (or slots) last but one. For attention that
  is [B, K, S, H], which XLA's CPU code reads 13 times faster than [B, S, K, H].
- Appending to full slots changes nothing but `lengths_B`, which then exceeds S: nothing is lost in silence.

Vocabulary: B rows, R of these rows, T new tokens, S slots, K key/value heads, H head dim.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mod_jax.models.layers import RotaryAngles, rotary_angles
from mod_jax.sharding import in_groups

EMPTY = -1  # position of an unused slot


class Tokens(NamedTuple):
    """What stays with each token on its way through the blocks: position, segment, and the angles of its position.

    `positions_BT` and `segments_BT` are int32 [B, T]. A segment is the token's document in its row, from 1; 0 means
    that there is no token: padding, an empty slot, or a row that is finished.
    """

    positions_BT: jax.Array
    segments_BT: jax.Array
    angles: RotaryAngles


def make_tokens(
    positions_BT: jax.Array,
    segments_BT: jax.Array,
    head_dim: int,
    rope_base: float,
    rope_factors: Sequence[float] = (),
) -> Tokens:
    """Tokens at these positions, with the rotary angles that every block applies: sines are dear, so made once."""
    return Tokens(positions_BT, segments_BT, rotary_angles(positions_BT, head_dim, rope_base, rope_factors))


class Seen(NamedTuple):
    """Items of S tokens to look at, by position and segment.

    `segments_BS` is None where each row is one document. `same_tokens` says that the S tokens are the T that look, in
    the same order.
    """

    items: Any
    positions_BS: jax.Array
    segments_BS: jax.Array | None
    same_tokens: bool

    def is_visible_to(self, tokens: Tokens) -> jax.Array:
        """Which of the S tokens each of the T may see, bool [B, T, S]: there, not later, and of the same document."""
        return is_visible(tokens.positions_BT, self.positions_BS, tokens.segments_BT, self.segments_BS)


def is_visible(q_positions_BT, kv_positions_BS, q_segments_BT, kv_segments_BS) -> jax.Array:
    """0 <= kv_position <= q_position, and both share a segment > 0 unless `kv_segments_BS` is None. bool [B, T, S]."""
    kv_positions_B1S = kv_positions_BS[:, None]
    visible_BTS = (kv_positions_B1S >= 0) & (kv_positions_B1S <= q_positions_BT[..., None])
    if kv_segments_BS is not None:
        kv_segments_B1S = kv_segments_BS[:, None]
        visible_BTS &= (q_segments_BT[..., None] == kv_segments_B1S) & (kv_segments_B1S > 0)
    return visible_BTS


class Present(NamedTuple):
    """The memory that keeps nothing: each token sees the tokens of the same call. Also of a block without a mixer."""

    def append(self, items: Any, tokens: Tokens) -> tuple[Seen, "Present"]:
        return Seen(items, tokens.positions_BT, tokens.segments_BT, True), self

    def for_prompts(self) -> "Present":
        return self

    def rows(self, rows_R: jax.Array) -> "Present":
        return self


class Slots(NamedTuple):
    """A cache of one block: row b uses slots 0 .. lengths_B[b] - 1.

    `items` has arrays [B, ..., S, H]. `positions_BS` is int32, EMPTY where unused. `lengths_B` is int32, and more than
    S if tokens found no slot.
    """

    items: Any
    positions_BS: jax.Array
    lengths_B: jax.Array

    def append(self, items: Any, tokens: Tokens) -> tuple[Seen, "Slots"]:
        """Writes each row's tokens, of which those that are there come first, behind the row's last one."""
        is_there_BT = tokens.segments_BT > 0
        offsets_1T = jnp.arange(is_there_BT.shape[1], dtype=jnp.int32)[None]
        # Out of bounds, where it is dropped, for what is not there.
        slots_BT = jnp.where(is_there_BT, self.lengths_B[:, None] + offsets_1T, self.positions_BS.shape[1])
        write = jax.vmap(lambda old, new, slots_T: old.at[..., slots_T, :].set(new, mode="drop"))
        slots = Slots(
            jax.tree.map(lambda old, new: write(old, new, slots_BT), self.items, items),
            write(self.positions_BS[..., None], tokens.positions_BT[..., None], slots_BT)[..., 0],
            self.lengths_B + jnp.sum(is_there_BT, axis=1, dtype=jnp.int32),
        )
        return slots.seen(), slots

    def seen(self) -> Seen:
        """Everything in the slots. Each row is one document."""
        return Seen(self.items, self.positions_BS, None, False)

    def for_prompts(self) -> "EmptySlots":
        """A view for appending whole prompts, only while the slots are empty."""
        return EmptySlots(self)

    def rows(self, rows_R: jax.Array) -> "SomeRows":
        """A view for appending one token to each of these rows (different ones; B stands for no row)."""
        return SomeRows(self, rows_R)

    def forget_after(self, last_position_B: jax.Array) -> "Slots":
        """Drops every token behind each row's `last_position_B`: they are the last in its slots."""
        kept_BS = (self.positions_BS >= 0) & (self.positions_BS <= last_position_B[:, None])
        positions_BS = jnp.where(kept_BS, self.positions_BS, EMPTY)
        return self._replace(positions_BS=positions_BS, lengths_B=jnp.sum(kept_BS, axis=1, dtype=jnp.int32))

    def grow(self, num_slots: int) -> "Slots":
        """The same contents with `num_slots` slots per row, at least as many as now."""
        more = num_slots - self.positions_BS.shape[1]

        def pad(array, axis, value=0):
            return jnp.pad(array, [(0, more * (i == axis)) for i in range(array.ndim)], constant_values=value)

        items = jax.tree.map(lambda array: pad(array, array.ndim - 2), self.items)
        return Slots(items, pad(self.positions_BS, 1, EMPTY), self.lengths_B)


class EmptySlots(NamedTuple):
    """`Slots` that hold nothing yet. Prompts see themselves alone, and are written at once, at slots 0, 1, ..."""

    slots: Slots

    def append(self, items: Any, tokens: Tokens) -> tuple[Seen, Slots]:
        T = tokens.positions_BT.shape[1]
        is_there_BT = tokens.segments_BT > 0
        slots = Slots(
            jax.tree.map(lambda old, new: old.at[..., :T, :].set(new), self.slots.items, items),
            self.slots.positions_BS.at[:, :T].set(jnp.where(is_there_BT, tokens.positions_BT, EMPTY)),
            jnp.sum(is_there_BT, axis=1, dtype=jnp.int32),
        )
        return Present().append(items, tokens)[0], slots


class SomeRows(NamedTuple):
    """Some rows of `Slots`. What is appended is written into the whole, which comes back.

    An index of a row counts from the first of its group, where a mesh splits rows (see `sharding.in_groups`).
    """

    whole: Slots
    rows_R: jax.Array

    def append(self, items: Any, tokens: Tokens) -> tuple[Seen, Slots]:
        def run(whole, rows_R, items, positions_R):
            slots_R = whole.lengths_B.at[rows_R].get(mode="fill", fill_value=0)

            def write(old, new):
                between = (slice(None),) * (old.ndim - 3)
                return old.at[(rows_R, *between, slots_R)].set(new[..., 0, :], mode="drop")

            new = Slots(
                jax.tree.map(write, whole.items, items),
                whole.positions_BS.at[rows_R, slots_R].set(positions_R, mode="drop"),
                whole.lengths_B.at[rows_R].add(1, mode="drop"),
            )
            return jax.tree.map(lambda array: array.at[rows_R].get(mode="clip"), new), new

        some, new = in_groups(run)(self.whole, self.rows_R, items, tokens.positions_BT[:, 0])
        return some.seen(), new


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Filled:
    """What tokens see that have left their items already: those who are appended only look.

    For a routed block whose bypassed tokens leave their items too, so that all were appended before some look.
    """

    items: Any
    positions_BS: jax.Array
    segments_BS: jax.Array | None
    same_tokens: bool = dataclasses.field(metadata=dict(static=True))

    def append(self, items: Any, tokens: Tokens) -> tuple[Seen, "Filled"]:
        # Only the very tokens that left the items stand in their order: gathered ones are others, in the program too.
        same_tokens = self.same_tokens and tokens.positions_BT is self.positions_BS
        return Seen(self.items, self.positions_BS, self.segments_BS, same_tokens), self

    def rows(self, rows_R: jax.Array) -> "FilledRows":
        return FilledRows(self, rows_R)


class FilledRows(NamedTuple):
    """Some rows of `Filled` (B stands for no row)."""

    whole: Filled
    rows_R: jax.Array

    def append(self, items: Any, tokens: Tokens) -> tuple[Seen, Filled]:
        take = in_groups(lambda array, rows_R: array.at[rows_R].get(mode="clip"))
        some = jax.tree.map(lambda array: take(array, self.rows_R), self.whole)
        return Seen(some.items, some.positions_BS, some.segments_BS, False), self.whole


Memory = Present | Slots | EmptySlots | SomeRows | Filled | FilledRows
