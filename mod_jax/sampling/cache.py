"""Key/value caches: one per block, compact where the block is routed.

Vocabulary: B rows, K key/value heads, S slots, H head dim. A full block sees every token, so its slot is the token's
position. A routed block stores only the tokens that it computed on, in order of arrival: its slot says nothing about
the position, which is stored beside it, and each row has its own *length*, the number of slots in use. Layout
[B, K, S, H]: XLA's CPU code reads it 13 times faster than [B, S, K, H].

How many tokens a routed block will select is decided token by token, so no size is always enough. Writing beyond the
last slot changes nothing but the length, which then exceeds S: `overflowed` tells, and nothing is lost in silence.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mod_jax import routing
from mod_jax.config import Config

SLACK = 1.08  # over the expected count: with half of the blocks routed at 12.5 %, 0.57 of a dense model's memory
GROWTH = 1.5  # of the slots, each time that some row needs more
SLOT_MULTIPLE = 8

EMPTY = -1  # position of an unused slot


class FullCache(NamedTuple):
    """Of a full block: slot = position. Slots beyond a row's last token hold anything; masks by position hide them."""

    k_BKSH: jax.Array
    v_BKSH: jax.Array


class RoutedCache(NamedTuple):
    """Of a routed block: row b uses slots 0 .. lengths_B[b] - 1, its selected tokens in order of position."""

    k_BKSH: jax.Array
    v_BKSH: jax.Array
    positions_BS: jax.Array  # int32; EMPTY where unused
    lengths_B: jax.Array  # int32; more than S if tokens found no slot


BlockCache = FullCache | RoutedCache
Cache = tuple[BlockCache, ...]  # by depth


def routed_slots(num_positions: int, capacity: float, growth: int = 0) -> int:
    """S of a routed block for rows of up to `num_positions` tokens; `growth` counts how often it had to grow."""
    kept = routing.tokens_kept(num_positions, capacity)
    slots = math.ceil(kept * SLACK * GROWTH**growth / SLOT_MULTIPLE) * SLOT_MULTIPLE
    return min(slots, num_positions)


def slot_counts(
    config: Config, num_positions: int, capacity_L: tuple[float, ...] | None = None, growth: int = 0
) -> tuple[int, ...]:
    """Slots of each block, by depth. `capacity_L`: expected fraction per routed block; default: the config's."""
    capacities = iter(capacity_L or [block.capacity for block in config.blocks if block.kind == "R"])
    return tuple(
        num_positions if block.kind == "F" else routed_slots(num_positions, next(capacities), growth)
        for block in config.blocks
    )


def init_cache(config: Config, batch_size: int, slots: tuple[int, ...]) -> Cache:
    """An empty cache with `slots[depth]` slots per row and block."""
    model = config.model

    def empty(block, num_slots):
        shape = (batch_size, model.num_kv_heads, num_slots, model.head_dim)
        k_BKSH, v_BKSH = jnp.zeros(shape, model.dtype), jnp.zeros(shape, model.dtype)
        if block.kind == "F":
            return FullCache(k_BKSH, v_BKSH)
        positions_BS = jnp.full((batch_size, num_slots), EMPTY, jnp.int32)
        return RoutedCache(k_BKSH, v_BKSH, positions_BS, jnp.zeros(batch_size, jnp.int32))

    return tuple(empty(block, num_slots) for block, num_slots in zip(config.blocks, slots, strict=True))


def cache_bytes(config: Config, batch_size: int, slots: tuple[int, ...]) -> int:
    """Bytes of such a cache, counted from its arrays."""
    shapes = jax.eval_shape(lambda: init_cache(config, batch_size, slots))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def append(cache: RoutedCache, rows_M: jax.Array, k_MKH, v_MKH, positions_M: jax.Array) -> RoutedCache:
    """Writes one token of each row in `rows_M` (different rows; B stands for none) behind the row's last one."""
    slots_M = cache.lengths_B.at[rows_M].get(mode="fill", fill_value=0)
    k_BKSH, v_BKSH = (
        old.at[rows_M, :, slots_M].set(new, mode="drop") for old, new in ((cache.k_BKSH, k_MKH), (cache.v_BKSH, v_MKH))
    )
    return RoutedCache(
        k_BKSH,
        v_BKSH,
        cache.positions_BS.at[rows_M, slots_M].set(positions_M, mode="drop"),
        cache.lengths_B.at[rows_M].add(1, mode="drop"),
    )


