"""The TPU kernel, interpreted, against the attention of every other backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import sharding
from mod_jax.config import make_config
from mod_jax.models.attention import attend
from mod_jax.models.splash import splash_attend
from mod_jax.tuning import attends_by_kernel


def make_row(batch, length, heads, kv_heads, head_dim):
    """Two documents in each row, and padding behind them in the last."""
    keys = jax.random.split(jax.random.key(0), 4)
    q_BTNH = jax.random.normal(keys[0], (batch, length, heads, head_dim))
    k_BKTH, v_BKTH = (jax.random.normal(key, (batch, kv_heads, length, head_dim)) for key in keys[1:3])
    segments_BT = np.ones((batch, length), np.int32)
    segments_BT[:, length // 3 :] = 2
    segments_BT[-1, -length // 4 :] = 0
    return q_BTNH, k_BKTH, v_BKTH, segments_BT, jax.random.normal(keys[3], q_BTNH.shape)


def compare(q_BTNH, k_BKTH, v_BKTH, segments_BT, cotangent_BTNH):
    """Outputs and gradients of both, to 1e-5."""
    positions_BT = jnp.broadcast_to(jnp.arange(q_BTNH.shape[1])[None], segments_BT.shape)

    def plain(q, k, v):
        pairs = positions_BT, positions_BT, segments_BT, segments_BT
        return jnp.vdot(attend(q, k, v, *pairs), cotangent_BTNH), attend(q, k, v, *pairs)

    def splash(q, k, v):
        out = splash_attend(q, k, v, segments_BT, interpret=True)
        return jnp.vdot(out, cotangent_BTNH), out

    results = [jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))(q_BTNH, k_BKTH, v_BKTH) for f in (plain, splash)]
    for expected, actual in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=1e-5)
    (_, out), _ = results[1]
    assert not np.asarray(out)[np.asarray(segments_BT) == 0].any()
    assert np.abs(out).max() > 0.1


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_kernel_gives_outputs_and_gradients_of_plain_attention(kv_heads):
    compare(*make_row(2, 256, 4, kv_heads, 16))


def test_a_token_that_does_not_look_is_still_seen():
    """As where bypassed tokens keep their keys: a query of segment 0 gets nothing, its key is there for others."""
    q_BTNH, k_BKTH, v_BKTH, segments_BT, _ = make_row(2, 128, 4, 2, 16)
    looking_BT = np.where(np.arange(128) % 3 == 0, 0, segments_BT).astype(np.int32)
    positions_BT = jnp.broadcast_to(jnp.arange(128)[None], segments_BT.shape)
    plain = attend(q_BTNH, k_BKTH, v_BKTH, positions_BT, positions_BT, looking_BT, segments_BT)
    splash = splash_attend(q_BTNH, k_BKTH, v_BKTH, looking_BT, segments_BT, interpret=True)
    np.testing.assert_allclose(splash, plain, atol=1e-5)
    hidden = splash_attend(q_BTNH, k_BKTH, v_BKTH, looking_BT, interpret=True)
    assert np.abs(hidden - plain).max() > 1e-2


def test_each_device_runs_the_kernel_on_its_own_rows_and_heads():
    mesh = sharding.make_mesh(make_config(**{"train.steps": 1, "mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}))
    with jax.set_mesh(mesh):
        compare(*make_row(4, 128, 4, 2, 16))


def test_only_whole_lanes_of_long_rows_on_a_tpu_take_the_kernel():
    assert attends_by_kernel(2048, "tpu")
    assert attends_by_kernel(640, "tpu")
    assert not attends_by_kernel(2048, "cpu")
    assert not attends_by_kernel(256, "tpu")
    assert not attends_by_kernel(2000, "tpu")
