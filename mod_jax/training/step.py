"""The pure training step: (state, batch) -> (state, metrics), and how a state begins.

Randomness is `fold_in(seed, step)`; the learning rate is a function of the step. A *bad* step, one in which any of
`finite.finite_parts` is not finite, changes nothing but the step count and the count of bad steps. Vocabulary: B rows,
T positions, L routed blocks.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mod_jax.config import Config
from mod_jax.models.blocks import Record, RoutingRecord
from mod_jax.models.model import Model, Weights
from mod_jax.models.moe import ExpertRecord
from mod_jax.training.finite import finite_parts
from mod_jax.training.losses import LossSums, objective
from mod_jax.training.optimizer import join, make_optimizer, make_schedule, split

if TYPE_CHECKING:
    from mod_jax.training.language import Language

ROUTING_STREAM = 1  # 0 draws the initial parameters


class TrainState(NamedTuple):
    """Everything that a checkpoint holds. `cutoffs_L` averages each routed block's smallest selected score."""

    step: jax.Array
    params: dict[str, Any]
    opt_state: optax.OptState
    cutoffs_L: jax.Array
    bad_steps: jax.Array  # consecutive non-finite steps
    expert_cutoffs_LE: jax.Array | None = None  # the same average per expert, where experts choose their tokens

    @property
    def weights(self) -> Weights:
        return Weights(self.params, self.cutoffs_L, self.expert_cutoffs_LE)


class ExpertSums(NamedTuple):
    """What micro-batches add up of the blocks with experts, L of them. See `moe.ExpertRecord`."""

    load_LN: jax.Array
    dropped_L: jax.Array
    computed_L: jax.Array
    tokens_L: jax.Array
    cutoff_LA: jax.Array
    cutoff_rows_LA: jax.Array


# Metrics per routed block that are means over its selected tokens: from the record, [L, B, T] what each token adds.
OF_SELECTED: dict[str, Callable[[RoutingRecord], jax.Array]] = {
    "routing/gate_mean": lambda record: record.gate_BT,
}


class StepSums(NamedTuple):
    """What micro-batches add up."""

    losses: LossSums
    selected_L: jax.Array
    update_square_L: jax.Array
    residual_square_L: jax.Array
    of_selected: dict[str, jax.Array]  # as in `OF_SELECTED`
    cutoff_L: jax.Array  # over rows
    rows: jax.Array
    finite_L3: jax.Array  # number of micro-batches with finite router scores, predictor logits, update
    experts: ExpertSums | None


def init_state(config: Config, model: Model) -> TrainState:
    """The state before the first step. Jit it with output shardings, so that every leaf is a global array."""
    params = model.init()
    cutoffs_shape = len(config.expert_depths), config.experts.count
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=make_optimizer(config.optimizer, model.groups).init(params),
        cutoffs_L=jnp.zeros(config.num_routed, jnp.float32),
        bad_steps=jnp.zeros((), jnp.int32),
        expert_cutoffs_LE=jnp.zeros(cutoffs_shape, jnp.float32) if config.experts_choose else None,
    )


def routing_keys(config: Config, step: jax.Array | int, num_rows: int) -> jax.Array | None:
    """One random key per row of the global batch, for stochastic routing only."""
    if config.routing.score != "stochastic":
        return None
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), ROUTING_STREAM), step)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_rows))