def append_many(cache: RoutedCache, k_BKCH, v_BKCH, positions_BC: jax.Array, live_BC: jax.Array) -> RoutedCache:
    """Writes each row's live tokens, which come first among its C, behind its last one."""
    num_slots = cache.positions_BS.shape[1]
    offsets_BC = jnp.broadcast_to(jnp.arange(live_BC.shape[1], dtype=jnp.int32)[None], live_BC.shape)
    slots_BC = jnp.where(live_BC, cache.lengths_B[:, None] + offsets_BC, num_slots)  # out of bounds: dropped

    def write(old_KSH, new_KCH, slots_C):
        return old_KSH.at[:, slots_C].set(new_KCH, mode="drop")

    return RoutedCache(
        jax.vmap(write)(cache.k_BKSH, k_BKCH, slots_BC),
        jax.vmap(write)(cache.v_BKSH, v_BKCH, slots_BC),
        jax.vmap(lambda old_S, new_C, slots_C: old_S.at[slots_C].set(new_C, mode="drop"))(
            cache.positions_BS, positions_BC, slots_BC
        ),
        cache.lengths_B + jnp.sum(live_BC, axis=1, dtype=jnp.int32),
    )


def forget_after(cache: RoutedCache, last_position_B: jax.Array) -> RoutedCache:
    """Drops every token behind each row's `last_position_B`: they are the last in its slots."""
    kept_BS = (cache.positions_BS >= 0) & (cache.positions_BS <= last_position_B[:, None])
    return cache._replace(
        positions_BS=jnp.where(kept_BS, cache.positions_BS, EMPTY),
        lengths_B=jnp.sum(kept_BS, axis=1, dtype=jnp.int32),
    )


def overflowed(cache: Cache) -> jax.Array:
    """Whether some token of some row found no slot: the cache is then not to be used. bool scalar."""
    full = [jnp.any(c.lengths_B > c.positions_BS.shape[1]) for c in cache if isinstance(c, RoutedCache)]
    return jnp.any(jnp.stack(full)) if full else jnp.zeros((), bool)


def has_room(cache: Cache, num_positions: int, tokens: int = 1) -> jax.Array:
    """Per row, whether every routed block can take `tokens` more. bool [B]. A slot per position is always enough."""
    rows = cache[0].k_BKSH.shape[0]
    room_B = jnp.ones(rows, bool)
    for block in cache:
        if isinstance(block, RoutedCache) and block.positions_BS.shape[1] < num_positions:
            room_B &= block.lengths_B + tokens <= block.positions_BS.shape[1]
    return room_B


def grow(cache: Cache, slots: tuple[int, ...]) -> Cache:
    """The same contents with `slots[depth]` slots per row and block, at least as many as now."""

    def more(array, axis, num_slots, value=0):
        padding = [(0, 0)] * array.ndim
        padding[axis] = (0, num_slots - array.shape[axis])
        return jnp.pad(array, padding, constant_values=value)

    def grown(block, num_slots):
        k_BKSH, v_BKSH = more(block.k_BKSH, 2, num_slots), more(block.v_BKSH, 2, num_slots)
        if isinstance(block, FullCache):
            return FullCache(k_BKSH, v_BKSH)
        return RoutedCache(k_BKSH, v_BKSH, more(block.positions_BS, 1, num_slots, EMPTY), block.lengths_B)

    return tuple(grown(block, num_slots) for block, num_slots in zip(cache, slots, strict=True))
