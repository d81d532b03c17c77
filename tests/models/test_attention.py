"""Attention masked by positions against a plain NumPy loop; grouped heads; what routed blocks rely on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mod_jax.config import Config, ModelConfig
from mod_jax.models import attention as attention_lib
from mod_jax.models.attention import MIN_CHUNK, Attention
from mod_jax.models.memory import Present, Seen, make_tokens

attend = jax.jit(attention_lib.attend, static_argnames="same_tokens")
MODEL = ModelConfig(width=16, depth=1, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=32, qk_norm=False)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def naive(q, k, v, q_pos, kv_pos, q_seg, kv_seg):
    """One query and one head at a time, in float64."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    out = np.zeros_like(q)
    group = q.shape[2] // k.shape[1]
    for b, t, n in np.ndindex(*q.shape[:3]):
        allowed = (kv_pos[b] >= 0) & (kv_pos[b] <= q_pos[b, t]) & (kv_seg[b] == q_seg[b, t]) & (kv_seg[b] > 0)
        if allowed.any():
            logits = k[b, n // group, allowed] @ q[b, t, n] / q.shape[3] ** 0.5
            weights = np.exp(logits - logits.max())
            out[b, t, n] = weights @ v[b, n // group, allowed] / weights.sum()
    return out


def packed_row(rng, length, padding):
    """Segments and positions of documents of random lengths, restarting at 0, then padding."""
    segments, positions = np.zeros(length, np.int32), np.zeros(length, np.int32)
    start, document = 0, 0
    while start < length - padding:
        size, document = min(rng.integers(1, 120), length - padding - start), document + 1
        segments[start : start + size], positions[start : start + size] = document, np.arange(size)
        start += size
    return segments, positions


def test_chunked_attention_equals_a_plain_loop_on_packed_rows():
    rng, length = np.random.default_rng(0), 300
    assert length > 2 * MIN_CHUNK  # three chunks, the last one short
    rows = [packed_row(rng, length, padding) for padding in (0, 37)]
    segments, positions = (np.stack(field) for field in zip(*rows, strict=True))
    q, k, v = random(2, length, 2, 4), random(2, 1, length, 4, seed=1), random(2, 1, length, 4, seed=2)
    masks = (positions, positions, segments, segments)
    expected = naive(q, k, v, *masks)
    np.testing.assert_allclose(attend(q, k, v, *masks, same_tokens=True), expected, atol=2e-6)
    np.testing.assert_allclose(attend(q, k, v, *masks), expected, atol=2e-6)
    assert (expected[1, -37:] == 0).all()
    one_document = (positions, positions, np.ones_like(segments), np.ones_like(segments))
    assert np.abs(attend(q, k, v, *one_document) - expected).max() > 0.1  # the comparison sees the segments


def test_the_mask_goes_by_position_not_by_slot():
    q, k, v = random(1, 1, 1, 4), random(1, 1, 4, 4, seed=1), random(1, 1, 4, 4, seed=2)
    one = jnp.ones((1, 1), jnp.int32)
    kv_pos = jnp.array([[20, -1, 3, 21]])  # out of order, one empty, one in the future
    kv_seg = jnp.array([[1, 1, 1, 1]])
    out = attend(q, k, v, 20 * one, kv_pos, one, kv_seg)
    weights = np.exp([float(k[0, 0, s] @ q[0, 0, 0]) / 2 for s in (0, 2)])
    by_hand = (weights[0] * v[0, 0, 0] + weights[1] * v[0, 0, 2]) / weights.sum()
    np.testing.assert_allclose(out[0, 0, 0], by_hand, rtol=1e-5, atol=1e-6)
    other_document = attend(q, k, v, 20 * one, kv_pos, one, kv_seg.at[0, 2].set(2))
    np.testing.assert_allclose(other_document[0, 0, 0], v[0, 0, 0], rtol=1e-6)


def test_a_query_without_keys_gets_zero_and_a_finite_gradient():
    q, k, v = random(1, 3, 2, 4), random(1, 1, 3, 4, seed=1), random(1, 1, 3, 4, seed=2)
    positions, segments = jnp.array([[0, 1, 2]]), jnp.array([[1, 0, 1]])

    def total(q, k, v):
        out = attend(q, k, v, positions, positions, segments, segments)
        return jnp.sum(out * random(*out.shape, seed=3)), out

    (_, out), grads = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    assert (out[0, 1] == 0).all()
    assert (out[0, 0] != 0).all()
    assert all(bool(jnp.isfinite(g).all()) for g in grads)
    assert (grads[0][0, 1] == 0).all()
    assert (grads[2][0, 0, 1] == 0).all()
    nobody = attend(q, k, v, positions, jnp.full((1, 3), -1), segments, segments)
    assert (nobody == 0).all()


def test_a_sharp_softmax_neither_overflows_nor_vanishes():
    q = jnp.full((1, 2, 1, 4), 100.0)
    k = jnp.array([[100.0] * 4, [-100.0] * 4]).reshape(1, 1, 2, 4)
    v = jnp.array([[1.0] * 4, [2.0] * 4]).reshape(1, 1, 2, 4)
    positions, segments = jnp.array([[0, 1]]), jnp.array([[1, 1]])
    out = attend(q, k, v, positions, positions, segments, segments)
    np.testing.assert_array_equal(out[0, :, 0], np.ones((2, 4)))  # logits 20000 and -20000
    only_low = attend(
        q[:, 1:], k[:, :, 1:], v[:, :, 1:], *(a[:, 1:] for a in (positions, positions, segments, segments))
    )
    np.testing.assert_array_equal(only_low[0, 0, 0], 2 * np.ones(4))


@nnx.jit(static_argnums=0)
def make(model):
    return Attention(Config(model=model), nnx.Rngs(params=jax.random.key(0)))


def make_attention(**changes):
    return make(dataclasses.replace(MODEL, **changes))


@nnx.jit
def run(attention, x, positions, segments):
    tokens = tokens_at(positions, segments)
    query, items = attention.ask(x, tokens)
    seen, _ = Present().append(items, tokens)
    return attention.answer(query, seen, tokens)


def tokens_at(positions, segments):
    return make_tokens(positions, segments, MODEL.head_dim, MODEL.rope_base)


def inputs(length=8):
    x = np.random.default_rng(5).normal(size=(2, length, 16)).astype(np.float32)
    return x, np.tile(np.arange(length, dtype=np.int32), (2, 1)), np.ones((2, length), np.int32)


def test_grouped_heads_equal_full_heads_with_repeated_keys_and_values():
    grouped, full = make_attention(), make_attention(num_kv_heads=4)
    assert grouped.k_DKH.shape == (16, 2, 4)
    full.q_DNH[...], full.o_NHD[...] = grouped.q_DNH[...], grouped.o_NHD[...]
    repeated = np.array([0, 0, 1, 1])  # query heads 0, 1 share key head 0
    full.k_DKH[...], full.v_DKH[...] = grouped.k_DKH[...][:, repeated], grouped.v_DKH[...][:, repeated]
    np.testing.assert_allclose(run(grouped, *inputs()), run(full, *inputs()), rtol=1e-5, atol=1e-6)
    full.k_DKH[...] = grouped.k_DKH[...][:, np.array([0, 1, 0, 1])]  # tiled, the easy mistake
    assert np.abs(run(grouped, *inputs()) - run(full, *inputs())).max() > 1e-2


@pytest.mark.parametrize("qk_norm", [False, True])
def test_qk_norm_makes_logits_blind_to_the_size_of_queries_and_keys(qk_norm):
    attention = make_attention(qk_norm=qk_norm)
    before = run(attention, *inputs())
    attention.q_DNH[...] *= 10.0
    attention.k_DKH[...] *= 10.0
    same = np.allclose(before, run(attention, *inputs()), atol=1e-4)
    assert same is qk_norm
    q, (k, _) = attention.ask(inputs()[0], tokens_at(*inputs()[1:]))
    assert np.allclose(jnp.mean(jnp.square(q), axis=-1), 1.0, atol=1e-3) is qk_norm  # rotation keeps the norm
    assert np.allclose(jnp.mean(jnp.square(k), axis=-1), 1.0, atol=1e-3) is qk_norm


def test_the_module_is_projection_attention_and_combination():
    attention, (x, positions, segments) = make_attention(), inputs()
    q, (k, v) = attention.ask(x, tokens_at(positions, segments))
    assert (q.shape, k.shape, v.shape) == ((2, 8, 4, 4), (2, 2, 8, 4), (2, 2, 8, 4))
    out = naive(q, k, v, *(np.asarray(a) for a in (positions, positions, segments, segments)))
    expected = np.einsum("BTNH,NHD->BTD", out, attention.o_NHD[...])
    np.testing.assert_allclose(run(attention, x, positions, segments), expected, atol=1e-5)


def test_routed_attention_uses_original_positions():
    # Of T = 8 tokens {1, 4, 6} are gathered: the same as full attention in which only their keys exist.
    attention, (x, positions, segments) = make_attention(), inputs(8)
    chosen = np.array([1, 4, 6])
    gathered = run(attention, x[:, chosen], positions[:, chosen], segments[:, chosen])
    tokens = tokens_at(positions, segments)
    query, items = attention.ask(x, tokens)
    only_chosen = jnp.zeros((2, 8), jnp.int32).at[:, chosen].set(1)
    masked = attention.answer(query, Seen(items, positions, only_chosen, False), tokens)
    np.testing.assert_allclose(gathered, masked[:, chosen], rtol=1e-5, atol=1e-6)
    renumbered = run(attention, x[:, chosen], positions[:, :3], segments[:, chosen])  # angles 0, 1, 2: the fault
    assert np.abs(gathered - renumbered)[:, 1:].max() > 1e-3
    np.testing.assert_allclose(gathered[:, 0], renumbered[:, 0], atol=1e-6)  # the first sees only itself


def test_the_order_of_slots_means_nothing():
    attention, (x, positions, segments) = make_attention(), inputs(8)
    order = np.array([5, 0, 3, 7, 1, 6, 2, 4])
    shuffled = run(attention, x[:, order], positions[:, order], segments[:, order])
    straight = run(attention, x, positions, segments)
    np.testing.assert_allclose(shuffled, straight[:, order], rtol=1e-5, atol=1e-6)
    triangular = run(attention, x[:, order], positions, segments)  # causal by slot: the fault
    assert np.abs(triangular - straight[:, order]).max() > 1e-2


def test_bfloat16_attention_stays_close_and_returns_bfloat16():
    attention, (x, positions, segments) = make_attention(), inputs()
    half = run(attention, x.astype(jnp.bfloat16), positions, segments)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), run(attention, x, positions, segments), atol=0.05)
