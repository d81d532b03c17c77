"""Compact caches: sizes in bytes, where tokens are written, what happens when there is no slot left."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax.config import make_config
from mod_jax.models.memory import EMPTY, Present, Slots, make_tokens
from mod_jax.sampling import cache as cache_lib


def config_of(**changes):
    return make_config(**{"train.steps": 1, "data.seq_len": 2048, **changes})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_heads", [8, 1])
def test_with_half_of_the_blocks_routed_the_cache_is_0_57_of_a_dense_models(dtype, kv_heads):
    shape = {"model.width": 512, "model.depth": 12, "model.num_heads": 8, "model.num_kv_heads": kv_heads}
    config = config_of(**shape, **{"model.dtype": dtype, "routing.capacity": 0.125})
    slots = cache_lib.slot_counts(config, 2048)
    assert slots == (2048, 280) * 6  # 256 kept, 8 % slack, in multiples of 8
    dense = cache_lib.cache_bytes(config_of(**shape, **{"model.dtype": dtype, "model.layout": "F"}), 4, (2048,) * 12)
    itemsize = 4 if dtype == "float32" else 2
    assert dense == 12 * 4 * (2048 * (2 * kv_heads * 64 * itemsize + 4) + 4)  # a position per slot, a length per row
    ratio = cache_lib.cache_bytes(config, 4, slots) / dense
    assert (1 + 0.125) / 2 < ratio <= (0.57 if kv_heads > 1 else 0.575)


def test_slot_counts():
    assert cache_lib.routed_slots(2048, 0.125) == 280
    assert cache_lib.routed_slots(2048, 0.125, growth=1) == 416  # 256 * 1.08 * 1.5 = 414.7
    assert cache_lib.routed_slots(2048, 1.0) == 2048  # never more than positions
    assert cache_lib.routed_slots(2048, 0.125, growth=99) == 2048
    assert cache_lib.routed_slots(7, 0.125) == 7
    config = config_of(**{"model.layout": "FRR", "model.depth": 4, "routing.capacity": (0.125, 0.5)})
    assert cache_lib.slot_counts(config, 64) == (64, 16, 40, 64)
    assert cache_lib.slot_counts(config, 64, capacity_L=(0.5, 0.125)) == (64, 40, 16, 64)


def empty(num_rows=2, num_slots=3) -> Slots:
    config = config_of(**{"model.layout": "R", "model.depth": 1, "model.num_heads": 1, "model.width": 2})
    return cache_lib.init_cache(config, num_rows, (num_slots,))[0]


def items(values_BT):
    """(keys, values) of one head, each filled with its token's own number."""
    k_BKTH = jnp.asarray(values_BT, jnp.float32)[:, None, :, None] * jnp.ones((1, 1, 1, 2))
    return k_BKTH, -k_BKTH


def tokens(positions_BT, is_there_BT=None):
    positions_BT = jnp.array(positions_BT, jnp.int32)
    segments_BT = jnp.ones_like(positions_BT) if is_there_BT is None else jnp.array(is_there_BT, jnp.int32)
    return make_tokens(positions_BT, segments_BT, 2, 1e4)


def append_one(slots, rows, values, positions):
    """One token of each of these rows."""
    column = (np.array(part)[:, None] for part in (values, positions))
    new, at = map(np.asarray, column)
    return slots.rows(jnp.array(rows)).append(items(new), tokens(at))


def test_one_token_of_some_rows_goes_behind_each_rows_last_one():
    _, slots = append_one(empty(), [1, 2], [5, 6], [17, 99])
    assert slots.lengths_B.tolist() == [0, 1]  # row 2 does not exist: nobody
    seen, slots = append_one(slots, [0, 1], [7, 8], [4, 20])
    assert slots.positions_BS.tolist() == [[4, EMPTY, EMPTY], [17, 20, EMPTY]]
    k_BKSH, v_BKSH = slots.items
    assert k_BKSH[..., 0].tolist() == [[[7, 0, 0]], [[5, 8, 0]]]
    assert v_BKSH[..., 1].tolist() == [[[-7, 0, 0]], [[-5, -8, 0]]]
    seen_of_1, _ = append_one(slots, [1], [9], [30])
    assert seen.positions_BS.tolist() == slots.positions_BS.tolist()
    assert seen_of_1.positions_BS.tolist() == [[17, 20, 30]]


