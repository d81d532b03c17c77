"""Attention masked by positions: one function for full, routed and cached tokens, and the module with its weights.

Vocabulary: B rows, T query positions, S key slots, N query heads, K key/value heads, G = N / K query heads per
key/value head, H head dim. Tokens carry their ORIGINAL position and segment wherever they sit, so a routed block
attends over its C gathered tokens exactly as a full block with the other keys masked.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mod_jax.config import Config
from mod_jax.models import splash
from mod_jax.models.layers import RMSNorm, dense, normal, rotate
from mod_jax.models.memory import Seen, Tokens, is_visible
from mod_jax.sharding import param
from mod_jax.tuning import attends_by_kernel, platform

MIN_CHUNK = 128
MAX_CHUNKS = 8


def attend(
    q_BTNH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    q_positions_BT: jax.Array,
    kv_positions_BS: jax.Array,
    q_segments_BT: jax.Array | None,
    kv_segments_BS: jax.Array | None,
    *,
    same_tokens: bool = False,
) -> jax.Array:
    """Softmax attention; key s is allowed for query t iff 0 <= kv_position <= q_position and both share a segment > 0.

    A query with no allowed key gets 0. Position -1 or segment 0 mark an empty key slot. Logits and softmax are float32.

    Args:
      q_segments_BT, kv_segments_BS: both None where each row is one document.
      same_tokens: queries and keys are the same tokens in the same, increasing order. Then the keys after a chunk of
        queries are skipped, not masked, which saves close to half of the work; a TPU runs long rows by its kernel.

    Returns:
      [B, T, N, H] in the dtype of q.
    """
    B, T, N, H = q_BTNH.shape
    if same_tokens and attends_by_kernel(T, platform()):
        return splash.splash_attend(q_BTNH, k_BKSH, v_BKSH, q_segments_BT, kv_segments_BS)
    K = k_BKSH.shape[1]
    q_BKGTH = (q_BTNH * H**-0.5).reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)

    def chunk(start: int, stop: int, num_keys: int) -> jax.Array:
        q_segments = None if q_segments_BT is None else q_segments_BT[:, start:stop]
        kv_segments = None if kv_segments_BS is None else kv_segments_BS[:, :num_keys]
        positions = q_positions_BT[:, start:stop], kv_positions_BS[:, :num_keys]
        allowed = is_visible(*positions, q_segments, kv_segments)[:, None, None]
        logits_BKGTS = jnp.einsum(
            "BKGTH,BKSH->BKGTS",
            q_BKGTH[..., start:stop, :],
            k_BKSH[:, :, :num_keys],
            preferred_element_type=jnp.float32,
        )
        logits_BKGTS = jnp.where(allowed, logits_BKGTS, -1e30)
        largest = jax.lax.stop_gradient(jnp.max(logits_BKGTS, axis=-1, keepdims=True))
        weights_BKGTS = jnp.where(allowed, jnp.exp(logits_BKGTS - largest), 0.0)
        out_BKGTH = jnp.einsum(
            "BKGTS,BKSH->BKGTH",
            weights_BKGTS.astype(v_BKSH.dtype),
            v_BKSH[:, :, :num_keys],
            preferred_element_type=jnp.float32,
        )
        # Dividing the [T, H] result is cheaper than dividing the [T, S] weights.
        total = jnp.sum(weights_BKGTS, axis=-1)[..., None]
        return (out_BKGTH / jnp.maximum(total, 1e-30)).astype(q_BTNH.dtype)

    if same_tokens:
        size = max(MIN_CHUNK, -(-T // MAX_CHUNKS))
        starts = range(0, T, size)
        out_BKGTH = jnp.concatenate([chunk(s, min(s + size, T), min(s + size, T)) for s in starts], axis=-2)
    else:
        out_BKGTH = chunk(0, T, k_BKSH.shape[2])
    return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


class Attention(nnx.Module):
    """Multi-head attention with rotary positions and grouped key/value heads. q, k, v are separate weights.

    A token's query is q, its item (see `memory`) the pair of its key and value.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        model = config.model
        D, N, K, H = model.width, model.num_heads, model.num_kv_heads, model.head_dim
        self.q_DNH = param(rngs, (D, N, H), ("embed", "heads", None), normal(D**-0.5))
        self.k_DKH = param(rngs, (D, K, H), ("embed", "kv_heads", None), normal(D**-0.5))
        self.v_DKH = param(rngs, (D, K, H), ("embed", "kv_heads", None), normal(D**-0.5))
        self.o_NHD = param(rngs, (N, H, D), ("heads", None, "embed"), normal((2 * model.depth * N * H) ** -0.5))
        zeros = jax.nn.initializers.zeros
        if model.qkv_bias:
            self.q_bias_NH = param(rngs, (N, H), ("heads", None), zeros, group="vector")
            self.k_bias_KH = param(rngs, (K, H), ("kv_heads", None), zeros, group="vector")
            self.v_bias_KH = param(rngs, (K, H), ("kv_heads", None), zeros, group="vector")
        self.has_bias = model.qkv_bias
        self.q_norm = RMSNorm(H, rngs, model.norm_eps) if model.qk_norm else None
        self.k_norm = RMSNorm(H, rngs, model.norm_eps) if model.qk_norm else None

    def ask(self, x_BTD: jax.Array, tokens: Tokens) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """(queries [B, T, N, H], (keys, values) [B, K, T, H])."""
        q, k, v = (dense(x_BTD, w[...]) for w in (self.q_DNH, self.k_DKH, self.v_DKH))
        if self.has_bias:
            biases = self.q_bias_NH, self.k_bias_KH, self.v_bias_KH
            q, k, v = (a + b[...].astype(a.dtype)[None, None] for a, b in zip((q, k, v), biases, strict=True))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, tokens.angles), rotate(k, tokens.angles)
        return q, (k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))

    def answer(self, q_BTNH: jax.Array, seen: Seen, tokens: Tokens) -> jax.Array:
        """What each token takes from those that it sees, [B, T, D]."""
        out_BTNH = attend(
            q_BTNH,
            *seen.items,
            tokens.positions_BT,
            seen.positions_BS,
            None if seen.segments_BS is None else tokens.segments_BT,
            seen.segments_BS,
            same_tokens=seen.same_tokens,
        )
        B, T, N, H = out_BTNH.shape
        return dense(out_BTNH.reshape(B, T, N * H), self.o_NHD[...].reshape(N * H, -1))

    @staticmethod
    def flops(config: Config, num_tokens: float, num_pairs: float) -> tuple[float, float]:
        """(products with weights, logits and weighted values) of this many tokens and pairs of tokens, forward."""
        m = config.model
        projections = m.width * m.head_dim * (2 * m.num_heads + 2 * m.num_kv_heads)
        return 2 * num_tokens * projections, 4 * num_pairs * m.num_heads * m.head_dim

    @staticmethod
    def item_flops(config: Config, num_tokens: float) -> float:
        """FLOPs of the keys and values of this many tokens, forward."""
        m = config.model
        return 4 * num_tokens * m.width * m.num_kv_heads * m.head_dim
