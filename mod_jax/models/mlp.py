"""The channel of an ordinary block: dense products around a pointwise non-linearity, of each token alone.

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
    """down(activation(up(x))), without biases. Gated (Shazeer 2020) it is down(activation(gate(x)) * up(x))."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        D, F, depth = config.model.width, config.model.mlp_dim, config.model.depth
        self.up_DF = param(rngs, (D, F), ("embed", "mlp"), normal(D**-0.5))
        self.down_FD = param(rngs, (F, D), ("mlp", "embed"), normal((2 * depth * F) ** -0.5))
        self.gate_DF = param(rngs, (D, F), ("embed", "mlp"), normal(D**-0.5)) if config.model.gated_mlp else None
        self.activation = config.model.activation

    def __call__(self, x_BTD: jax.Array, tokens: Tokens, choice: Any) -> tuple[jax.Array, None]:
        """(what each token's MLP gives, [B, T, D]; no record)."""
        # The backward pass needs the activation again, not stored: that would be as much memory as the hidden values.
        activation = ACTIVATIONS[self.activation]
        up_BTF = dense(x_BTD, self.up_DF[...])
        if self.gate_DF is None:
            down = jax.checkpoint(lambda h, w: dense(activation(h), w), prevent_cse=False)
            return down(up_BTF, self.down_FD[...]), None
        down = jax.checkpoint(lambda g, h, w: dense(activation(g) * h, w), prevent_cse=False)
        return down(dense(x_BTD, self.gate_DF[...]), up_BTF, self.down_FD[...]), None

    @staticmethod
    def flops(config: Config, num_tokens: float, num_pairs: float) -> tuple[float, float]:
        """(products with weights, 0) of this many tokens, forward."""
        matrices = 3 if config.model.gated_mlp else 2
        return 2 * matrices * num_tokens * config.model.width * config.model.mlp_dim, 0.0