def test_many_tokens_are_written_if_they_are_there_and_equal_one_by_one():
    values, positions = [[1, 2], [3, 4]], [[3, 8], [5, 0]]
    _, many = empty().append(items(values), tokens(positions, [[1, 1], [1, 0]]))
    _, one = append_one(empty(), [0, 1], [1, 3], [3, 5])
    _, one = append_one(one, [0, 2], [2, 4], [8, 0])
    jax.tree.map(np.testing.assert_array_equal, many, one)
    assert many.lengths_B.tolist() == [2, 1]


def test_prompts_into_empty_slots_are_as_if_appended_and_see_themselves():
    values, at = [[1, 2], [3, 4]], tokens([[0, 1], [0, 1]], [[1, 1], [1, 0]])
    seen, prompts = empty().for_prompts().append(items(values), at)
    _, appended = empty().append(items(values), at)
    assert prompts.positions_BS.tolist() == appended.positions_BS.tolist() == [[0, 1, EMPTY], [0, EMPTY, EMPTY]]
    assert prompts.lengths_B.tolist() == appended.lengths_B.tolist() == [2, 1]
    assert seen.same_tokens
    assert seen.segments_BS.tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize("all_at_once", [True, False])
def test_an_overflow_is_told_and_destroys_nothing(all_at_once):
    slots, positions = empty(), [[0, 1, 2, 3], [0, 1, 2, 3]]
    if all_at_once:
        _, slots = slots.append(items(np.ones((2, 4))), tokens(positions, [[1] * 4, [1] * 3 + [0]]))
    else:
        for t in range(4):
            assert not cache_lib.overflowed((slots,))
            _, slots = append_one(slots, [0, 1 if t < 3 else 2], [1, 1], [t, t])
    assert cache_lib.overflowed((slots,))
    assert slots.lengths_B.tolist() == [4, 3]
    assert slots.positions_BS.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_has_room_looks_at_each_row_and_a_slot_per_position_is_always_enough():
    cache = (empty()._replace(lengths_B=jnp.array([2, 3])),)
    assert cache_lib.has_room(cache, num_positions=16).tolist() == [True, False]
    assert cache_lib.has_room(cache, num_positions=16, tokens=2).tolist() == [False, False]
    assert cache_lib.has_room(cache, num_positions=3).tolist() == [True, True]


def test_grow_keeps_the_contents():
    _, slots = append_one(empty(), [0, 1], [7, 8], [4, 20])
    (grown,) = cache_lib.grow((slots,), (5,))
    assert grown.positions_BS.tolist() == [[4, *[EMPTY] * 4], [20, *[EMPTY] * 4]]
    np.testing.assert_array_equal(grown.items[0][:, :, :3], slots.items[0])
    assert grown.items[0].shape == (2, 1, 5, 2)
    assert grown.lengths_B.tolist() == [1, 1]


def test_forget_after_drops_the_last_tokens_of_each_row():
    slots = empty()._replace(
        positions_BS=jnp.array([[1, 4, 9], [2, EMPTY, EMPTY]]), lengths_B=jnp.array([3, 1], jnp.int32)
    )
    (shorter,) = cache_lib.forget_after((slots,), jnp.array([4, 0]))
    assert shorter.positions_BS.tolist() == [[1, 4, EMPTY], [EMPTY] * 3]
    assert shorter.lengths_B.tolist() == [2, 0]


def test_a_block_without_a_mixer_remembers_nothing():
    config = config_of(**{"model.layout": "Mm", "model.depth": 2})
    cache = cache_lib.init_cache(config, 2, (16, 8))
    assert cache == (Present(), Present())
    assert cache_lib.cache_bytes(config, 2, (16, 8)) == 0
    assert cache_lib.grow(cache_lib.forget_after(cache, jnp.zeros(2)), (32, 16)) == cache
    assert not cache_lib.overflowed(cache)
    assert cache_lib.has_room(cache, 32)
