"""The training objective: next-token cross-entropy plus the two losses that make routing causal.

Everything is a sum over tokens first and is divided by a token count at the end, so that splitting a batch into
micro-batches, or over devices, changes nothing. Vocabulary: B rows, T positions, D width, V vocabulary, L routed
blocks; N chunks of a row of C positions each; G groups of rows, one per device along the batch; M tokens that a chunk
has in each group.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mod_jax.config import Config
from mod_jax.models.blocks import Record
from mod_jax.sharding import RULES, constrain
from mod_jax.tuning import default_loss_chunk


class LossSums(NamedTuple):
    """Sums over the real tokens of a batch, in nats. The two routing losses are summed over routed blocks too, the two
    losses of expert routers over blocks with experts.

    `next_token` is what training minimises, the cross-entropy and z_loss times the squared log-normaliser, or with a
    teacher what `Distilled` says. `cross_entropy` is for reading, and has no gradient, and so is `teacher`, the KL
    divergence from the teacher's distribution to the model's.
    """

    next_token: jax.Array
    cross_entropy: jax.Array
    aux: jax.Array
    predictor: jax.Array
    balance: jax.Array
    expert_z: jax.Array
    teacher: jax.Array


class Distilled(NamedTuple):
    """What is minimised: (1 - teacher_weight) cross-entropy + teacher_weight KL + z_loss squared log-normaliser."""

    z_loss: float
    teacher_weight: float


def token_cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Per token, float32 [B, T]: -log p(target) and the log-normaliser of the logits."""
    log_normaliser_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    target_logits_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return log_normaliser_BT - target_logits_BT, log_normaliser_BT


def membership_cross_entropy(logits: jax.Array, is_member: jax.Array) -> jax.Array:
    """Elementwise binary cross-entropy of sigmoid(logits) against top-k membership."""
    return jax.nn.softplus(jnp.where(is_member, -logits, logits))


def loss_sums(
    x_BTD: jax.Array,
    weight_DV: jax.Array,
    record: Record,
    targets_BT: jax.Array,
    segments_BT: jax.Array,
    *,
    z_loss: float = 0.0,
    chunk: int = 0,
    teacher: tuple[jax.Array, jax.Array] | None = None,
    teacher_weight: float = 1.0,
) -> LossSums:
    """Sums each loss over real tokens (segment > 0), so that padding counts nowhere.

    Args:
      x_BTD, weight_DV: features and the weight that makes logits of them (`Decoder.features`,
        `Embedder.output_weight`).
      chunk: tokens per device whose logits exist at a time, 0 for `tuning.default_loss_chunk`. Changes memory and
        speed, never the result.
      teacher: features and weight of a teacher, whose distribution is learned by this share (see `Distilled`).
    """
    weights_BT = (segments_BT > 0).astype(jnp.float32)
    args, kl = (x_BTD, weight_DV, targets_BT, weights_BT), jnp.zeros((), jnp.float32)
    if teacher is None:
        next_token, cross_entropy = next_token_sums(z_loss, chunk, *args)
    else:
        next_token, cross_entropy, kl = distillation_sums(Distilled(z_loss, teacher_weight), chunk, *args, *teacher)
        kl = jax.lax.stop_gradient(kl)
    aux = predictor = balance = expert_z = jnp.zeros((), jnp.float32)
    routing, experts = record
    if experts is not None:
        balance, expert_z = jnp.sum(experts.sums.balance), jnp.sum(experts.sums.z)
    if routing is not None:
        member_LBT = routing.selected_BT
        aux = jnp.sum(membership_cross_entropy(routing.router_logits_BT, member_LBT) * weights_BT[None])
        if routing.predictor_logits_BT is not None:
            nats_LBT = membership_cross_entropy(routing.predictor_logits_BT, member_LBT)
            predictor = jnp.sum(nats_LBT * weights_BT[None])
    return LossSums(next_token, jax.lax.stop_gradient(cross_entropy), aux, predictor, balance, expert_z, kl)


