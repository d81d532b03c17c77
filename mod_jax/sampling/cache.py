"""The caches of a whole model: how many slots each block gets, whether they suffice, and how they grow.

Vocabulary: B rows, S slots. Each block with a mixer has `Slots` (see `models.memory`): as many as a row has positions
where every token leaves its item, fewer where only the selected ones do. How many a routed block will select is decided
token by token, so that no smaller size is always enough: `overflowed` tells, and nothing is lost in silence.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mod_jax import routing
from mod_jax.config import Config
from mod_jax.models.blocks import part
from mod_jax.models.memory import EMPTY, Memory, Present, Slots, make_tokens
from mod_jax.sharding import constrain

SLACK = 1.08  # over the expected count: with half of the blocks routed at 12.5 %, 0.57 of a dense model's memory
GROWTH = 1.5  # of the slots, each time that some row needs more
SLOT_MULTIPLE = 8

Cache = tuple[Memory, ...]  # by depth; `Present` where a block has no mixer, and so nothing to remember


def routed_slots(num_positions: int, capacity: float, growth: int = 0) -> int:
    """S of a routed block for rows of up to `num_positions` tokens; `growth` counts how often it had to grow."""
    kept = routing.tokens_kept(num_positions, capacity) if capacity > 0 else 1  # a tiny budget may select nobody
    slots = math.ceil(kept * SLACK * GROWTH**growth / SLOT_MULTIPLE) * SLOT_MULTIPLE
    return min(slots, num_positions)


def slot_counts(
    config: Config, num_positions: int, capacity_L: tuple[float, ...] | None = None, growth: int = 0
) -> tuple[int, ...]:
    """Slots of each block, by depth. `capacity_L`: expected fraction per routed block; default: the config's."""
    if config.routing.skipped_keys == "kept":  # every token leaves its item in every block
        return (num_positions,) * len(config.blocks)
    capacities = iter(capacity_L or config.capacity_L)
    return tuple(
        routed_slots(num_positions, next(capacities), growth) if block.routed else num_positions
        for block in config.blocks
    )


def init_cache(config: Config, batch_size: int, slots: tuple[int, ...]) -> Cache:
    """An empty cache with `slots[depth]` slots per row and block."""

    def empty(spec, num_slots) -> Memory:
        if spec.mixer is None:
            return Present()

        def zeros(item):
            return jnp.zeros((batch_size, *item.shape[1:-2], num_slots, item.shape[-1]), item.dtype)

        positions_BS = jnp.full((batch_size, num_slots), EMPTY, jnp.int32)
        items = jax.tree.map(zeros, _item(config, spec.mixer))
        memory = Slots(items, positions_BS, jnp.zeros(batch_size, jnp.int32))
        return jax.tree.map(lambda array: constrain(array, item_axes(config, array.shape)), memory)

    return tuple(empty(spec, num_slots) for spec, num_slots in zip(config.blocks, slots, strict=True))


def item_axes(config: Config, shape: tuple[int, ...]) -> tuple[str | None, ...]:
    """The meaning of each dimension of an array of a cache (see `sharding.ShardingRules`): rows, then heads if it has
    as many as there are key/value heads."""
    heads = ("kv_heads",) if len(shape) == 4 and shape[1] == config.model.num_kv_heads else ()
    return ("batch", *heads, *(None,) * (len(shape) - 1 - len(heads)))


@functools.cache
def _item(config: Config, mixer: str) -> Any:
    """Shapes and dtypes of what one token leaves behind in this mixer, [1, ..., 1, H]."""

    def leave():
        m = config.model
        one_11 = jnp.ones((1, 1), jnp.int32)
        tokens = make_tokens(one_11, one_11, m.head_dim, m.rope_base, m.rope_factors)
        return part(mixer)(config, nnx.Rngs(params=0)).ask(jnp.zeros((1, 1, m.width), m.dtype), tokens)[1]

    return jax.eval_shape(leave)


def cache_bytes(config: Config, batch_size: int, slots: tuple[int, ...]) -> int:
    """Bytes of such a cache, counted from its arrays."""
    shapes = jax.eval_shape(lambda: init_cache(config, batch_size, slots))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def forget_after(cache: Cache, last_position_B: jax.Array) -> Cache:
    """Drops every token behind each row's `last_position_B`."""
    return tuple(memory.forget_after(last_position_B) if isinstance(memory, Slots) else memory for memory in cache)


def overflowed(cache: Cache) -> jax.Array:
    """Whether some token of some row found no slot: the cache is then not to be used. bool scalar."""
    full = [jnp.any(slots.lengths_B > slots.positions_BS.shape[1]) for slots in cache if isinstance(slots, Slots)]
    return jnp.any(jnp.stack(full)) if full else jnp.zeros((), bool)


def has_room(cache: Cache, num_positions: int, tokens: int = 1) -> jax.Array:
    """Per row, whether every block can take `tokens` more: bool [B], a scalar where no block remembers anything.

    A slot per position is always enough.
    """
    room_B = jnp.ones((), bool)
    for slots in cache:
        if isinstance(slots, Slots):
            num_slots = slots.positions_BS.shape[1]
            room_B &= (slots.lengths_B + tokens <= num_slots) | (num_slots >= num_positions)
    return room_B


def grow(cache: Cache, slots: tuple[int, ...]) -> Cache:
    """The same contents with `slots[depth]` slots per row and block, at least as many as now."""
    pairs = zip(cache, slots, strict=True)
    return tuple(memory.grow(num) if isinstance(memory, Slots) else memory for memory, num in pairs)