def make_train_step(task: "Language", num_steps: int):
    """Returns the pure function (state, batch) -> (state, metrics), to be jitted once with the state donated.

    With a teacher its parameters come third (see `Language.loss_sums`). `batch` holds the arrays of `task.inputs`.
    Metrics are float32 scalars, and [L] arrays for what is counted per routed block.
    """
    config = task.config
    optimizer, schedule = (
        make_optimizer(config.optimizer, task.model.groups),
        make_schedule(config.optimizer, num_steps),
    )
    num_micro = config.train.accumulation

    def micro_loss(trained, frozen, batch, num_units, teacher):
        losses, record = task.loss_sums(join(trained, frozen), batch, *teacher)
        return objective(losses, num_units, config), _step_sums(losses, record)

    def train_step(state: TrainState, batch: dict[str, jax.Array], *teacher) -> tuple[TrainState, dict[str, jax.Array]]:
        batch = dict(batch, keys_B=routing_keys(config, state.step, config.train.batch_size))
        num_units = jnp.maximum(1, task.count_units(batch)).astype(jnp.float32)

        trained, frozen = split(state.params, config.optimizer, task.model.groups)
        grad_fn = jax.value_and_grad(micro_loss, has_aux=True)
        if num_micro == 1:
            (loss, sums), grads = grad_fn(trained, frozen, batch, num_units, teacher)
        else:

            def accumulate(total, micro):
                return jax.tree.map(jnp.add, total, grad_fn(trained, frozen, micro, num_units, teacher)), None

            # Micro-batch i takes rows i, i + A, ...: every device keeps its own rows.
            micros = jax.tree.map(lambda x: x.reshape(-1, num_micro, *x.shape[1:]).swapaxes(0, 1), batch)
            first = jax.tree.map(lambda x: x[0], micros)
            shapes = jax.eval_shape(grad_fn, trained, frozen, first, num_units, teacher)
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            ((loss, sums), grads), _ = jax.lax.scan(accumulate, zeros, micros)

        squares = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)]
        updates, opt_state = optimizer.update(grads, state.opt_state, trained)
        rate = schedule(state.step)
        params = join(jax.tree.map(lambda p, u: p - rate * u, trained, updates), frozen)
        steps, decay = _good_steps(state), config.routing.cutoff_decay
        cutoffs_L = _moving_average(state.cutoffs_L, sums.cutoff_L / jnp.maximum(sums.rows, 1.0), steps, decay)
        expert_cutoffs_LE = None
        if config.experts_choose:
            taken_LE = sums.experts.cutoff_LA / jnp.maximum(sums.experts.cutoff_rows_LA, 1.0)
            expert_cutoffs_LE = _moving_average(state.expert_cutoffs_LE, taken_LE, steps, decay)
        new = TrainState(state.step + 1, params, opt_state, cutoffs_L, jnp.zeros((), jnp.int32), expert_cutoffs_LE)
        blocks_L4 = jnp.column_stack([sums.finite_L3 == num_micro, jnp.isfinite(cutoffs_L)])
        parts = finite_parts(state, blocks_L4, loss, squares)
        finite = jnp.all(parts)
        kept = state._replace(step=state.step + 1, bad_steps=state.bad_steps + 1)
        state = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, kept)
        return state, _metrics(
            config,
            sums,
            num_units,
            loss=loss,
            grad_norm=jnp.sqrt(sum(squares)),
            rate=rate,
            finite_parts=parts,
            bad_steps=state.bad_steps,
        )

    return train_step


def _step_sums(losses: LossSums, record: Record) -> StepSums:
    routing, experts = record.routing, expert_sums(record.channel)
    if routing is None:
        none_L, one = jnp.zeros(0, jnp.float32), jnp.ones((), jnp.float32)
        finite_L3 = jnp.zeros((0, 3), jnp.float32)
        return StepSums(losses, none_L, none_L, none_L, {}, none_L, one, finite_L3, experts)
    scores_LBT, predictions_LBT = routing.router_logits_BT, routing.predictor_logits_BT
    predictions_LBT = scores_LBT if predictions_LBT is None else predictions_LBT
    finite_3L = [
        jnp.all(jnp.isfinite(scores_LBT), axis=(1, 2)),
        jnp.all(jnp.isfinite(predictions_LBT), axis=(1, 2)),
        jnp.isfinite(routing.update_square_sum),
    ]
    has_selected_LB = jnp.isfinite(routing.cutoff_B)
    return StepSums(
        losses=losses,
        selected_L=jnp.sum(routing.selected_BT, axis=(1, 2), dtype=jnp.float32),
        update_square_L=routing.update_square_sum,
        residual_square_L=routing.residual_square_sum,
        of_selected={
            name: jnp.sum(jnp.where(routing.selected_BT, value(routing), 0.0), axis=(1, 2))
            for name, value in OF_SELECTED.items()
        },
        cutoff_L=jnp.sum(jnp.where(has_selected_LB, routing.cutoff_B, 0.0), axis=1),
        rows=jnp.sum(has_selected_LB[0], dtype=jnp.float32),
        finite_L3=jnp.stack(finite_3L, axis=1).astype(jnp.float32),
        experts=experts,
    )


