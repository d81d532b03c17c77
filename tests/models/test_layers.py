"""Parameters and their axes, dense products, norms, rotary angles, embedder and MLP."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from mod_jax import sharding
from mod_jax.config import Config, ModelConfig
from mod_jax.models import layers
from mod_jax.models.attention import Attention
from mod_jax.models.blocks import TOPK
from mod_jax.models.memory import make_tokens
from mod_jax.models.mlp import MLP

KEY = jax.random.key(0)


def rngs():
    return nnx.Rngs(params=KEY)


def mlp_config(width, hidden, activation="gelu", **changes):
    return Config(model=ModelConfig(width=width, mlp_dim=hidden, activation=activation, depth=1, **changes))


def random(*shape, seed=1):
    return jax.random.normal(jax.random.key(seed), shape)


# Parameters


def test_param_is_float32_and_carries_its_axes():
    weight = sharding.param(rngs(), (3, 4), ("embed", "mlp"), layers.normal(0.5))
    assert weight[...].shape == (3, 4)
    assert weight[...].dtype == jnp.float32
    specs = nnx.get_partition_spec(nnx.state(MLP(mlp_config(4, 8), rngs())))
    assert nnx.to_pure_dict(specs) == {"up_DF": PartitionSpec("embed", "mlp"), "down_FD": PartitionSpec("mlp", "embed")}


def test_param_refuses_axes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"shape \(3, 4\) and axes \('embed',\) differ in length"):
        sharding.param(rngs(), (3, 4), ("embed",), layers.normal(1.0))


def test_rules_name_mesh_axes_and_leave_an_uneven_vocabulary_whole():
    mesh = {"data": 2, "fsdp": 2, "tensor": 2, "expert": 2}
    spec = sharding.RULES.spec
    assert spec(("vocab", "embed"), (256, 16), mesh) == PartitionSpec("tensor", "fsdp")
    assert spec(("vocab", "embed"), (257, 16), mesh) == PartitionSpec(None, "fsdp")
    assert spec(("layers", "heads", None, "embed"), (3, 2, 8, 16), mesh) == PartitionSpec(None, "tensor", None, "fsdp")
    assert spec(("batch", None, None), (8, 4, 16), mesh) == PartitionSpec(("data", "fsdp", "expert"), None, None)
    assert spec(("experts", "embed", "mlp"), (4, 16, 64), mesh) == PartitionSpec("expert", "fsdp", "tensor")


def test_constrain_without_a_mesh_does_nothing():
    x = random(2, 3)
    assert sharding.constrain(x, ("batch", None)) is x


# Arithmetic


def test_dense_is_the_product_over_the_last_axis_in_the_dtype_of_x():
    x_BTD, weight_DNH = random(2, 3, 4), random(4, 5, 6, seed=2)
    product = layers.dense(x_BTD, weight_DNH)
    np.testing.assert_allclose(product, np.einsum("BTD,DNH->BTNH", x_BTD, weight_DNH), rtol=1e-5, atol=1e-6)
    assert layers.dense(x_BTD.astype(jnp.bfloat16), weight_DNH).dtype == jnp.bfloat16


def test_rms_normalise_by_hand():
    # rms(3, 4) = sqrt((9 + 16) / 2) = sqrt(12.5)
    out = layers.rms_normalise(jnp.array([[3.0, 4.0], [0.0, 0.0]]))
    np.testing.assert_allclose(out, [[3 / math.sqrt(12.5), 4 / math.sqrt(12.5)], [0, 0]], rtol=1e-6)
    assert layers.rms_normalise(jnp.ones((2, 4), jnp.bfloat16)).dtype == jnp.float32


def test_the_norms_epsilon_by_hand():
    # mean square 12.5, and 12.5 + 37.5 = 50
    np.testing.assert_allclose(layers.inverse_rms(jnp.array([3.0, 4.0]), 37.5), 50**-0.5, rtol=1e-6)
    norm = layers.RMSNorm(2, rngs(), eps=37.5)
    np.testing.assert_allclose(norm(jnp.array([[[3.0, 4.0]]])), [[[3 / 50**0.5, 4 / 50**0.5]]], rtol=1e-6)


def test_rmsnorm_scales_and_returns_the_dtype_of_its_input():
    norm = layers.RMSNorm(2, rngs())
    norm.scale_D[...] = jnp.array([1.0, 10.0])
    out = norm(jnp.array([[[3.0, 4.0]]], jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), [[[3 / 12.5**0.5, 40 / 12.5**0.5]]], rtol=1e-2)


def test_rotate_by_hand():
    # H = 4: pairs are (0, 2) and (1, 3), turned by position * base^0 and position * base^(-1/2)
    x = jnp.array([1.0, 0.0, 0.0, 2.0]).reshape(1, 1, 1, 4)
    first, second = 3.0, 3.0 / 10.0  # position 3, base 100
    expected = [math.cos(first), -2 * math.sin(second), math.sin(first), 2 * math.cos(second)]
    at_0, at_3 = (layers.rotary_angles(jnp.array([[position]]), 4, 100.0) for position in (0, 3))
    np.testing.assert_allclose(layers.rotate(x, at_3)[0, 0, 0], expected, rtol=1e-6)
    np.testing.assert_array_equal(layers.rotate(x, at_0), x)


def test_a_rotary_factor_divides_its_frequency():
    position = jnp.array([[6]])
    angles, plain = layers.rotary_angles(position, 4, 100.0, (2.0, 3.0)), layers.rotary_angles(position, 4, 100.0)
    # 6 / 2, and 6 * 100^(-1/2) / 3
    np.testing.assert_allclose(angles.sin_BTH, [[[math.sin(3.0), math.sin(0.2)]]], rtol=1e-5)
    np.testing.assert_allclose(plain.sin_BTH, [[[math.sin(6.0), math.sin(0.6)]]], rtol=1e-5)


def test_rotated_products_depend_on_distance_only():
    q, k = random(1, 1, 1, 8), random(1, 1, 1, 8, seed=2)

    def product(q_position, k_position):
        at_q, at_k = (layers.rotary_angles(jnp.array([[p]]), 8, 1e4) for p in (q_position, k_position))
        return float(jnp.sum(layers.rotate(q, at_q) * layers.rotate(k, at_k)))

    assert product(7, 4) == pytest.approx(product(103, 100), abs=1e-4)
    assert product(7, 4) != pytest.approx(product(7, 5), abs=1e-2)


# Embedder


@pytest.mark.parametrize("tie", [False, True])
def test_embedder_looks_rows_up_and_scores_against_the_right_table(tie):
    embedder = layers.Embedder(5, 4, tie, rngs())
    names = set(nnx.to_pure_dict(nnx.state(embedder)))
    assert names == ({"table_VD"} if tie else {"table_VD", "unembed_DV"})
    table_VD = np.asarray(embedder.table_VD[...])
    x = embedder.embed(jnp.array([[3, 0, 3]]), jnp.dtype("float32"))
    np.testing.assert_allclose(x[0], 2 * table_VD[[3, 0, 3]], rtol=1e-6)  # 4 ** 0.5 = 2
    weight_DV = table_VD.T if tie else np.asarray(embedder.unembed_DV[...])
    np.testing.assert_allclose(embedder.logits(x)[0], np.asarray(x[0]) @ weight_DV, rtol=1e-5, atol=1e-6)


def test_tied_table_gets_the_gradient_of_both_uses():
    graphdef, state = nnx.split(layers.Embedder(5, 4, True, rngs()))

    def logit(params, look_up, score):
        embedder = nnx.merge(graphdef, params)
        x = embedder.embed(jnp.array([[1]]), jnp.dtype("float32"))
        stop = jax.lax.stop_gradient
        x = x if look_up else stop(x)
        logits = embedder.logits(x) if score else x @ stop(embedder.table_VD[...].T)
        return logits[0, 0, 2]

    def grad(**uses):
        return np.asarray(jax.grad(logit)(state, **uses)["table_VD"][...])

    both = grad(look_up=True, score=True)
    np.testing.assert_allclose(both, grad(look_up=True, score=False) + grad(look_up=False, score=True), rtol=1e-5)
    assert np.flatnonzero(np.abs(both).sum(axis=1)).tolist() == [1, 2]  # the row looked up and the row scored


def test_logits_are_float32_whatever_computes():
    embedder = layers.Embedder(5, 4, False, rngs())
    x = embedder.embed(jnp.array([[3]]), jnp.dtype("bfloat16"))
    assert x.dtype == jnp.bfloat16
    assert embedder.logits(x).dtype == jnp.float32
    assert embedder.table_VD[...].dtype == jnp.float32
    embedder.unembed_DV[...] = jnp.zeros((4, 5)).at[:2, 0].set(jnp.array([256.0, 1.0]))
    assert embedder.logits(jnp.ones((1, 1, 4), jnp.bfloat16))[0, 0, 0] == 257.0  # in bfloat16 it would be 256 or 258


# MLP


@pytest.mark.parametrize(("activation", "at_2", "at_minus_2"), [
    ("relu_squared", 4.0, 0.0),
    ("gelu", 1.954598, -0.045402),  # 2 * Phi(2) by the tanh formula
    ("silu", 1.761594, -0.238406),  # 2 / (1 + e^-2)
])  # fmt: skip
def test_mlp_by_hand(activation, at_2, at_minus_2):
    mlp = MLP(mlp_config(1, 2, activation), rngs())
    mlp.up_DF[...] = jnp.array([[1.0, -1.0]])
    mlp.down_FD[...] = jnp.array([[1.0], [100.0]])
    one_11 = jnp.ones((1, 1), jnp.int32)
    out, record = mlp(jnp.full((1, 1, 1), 2.0), make_tokens(one_11, one_11, 2, 1e4), TOPK)  # hidden (2, -2)
    assert record is None
    assert float(out[0, 0, 0]) == pytest.approx(at_2 + 100 * at_minus_2, rel=1e-4)


def test_a_gated_mlp_by_hand():
    mlp = MLP(mlp_config(1, 2, "silu", gated_mlp=True), rngs())
    mlp.up_DF[...], mlp.gate_DF[...] = jnp.array([[3.0, 5.0]]), jnp.array([[1.0, -1.0]])
    mlp.down_FD[...] = jnp.array([[1.0], [100.0]])
    one_11 = jnp.ones((1, 1), jnp.int32)
    out, _ = mlp(jnp.full((1, 1, 1), 2.0), make_tokens(one_11, one_11, 2, 1e4), TOPK)
    # up gives (6, 10), the gate silu(2, -2) = (1.761594, -0.238406)
    assert float(out[0, 0, 0]) == pytest.approx(6 * 1.761594 + 100 * 10 * -0.238406, rel=1e-4)


def test_biases_of_queries_keys_and_values_are_added_before_the_rotation(tiny_config):
    config = tiny_config(**{"model.qkv_bias": True, "model.qk_norm": False})
    attention = Attention(config, rngs())
    for name in ("q_bias_NH", "k_bias_KH", "v_bias_KH"):
        assert not getattr(attention, name)[...].any()  # so that a fresh model begins without
        getattr(attention, name)[...] = random(*getattr(attention, name).shape)
    x_BTD, one_11 = jnp.zeros((1, 1, 16)), jnp.ones((1, 1), jnp.int32)
    tokens = make_tokens(2 * one_11, one_11, 8, 1e4)
    q, (k, v) = attention.ask(x_BTD, tokens)
    np.testing.assert_allclose(q, layers.rotate(attention.q_bias_NH[...][None, None], tokens.angles), rtol=1e-6)
    np.testing.assert_allclose(k[:, :, 0], layers.rotate(attention.k_bias_KH[...][None, None], tokens.angles)[:, 0])
    np.testing.assert_array_equal(v[0, :, 0], attention.v_bias_KH[...])


def test_embeddings_enter_scaled_or_as_they_are():
    scaled, plain = (layers.Embedder(3, 4, True, rngs(), scale) for scale in (True, False))
    ids = jnp.array([[2, 0]])
    np.testing.assert_array_equal(plain.embed(ids, jnp.float32), plain.table_VD[...][ids])
    np.testing.assert_array_equal(scaled.embed(ids, jnp.float32), 2 * plain.table_VD[...][ids])
