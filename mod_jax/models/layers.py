"""The small parts: dense products, RMSNorm, rotary angles, embedder.

Vocabulary: B rows, T positions, D model width, N heads, H head dim, V vocabulary. Parameters are float32;
modules compute in the dtype of their input.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mod_jax.sharding import Initializer, bring_together, constrain, moves_tokens, param


def normal(std: float) -> Initializer:
    return jax.nn.initializers.normal(std)


def dense(x: jax.Array, weight: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """x[..., D] times weight[D, ...]: factors in the dtype of x, sums in float32, the result in `dtype` or that of x.

    All leading dimensions are flattened into one: XLA's CPU backward of the 2-D product is 1.3x faster than of the
    3-D one, which is 17-19 % of a training step. For what is sent over fsdp see `sharding.sending_less`.
    """
    x_MD, weight_DN = x.reshape(-1, x.shape[-1]), weight.astype(x.dtype).reshape(weight.shape[0], -1)
    together = bring_together if moves_tokens(x_MD.shape[0], *weight_DN.shape) else lambda x_MD: x_MD
    product = together(jnp.matmul(together(x_MD), weight_DN, preferred_element_type=dtype))
    return product.reshape(*x.shape[:-1], *weight.shape[1:])


def rms_normalise(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """x / rms(x) over the last axis, float32."""
    return x.astype(jnp.float32) * inverse_rms(x, eps)[..., None]


def inverse_rms(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """1 / rms(x) over the last axis, float32, without that axis. `eps` is added to the mean square."""
    return jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1) + eps)


class RotaryAngles(NamedTuple):
    """Sines and cosines of the rotary angles of each token (Su et al. 2021), float32 [B, T, H / 2]."""

    sin_BTH: jax.Array
    cos_BTH: jax.Array


def rotary_angles(positions_BT: jax.Array, head_dim: int, base: float, factors: Sequence[float] = ()) -> RotaryAngles:
    """The angles of these positions. A token has those of its ORIGINAL position, whatever slot it sits in.

    Args:
      factors: what each of the H / 2 frequencies is divided by; (): 1. Llama 3 so stretches its long wavelengths.
    """
    half = head_dim // 2
    frequencies_H = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if factors:
        frequencies_H = frequencies_H / jnp.array(factors, jnp.float32)
    angles_BTH = positions_BT[..., None].astype(jnp.float32) * frequencies_H[None, None]
    return RotaryAngles(jnp.sin(angles_BTH), jnp.cos(angles_BTH))


def rotate(x_BTNH: jax.Array, angles: RotaryAngles) -> jax.Array:
    """Rotates the pairs (h, h + H / 2) of every head."""
    sin, cos = angles.sin_BTH[:, :, None], angles.cos_BTH[:, :, None]
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTNH.dtype)


class RMSNorm(nnx.Module):
    """RMS normalisation with a learned scale."""

    def __init__(self, width: int, rngs: nnx.Rngs, eps: float = 1e-6):
        self.scale_D = param(rngs, (width,), (None,), jax.nn.initializers.ones, group="vector")
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return (rms_normalise(x, self.eps) * jnp.expand_dims(self.scale_D[...], range(x.ndim - 1))).astype(x.dtype)


class Embedder(nnx.Module):
    """Token table and logits. With `tie` the table serves both. With `scale` its rows enter times sqrt(D)."""

    def __init__(self, vocab_size: int, width: int, tie: bool, rngs: nnx.Rngs, scale: bool = True):
        self.table_VD = param(rngs, (vocab_size, width), ("vocab", "embed"), normal(width**-0.5))
        if not tie:
            self.unembed_DV = param(rngs, (width, vocab_size), ("embed", "vocab"), normal(width**-0.5))
        self.tie, self.scale = tie, scale

    def embed(self, tokens_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """[B, T] ids -> [B, T, D]. Ids must be in the vocabulary (checked on the host)."""
        # Without this constraint the partitioner moves the table over the data axes.
        few = moves_tokens(tokens_BT.size, *self.table_VD.shape)
        table_VD = constrain(self.table_VD[...].astype(dtype), ("vocab", "embed" if few else None))
        tokens_BT = bring_together(tokens_BT) if few else tokens_BT
        x_BTD = table_VD.at[tokens_BT].get(mode="promise_in_bounds")
        x_BTD = bring_together(x_BTD, "embed") if few else x_BTD
        # Entries of order 1 from a table of order D^-0.5: Adam then moves embeddings as fast as everything else.
        x_BTD = x_BTD * table_VD.shape[1] ** 0.5 if self.scale else x_BTD
        return constrain(x_BTD, ("batch", None, None))

    def output_weight(self) -> jax.Array:
        """float32 [D, V], which turns a position into its logits."""
        return self.table_VD[...].T if self.tie else self.unembed_DV[...]

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] -> float32 [B, T, V], never rounded to the compute dtype in between."""
        weight_DV = self.output_weight().astype(x_BTD.dtype)
        few = moves_tokens(x_BTD.size // x_BTD.shape[-1], *weight_DV.shape)
        weight_DV = constrain(weight_DV, ("embed" if few else None, "vocab"))
        return constrain(dense(x_BTD, weight_DV, jnp.float32), ("batch", None, "vocab"))