def _good_steps(state: TrainState) -> jax.Array:
    """Steps so far that changed something: Adam counts them, for a skipped step leaves its count as it was."""
    return optax.tree.get(state.opt_state, "count")


def _moving_average(old: jax.Array, new: jax.Array, num_seen: jax.Array, decay: float) -> jax.Array:
    """Exponential moving average that starts at the first value and forgets its first, untrained values sooner."""
    num_seen = num_seen.astype(jnp.float32)
    decay = jnp.minimum(decay, num_seen / (num_seen + 10.0))
    return decay * old + (1.0 - decay) * new


def _metrics(
    config: Config, sums: StepSums, num_tokens, *, loss, grad_norm, rate, finite_parts, bad_steps
) -> dict[str, jax.Array]:
    metrics = {
        "train/loss": sums.losses.cross_entropy / num_tokens,
        "train/objective": loss,
        "train/learning_rate": rate,
        "train/grad_norm": grad_norm,
        "train/finite": jnp.all(finite_parts).astype(jnp.float32),
        "train/finite_parts": finite_parts,
        "train/bad_steps": bad_steps,
    }
    if config.train.teacher:
        metrics["train/teacher_loss"] = sums.losses.teacher / num_tokens
    if config.num_routed:
        selected_L = jnp.maximum(sums.selected_L, 1.0)
        metrics |= {
            "routing/topk_fraction": sums.selected_L / num_tokens,
            "routing/update_ratio": jnp.sqrt(sums.update_square_L / jnp.maximum(sums.residual_square_L, 1e-30)),
        }
        metrics |= {name: total_L / selected_L for name, total_L in sums.of_selected.items()}
        if config.routing.predictor:
            metrics["train/predictor_loss"] = sums.losses.predictor / num_tokens / config.num_routed
        metrics["train/aux_loss"] = sums.losses.aux / num_tokens / config.num_routed
    if sums.experts is not None:
        metrics |= expert_metrics(sums.experts, config.experts.count)
        for name in ("balance", "expert_z"):
            metrics[f"train/{name}_loss"] = getattr(sums.losses, name) / jnp.maximum(jnp.sum(sums.experts.tokens_L), 1)
    return metrics


def expert_sums(record: ExpertRecord | None) -> ExpertSums | None:
    """The sums of a record, without what it says of single tokens."""
    if record is None:
        return None
    sums = record.sums
    return ExpertSums(sums.load_N, sums.dropped, sums.computed, sums.tokens, record.cutoff_sum_A, record.cutoff_rows_A)


def expert_metrics(sums: ExpertSums, num_experts: int) -> dict[str, jax.Array]:
    """`experts/` metrics per block with experts, from sums over tokens.

    `load` [L, N] is what each choice was claimed, 1 where all are claimed alike (`expert_stats.load_statistics` says
    what that means). `dropped` [L] is a fraction of the claims of experts, `computed` [L] of the tokens.
    """
    claims_L = jnp.sum(sums.load_LN[:, :num_experts], axis=1)
    all_claims_L1 = jnp.maximum(jnp.sum(sums.load_LN, axis=1, keepdims=True), 1.0)
    return {
        "experts/load": sums.load_LN * sums.load_LN.shape[1] / all_claims_L1,
        "experts/dropped": sums.dropped_L / jnp.maximum(claims_L, 1.0),
        "experts/computed": sums.computed_L / jnp.maximum(sums.tokens_L, 1.0),
    }
