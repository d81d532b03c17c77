"""Compact caches: sizes in bytes, where tokens are written, what happens when there is no slot left."""

import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax.config import make_config
from mod_jax.sampling import cache as cache_lib
from mod_jax.sampling.cache import EMPTY, RoutedCache


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
    assert dense == 12 * 4 * 2048 * 2 * kv_heads * 64 * itemsize
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


def empty(num_rows=2, num_slots=3) -> RoutedCache:
    config = config_of(**{"model.layout": "R", "model.depth": 1, "model.num_heads": 1, "model.width": 2})
    return cache_lib.init_cache(config, num_rows, (num_slots,))[0]


def tokens(*values):
    """Keys of one head, each filled with its own number."""
    return jnp.asarray(values, jnp.float32)[:, None, None] * jnp.ones((1, 1, 2))


def test_append_writes_behind_each_rows_last_token():
    cache = cache_lib.append(empty(), jnp.array([1, 2]), tokens(5, 6), -tokens(5, 6), jnp.array([17, 99]))
    assert cache.lengths_B.tolist() == [0, 1]  # row 2 does not exist: nobody
    cache = cache_lib.append(cache, jnp.array([0, 1]), tokens(7, 8), -tokens(7, 8), jnp.array([4, 20]))
    assert cache.positions_BS.tolist() == [[4, EMPTY, EMPTY], [17, 20, EMPTY]]
    assert cache.k_BKSH[..., 0].tolist() == [[[7, 0, 0]], [[5, 8, 0]]]
    assert cache.v_BKSH[..., 1].tolist() == [[[-7, 0, 0]], [[-5, -8, 0]]]


def test_append_many_writes_live_tokens_only_and_equals_one_by_one():
    k_BKCH = jnp.arange(2 * 2 * 2, dtype=jnp.float32).reshape(2, 1, 2, 2)
    positions_BC, live_BC = jnp.array([[3, 8], [5, 0]]), jnp.array([[True, True], [True, False]])
    many = cache_lib.append_many(empty(), k_BKCH, -k_BKCH, positions_BC, live_BC)
    one = cache_lib.append(empty(), jnp.array([0, 1]), k_BKCH[:, :, 0], -k_BKCH[:, :, 0], positions_BC[:, 0])
    one = cache_lib.append(one, jnp.array([0, 2]), k_BKCH[:, :, 1], -k_BKCH[:, :, 1], positions_BC[:, 1])
    for actual, expected in zip(many, one, strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert many.lengths_B.tolist() == [2, 1]


@pytest.mark.parametrize("all_at_once", [True, False])
def test_an_overflow_is_told_and_destroys_nothing(all_at_once):
    cache, k_BKCH = empty(), jnp.ones((2, 1, 4, 2))
    positions_BC = jnp.array([[0, 1, 2, 3], [0, 1, 2, 3]])
    if all_at_once:
        live_BC = jnp.array([[True] * 4, [True] * 3 + [False]])
        cache = cache_lib.append_many(cache, k_BKCH, k_BKCH, positions_BC, live_BC)
    else:
        for t in range(4):
            rows_M = jnp.array([0, 1 if t < 3 else 2])
            assert not cache_lib.overflowed((cache,))
            cache = cache_lib.append(cache, rows_M, k_BKCH[:, :, t], k_BKCH[:, :, t], positions_BC[:, t])
    assert cache_lib.overflowed((cache,))
    assert cache.lengths_B.tolist() == [4, 3]
    assert cache.positions_BS.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_has_room_looks_at_each_row_and_a_slot_per_position_is_always_enough():
    cache = empty()._replace(lengths_B=jnp.array([2, 3]))
    assert cache_lib.has_room((cache,), num_positions=16).tolist() == [True, False]
    assert cache_lib.has_room((cache,), num_positions=16, tokens=2).tolist() == [False, False]
    assert cache_lib.has_room((cache,), num_positions=3).tolist() == [True, True]


def test_grow_keeps_the_contents():
    cache = cache_lib.append(empty(), jnp.array([0, 1]), tokens(7, 8), tokens(1, 2), jnp.array([4, 20]))
    (grown,) = cache_lib.grow((cache,), (5,))
    assert grown.positions_BS.tolist() == [[4, *[EMPTY] * 4], [20, *[EMPTY] * 4]]
    np.testing.assert_array_equal(grown.k_BKSH[:, :, :3], cache.k_BKSH)
    assert grown.k_BKSH.shape == (2, 1, 5, 2)
    assert grown.lengths_B.tolist() == [1, 1]


def test_forget_after_drops_the_last_tokens_of_each_row():
    cache = empty()._replace(
        positions_BS=jnp.array([[1, 4, 9], [2, EMPTY, EMPTY]]), lengths_B=jnp.array([3, 1], jnp.int32)
    )
    shorter = cache_lib.forget_after(cache, jnp.array([4, 0]))
    assert shorter.positions_BS.tolist() == [[1, 4, EMPTY], [EMPTY] * 3]
    assert shorter.lengths_B.tolist() == [2, 0]