def objective(sums: LossSums, num_tokens: jax.Array, config: Config) -> jax.Array:
    """The scalar that training minimises: each sum per token, times its coefficient."""
    total = sums.next_token + config.routing.aux_weight * sums.aux + config.routing.predictor_weight * sums.predictor
    total += config.experts.balance_weight * sums.balance + config.experts.z_weight * sums.expert_z
    return total / num_tokens


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def next_token_sums(z_loss: float, chunk: int, x_BTD, weight_DV, targets_BT, weights_BT) -> tuple[jax.Array, jax.Array]:
    """(cross-entropy + z_loss * squared log-normaliser, cross-entropy), each summed with the weights of the tokens.

    The logits of one chunk of positions exist at a time, and never for a backward pass: if a gradient is asked for, it
    is taken while the chunk's logits are there. Only the first output has one, for the features and for their weight.
    Logits and their softmax are float32 whatever the dtype of the features. Their gradient is rounded to the features'
    dtype before the two products of the backward pass, so that these are as fast as any other.
    """
    sums, _ = _over_chunks(False, z_loss, chunk, x_BTD, weight_DV, targets_BT, weights_BT)
    return sums


def _next_token_forward(z_loss: float, chunk: int, *args):
    return _over_chunks(True, z_loss, chunk, *args)


def _next_token_backward(z_loss: float, chunk: int, gradients, cotangents):
    d_x_BTD, d_weight_DV = gradients
    scale, _ = cotangents
    return (scale * d_x_BTD).astype(d_x_BTD.dtype), scale * d_weight_DV, None, None


