"""The training objective: next-token cross-entropy plus the two losses that make routing causal.

Everything is a sum over tokens first and is divided by a token count at the end, so that splitting a batch into
micro-batches, or over devices, changes nothing. Vocabulary: B rows, T positions, V vocabulary, L routed blocks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mod_jax.config import Config
from mod_jax.models.decoder import ModelOutput


class LossSums(NamedTuple):
    """Sums over the real tokens of a batch, in nats. The two routing losses are summed over routed blocks too."""

    cross_entropy: jax.Array
    z: jax.Array
    aux: jax.Array
    predictor: jax.Array


def token_cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Per token, float32 [B, T]: -log p(target) and the log-normaliser of the logits."""
    log_normaliser_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    target_logits_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return log_normaliser_BT - target_logits_BT, log_normaliser_BT


def membership_cross_entropy(logits: jax.Array, is_member: jax.Array) -> jax.Array:
    """Elementwise binary cross-entropy of sigmoid(logits) against top-k membership."""
    return jax.nn.softplus(jnp.where(is_member, -logits, logits))


def loss_sums(output: ModelOutput, targets_BT: jax.Array, segments_BT: jax.Array) -> LossSums:
    """Sums each loss over real tokens (segment > 0), so that padding counts nowhere."""
    weights_BT = (segments_BT > 0).astype(jnp.float32)
    nats_BT, log_normaliser_BT = token_cross_entropy(output.logits_BTV, targets_BT)
    aux = predictor = jnp.zeros(())
    if output.routing is not None:
        member_LBT = output.routing.selected_BT
        aux = jnp.sum(membership_cross_entropy(output.routing.router_logits_BT, member_LBT) * weights_BT[None])
        if output.routing.predictor_logits_BT is not None:
            nats_LBT = membership_cross_entropy(output.routing.predictor_logits_BT, member_LBT)
            predictor = jnp.sum(nats_LBT * weights_BT[None])
    return LossSums(
        cross_entropy=jnp.sum(nats_BT * weights_BT),
        z=jnp.sum(jnp.square(log_normaliser_BT) * weights_BT),
        aux=aux,
        predictor=predictor,
    )


def objective(sums: LossSums, num_tokens: jax.Array, config: Config) -> jax.Array:
    """The scalar that training minimises: each sum per token, times its coefficient."""
    total = sums.cross_entropy + config.train.z_loss * sums.z + config.routing.aux_weight * sums.aux
    return (total + config.routing.predictor_weight * sums.predictor) / num_tokens
