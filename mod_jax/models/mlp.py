"""The channel of an ordinary block: two dense products around a pointwise non-linearity, of each token alone.

Vocabulary: B rows, T positions, D model width, F MLP hidden.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mod_jax.config import Config
from mod_jax.models.layers import dense, normal
from mod_jax.models.memory import Tokens
from mod_jax.sharding import param

ACTIVATIONS = {
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
}


class MLP(nnx.Module):
    """down(activation(up(x))), without biases."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        D, F, depth = config.model.width, config.model.mlp_dim, config.model.depth
        self.up_DF = param(rngs, (D, F), ("embed", "mlp"), normal(D**-0.5))
        self.down_FD = param(rngs, (F, D), ("mlp", "embed"), normal((2 * depth * F) ** -0.5))
        self.activation = config.model.activation

    def __call__(self, x_BTD: jax.Array, tokens: Tokens, choice: Any) -> tuple[jax.Array, None]:
        """(what each token's MLP gives, [B, T, D]; no record)."""
        # The backward pass needs the activation again, not stored: that would be as much memory as the hidden values.
        down = jax.checkpoint(lambda h, w: dense(ACTIVATIONS[self.activation](h), w), prevent_cse=False)
        return down(dense(x_BTD, self.up_DF[...]), self.down_FD[...]), None

    @staticmethod
    def flops(config: Config, num_tokens: float, num_pairs: float) -> tuple[float, float]:
        """(products with weights, 0) of this many tokens, forward."""
        return 4 * num_tokens * config.model.width * config.model.mlp_dim, 0.0