next_token_sums.defvjp(_next_token_forward, _next_token_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def distillation_sums(
    share: Distilled, chunk: int, x_BTD, weight_DV, targets_BT, weights_BT, teacher_BTE, teacher_EV
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(what is minimised, cross-entropy, KL divergence from the teacher), as `next_token_sums` gives the first two.

    The logits of the teacher, too, exist one chunk at a time. They have no gradient.
    """
    sums, _ = _over_chunks(False, share, chunk, x_BTD, weight_DV, targets_BT, weights_BT, teacher_BTE, teacher_EV)
    return sums


def _distillation_backward(share: Distilled, chunk: int, gradients, cotangents):
    return (*_next_token_backward(share, chunk, gradients, cotangents[:2]), None, None)


distillation_sums.defvjp(_next_token_forward, _distillation_backward)


def _chunk_sums(share: float | Distilled, logits_GMV, targets_GM, weights_GM, teacher_GMV=None) -> tuple:
    """The sums of `next_token_sums`, or of `distillation_sums`, over one chunk: M tokens of each of G groups."""
    nats_GM, log_normaliser_GM = token_cross_entropy(logits_GMV, targets_GM)
    cross_entropy = jnp.sum(nats_GM * weights_GM)
    if isinstance(share, Distilled):
        log_p_GMV, log_q_GMV = (jax.nn.log_softmax(logits, axis=-1) for logits in (teacher_GMV, logits_GMV))
        kl = jnp.sum(jnp.sum(jnp.exp(log_p_GMV) * (log_p_GMV - log_q_GMV), axis=-1) * weights_GM)
        minimised = share.teacher_weight * kl
        if share.teacher_weight < 1:
            minimised += (1 - share.teacher_weight) * cross_entropy
        if share.z_loss:
            minimised += share.z_loss * jnp.sum(jnp.square(log_normaliser_GM) * weights_GM)
        return minimised, cross_entropy, kl
    z_loss = share
    if not z_loss:  # 0 times a square that overflows would be NaN
        return cross_entropy, cross_entropy
    return cross_entropy + z_loss * jnp.sum(jnp.square(log_normaliser_GM) * weights_GM), cross_entropy


def _minimised_and_all(*args) -> tuple[jax.Array, tuple]:
    sums = _chunk_sums(*args)
    return sums[0], sums


def _product(equation: str, *factors: jax.Array) -> jax.Array:
    """Einsum whose result is float32, of factors of any dtype."""
    return jnp.einsum(equation, *factors, preferred_element_type=jnp.float32)


def _over_chunks(
    with_gradients: bool,
    share: float | Distilled,
    chunk: int,
    x_BTD,
    weight_DV,
    targets_BT,
    weights_BT,
    teacher_BTE=None,
    teacher_EV=None,
):
    """The sums over all chunks, and if asked for the gradients of the first: [B, T, D], and float32 [D, V]."""
    B, T, D = x_BTD.shape
    G = _num_groups(B)
    N = num_chunks(B, T, chunk)
    C = math.ceil(T / N)

    def split(a_BT):
        a_BT = jnp.pad(a_BT, [(0, 0), (0, N * C - T)] + [(0, 0)] * (a_BT.ndim - 2))
        return jnp.moveaxis(a_BT.reshape(G, B // G, N, C, *a_BT.shape[2:]), 2, 0)

    def by_group(weight_DV, dtype):
        # A weight for each group: its gradient stays where the group is, and is added over devices once, not per chunk.
        weight_GDV = jnp.broadcast_to(weight_DV.astype(dtype)[None], (G, *weight_DV.shape))
        return constrain(weight_GDV, ("batch", None, "vocab"))

    weight_GDV = by_group(weight_DV, x_BTD.dtype)
    per_token = (x_BTD, targets_BT, weights_BT)
    if teacher_BTE is not None:
        per_token, teacher_GEV = (*per_token, teacher_BTE), by_group(teacher_EV, teacher_BTE.dtype)

    def step(carry, inputs):
        x_GMD, targets_GM, weights_GM, *teacher = (a.reshape(G, -1, *a.shape[3:]) for a in inputs)
        args = share, _product("GMD,GDV->GMV", x_GMD, weight_GDV), targets_GM, weights_GM
        args += tuple(_product("GME,GEV->GMV", teacher_GME, teacher_GEV) for teacher_GME in teacher)
        if not with_gradients:
            return jax.tree.map(jnp.add, carry, _chunk_sums(*args)), None
        (_, sums), d_logits_GMV = jax.value_and_grad(_minimised_and_all, argnums=1, has_aux=True)(*args)
        d_logits_GMV = d_logits_GMV.astype(x_GMD.dtype)
        d_weight_GDV = _product("GMD,GMV->GDV", x_GMD, d_logits_GMV)
        d_x_GMD = _product("GMV,GDV->GMD", d_logits_GMV, weight_GDV).astype(x_GMD.dtype)
        return jax.tree.map(jnp.add, carry, (sums, d_weight_GDV)), d_x_GMD

    zero = jnp.zeros((), jnp.float32)
    carry = (zero,) * (2 if teacher_BTE is None else 3)
    if with_gradients:
        carry = carry, constrain(jnp.zeros(weight_GDV.shape, jnp.float32), ("batch", None, "vocab"))
    carry, d_x_NGMD = jax.lax.scan(step, carry, tuple(map(split, per_token)))
    if not with_gradients:
        return carry, None
    sums, d_weight_GDV = carry
    d_x_BTD = jnp.moveaxis(d_x_NGMD.reshape(N, G, B // G, C, D), 0, 2).reshape(B, N * C, D)[:, :T]
    return sums, (d_x_BTD, jnp.sum(d_weight_GDV, axis=0))


def num_chunks(num_rows: int, length: int, chunk: int) -> int:
    """Chunks that rows of this length are taken in, in the current mesh."""
    tokens_per_row = (chunk or default_loss_chunk()) * _num_groups(num_rows) // num_rows
    return math.ceil(length / max(1, tokens_per_row))


def _num_groups(num_rows: int) -> int:
    """Devices that the rows are split over, in the current mesh; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    groups = 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in RULES.batch)
    return groups if num_rows % groups == 0 else 1
