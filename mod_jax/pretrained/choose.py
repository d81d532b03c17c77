"""Which blocks are routed, by which routers and cut-offs, and what each budget then costs: all by forward passes."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mod_jax.analysis.routing_stats import block_name
from mod_jax.config import Config
from mod_jax.data.batches import Batch, bits_per_byte, eval_batches, train_batches
from mod_jax.data.corpus import Corpus
from mod_jax.models import flops
from mod_jax.models.decoder import by_depth, from_depth
from mod_jax.pretrained import table
from mod_jax.pretrained.dense import Dense
from mod_jax.pretrained.measure import Loss, Probe, capacity_of, cheapest, fit_routers, tokens_kept
from mod_jax.pretrained.request import Request, Say, layout_of, with_keys


class Measured(NamedTuple):
    """What the measurements found. `config` is routed; arrays have an entry for every block of the stack."""

    config: Config
    worth_L: np.ndarray
    routers_LD: np.ndarray
    fit_L: np.ndarray
    cutoffs: dict[float, np.ndarray]
    whole: table.Point
    routed: list[table.Point]
    deleted: list[table.Point]
    evaluation: dict[str, float]


def measure(dense: Dense, corpus: Corpus, request: Request, say: Say) -> Measured:
    """Chooses the routed blocks, fits routers and cut-offs on training text, and measures on held-out windows."""
    calibration, held_out = batches_of(corpus, dense.config, request)
    few = {name: array[: request.block_rows] for name, array in calibration.items()}
    vocab_size, depth = dense.config.model.vocab_size, dense.config.model.depth
    probe = Probe(dense.config, vocab_size)
    params = probe.make_params(dense.params, np.zeros((depth, dense.config.model.width)))
    whole = probe.leave_out(params, [], held_out)
    bits = bits_per_byte(whole.nats, whole.num_bytes)
    say(
        f"dense     {whole.per_token:.4f} nats per token, {bits:.4f} bits per byte, on {whole.tokens:,} held-out tokens"
    )

    if layout_of(request.layout, dense.config, [1]) == "F" * depth:
        return _as_it_is(dense.config, vocab_size, whole)
    worth_L = probe.leave_one_out(params, few)
    order = cheapest(worth_L, depth)
    worth = ", ".join(f"{d} {worth_L[d]:+.2f}" for d in np.argsort(worth_L, kind="stable"))
    say(f"blocks    nats that leaving each out costs, on {few['tokens_BT'].size:,} training tokens: {worth}")
    layout = layout_of(request.layout, dense.config, order)
    config = with_keys(dense.config, {"model.layout": layout, "routing.capacity": request.capacity})
    routed = list(config.routed_depths)
    say(f"layout    {layout}: blocks {', '.join(map(str, routed))} are routed")

    routers_LD, fit_L = fit_routers(probe.moments(params, calibration))
    params = probe.make_params(dense.params, routers_LD)
    low, high = fit_L[routed].min(), fit_L[routed].max()
    fitted = calibration["tokens_BT"].size
    say(f"routers   by ridge regression on {fitted:,} training tokens, R2 {low:.2f} to {high:.2f} in routed blocks")

    points, cutoffs, evaluation = [], {}, {}
    for capacity in dict.fromkeys((request.capacity, *request.grid)):
        cutoffs[capacity] = probe.cutoffs(params, capacity_of(depth, routed, capacity), calibration)
        loss = probe.loss(params, cutoffs[capacity], held_out)
        points.append(table.routed_point(config, vocab_size, capacity, loss.capacity_L[routed], loss.per_token))
        evaluation = evaluation or _evaluation(config, vocab_size, probe, params, held_out, loss)
    points.sort(key=lambda point: -point.of_dense)
    deleted = []
    for count in table.counts_to_delete(config, vocab_size, points, len(order)):
        loss = probe.leave_out(params, order[:count], held_out)
        deleted.append(table.deleted_point(config, vocab_size, order[:count], loss.per_token))
    at_full = table.deleted_point(config, vocab_size, [], whole.per_token)
    say("\n".join(table.lines(at_full, points, deleted)))
    return Measured(config, worth_L, routers_LD, fit_L, cutoffs, at_full, points, deleted, evaluation)


def _as_it_is(config: Config, vocab_size: int, whole: Loss) -> Measured:
    """A model that stays dense, for training that continues it."""
    spent = flops.dense_flops(config, vocab_size).total / config.data.seq_len
    metrics = {"eval/topk_loss": whole.per_token, "eval/topk_bits_per_byte": bits_per_byte(whole.nats, whole.num_bytes)}
    metrics |= {f"eval/forward_flops_per_token/{name}": spent for name in ("topk", "dense")}
    none_L, point = np.zeros(0), table.deleted_point(config, vocab_size, [], whole.per_token)
    return Measured(config, none_L, none_L, none_L, {}, point, [], [], metrics)


def routed_params(dense: dict[str, Any], config: Config, routers_LD: np.ndarray) -> dict[str, Any]:
    """The parameters of `config`, from those of the dense model and one router per block."""
    blocks = by_depth(dense, with_keys(config, {"model.layout": "F", "routing.capacity": 1.0}))
    for depth in config.routed_depths:
        blocks[depth] = {"block": blocks[depth], "router": {"weight_D": jnp.asarray(routers_LD[depth])}}
    return from_depth(blocks, {name: dense[name] for name in ("embedder", "final_norm")}, config)


def batches_of(corpus: Corpus, config: Config, request: Request) -> tuple[Batch, list[Batch]]:
    """(rows of training text to measure and to fit on, held-out windows for the table)."""
    shape = dict(seq_len=config.data.seq_len)
    calibration = next(train_batches(corpus, **shape, batch_size=request.calibration_rows, seed=config.seed))
    windows = eval_batches(corpus, **shape, num_windows=config.data.eval_windows, batch_size=config.train.batch_size)
    return calibration, windows


def _evaluation(config: Config, vocab_size: int, probe: Probe, params, held_out: list[Batch], causal: Loss) -> dict:
    """The metrics of an evaluation, as `Evaluator` names them."""
    capacity_L = capacity_of(probe.depth, config.routed_depths, config.capacity_L[0])
    topk = probe.topk_loss(params, capacity_L, held_out)
    realised_L = causal.capacity_L[list(config.routed_depths)]
    metrics = {"eval/topk_loss": topk.per_token, "eval/topk_bits_per_byte": bits_per_byte(topk.nats, topk.num_bytes)}
    metrics |= {
        "eval/causal_loss/threshold": causal.per_token,
        "eval/causal_bits_per_byte/threshold": bits_per_byte(causal.nats, causal.num_bytes),
        "eval/gap/threshold": causal.per_token - topk.per_token,
        "eval/realised_capacity/threshold": float(np.mean(realised_L)),
    }
    spent = {
        "topk": flops.selection_flops(config, vocab_size, "topk"),
        "threshold": flops.selection_flops(config, vocab_size, "threshold", realised_L),
        "dense": flops.dense_flops(config, vocab_size),
    }
    for name, forward in spent.items():
        metrics[f"eval/forward_flops_per_token/{name}"] = forward.total / config.data.seq_len
    for depth, realised in zip(config.routed_depths, realised_L, strict=True):
        metrics[f"routing/{block_name(depth)}/topk_fraction"] = tokens_kept(config.data.seq_len, config.capacity_L[0])
        metrics[f"routing/{block_name(depth)}/realised_capacity/threshold"] = float(realised)
    return metrics
