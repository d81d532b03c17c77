"""Losses of logits that are there already."""

import jax.numpy as jnp

from mod_jax.models.blocks import Record
from mod_jax.models.decoder import ModelOutput
from mod_jax.training.losses import LossSums, loss_sums


def sums_of(output: ModelOutput, targets_BT, segments_BT, **kwargs) -> LossSums:
    """`loss_sums` of a forward pass: its logits are features, where the output weight is the identity."""
    identity_VV = jnp.eye(output.logits_BTV.shape[-1])
    return loss_sums(
        output.logits_BTV, identity_VV, Record(output.routing, output.channel), targets_BT, segments_BT, **kwargs
    )
