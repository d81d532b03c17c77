"""What decoding a config would take on TPU chips that nobody here owns: memory, FLOPs, bytes read, time per token.

`make_report` compiles the very loop that `Sampler` would run there; `describe` is the report for a person. Memory is
the compiler's own figure; FLOPs and traffic are read from the compiled program; the time is an estimate (see
`mod_jax.planning.roofline`), never a measurement.

A routed block makes as many passes as the rows that enter need (see `serving`): one trip of its loop each or, at batch
1, the true branch of its conditionals. Vocabulary: B rows, R rows per pass, L routed blocks.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mod_jax import sharding, tuning
from mod_jax.config import Config, MeshConfig
from mod_jax.data.cache import cache_root
from mod_jax.layout import is_routed
from mod_jax.models import flops
from mod_jax.models.blocks import Block, Routed
from mod_jax.models.moe import SERVED
from mod_jax.planning import program, roofline, serving, serving_report, topology
from mod_jax.planning.report import count, line, moved_by_chip, size
from mod_jax.planning.serving import Arguments, expected_passes, tree_bytes
from mod_jax.sampling import cache as cache_lib
from mod_jax.sampling.cache import Cache
from mod_jax.sampling.generate import MIN_BUCKET
from mod_jax.sampling.stack import Stack
from mod_jax.tuning import rows_per_pass


def make_report(
    config: Config,
    topology_name: str,
    batch_size: int,
    context: int | None = None,
    mesh: MeshConfig | Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Compiles the decoding loop of `config` for TPU chips; what it takes, as JSON-ready numbers of bytes and seconds.

    Args:
      batch_size: rows that are generated together.
      context, mesh: as for `serving.prepare`.

    Raises:
      ConfigError: the slice does not exist, libtpu is missing, or this config cannot be sampled like this.
    """
    plan = serving.prepare(config, topology_name, batch_size, context, mesh)
    traced, arguments = trace_decoding(config, plan.selection, plan.batch_size, plan.num_positions, plan.place)
    compiled = topology.compile_for(traced.lower(), plan.product, plan.mesh, cache_root(config.data) / "plans")

    slots = cache_lib.slot_counts(config, plan.num_positions)
    rows = [rows_per_pass(plan.rows, block.capacity, serving.PLATFORM) for block in config.blocks]
    groups = plan.batch_size // plan.rows
    passes = [
        expected_passes(plan.rows, block.capacity, R, groups) for block, R in zip(config.blocks, rows, strict=True)
    ]
    experts = [expected_experts(config, depth, plan.rows, passes[depth]) for depth in range(len(config.blocks))]
    weights = serving.read_by_chip(arguments.stack, plan.mesh, plan.batch_size)
    read = weights, serving.cache_by_chip(config, arguments, plan, slots)
    report = {
        **serving_report.begin(config, plan, arguments, compiled, slots),
        "program": "decode",
        "passes": passes,
        "rows_per_pass": rows,
        "flops": {"model": flops.decode_flops(config, config.model.vocab_size, slots).total},
        "read": bytes_read(config, *read, passes, rows, experts),
    }
    if config.expert_depths:
        report["experts"] = {"count": config.experts.count, "used": experts}
    if not compiled.refused:
        _add_measures(report, plan, compiled)
    report["fits"] = serving_report.fits(report, compiled)
    report["verdict"] = verdict(report)
    return report


def verdict(report: dict[str, Any]) -> str:
    """See `serving_report.verdict`."""
    smaller = {"batch": (report["batch"] // 2, 1), "context": (report["context"] // 2, MIN_BUCKET)}
    return serving_report.verdict(report, "decoding", smaller)


def trace_decoding(
    config: Config, selection: str, batch_size: int, num_positions: int, place: jax.Device | Mesh
) -> tuple[jax.stages.Traced, Arguments]:
    """`Programs.advance` as `Sampler` compiles it, on one device or over a mesh; and what it is given."""
    arguments = serving.make_arguments(config, selection, batch_size, place)
    programs, weights, request = arguments.programs, arguments.weights, arguments.request
    slots = cache_lib.slot_counts(config, num_positions)
    lies = programs.state_shardings(place)
    with sharding.within(place if isinstance(place, Mesh) else None):
        given = arguments.of_rows((batch_size, 1), (batch_size,), (batch_size,))
        state, _ = jax.eval_shape(
            lambda *given: programs.prefill(*given, num_positions=num_positions, slots=slots), weights, request, *given
        )
        state = arguments.place(state) if lies is None else serving.laid(state, lies)
        advance = jax.jit(programs.advance, donate_argnames="state", out_shardings=lies)
        return advance.trace(weights, request, state=state, target=jax.ShapeDtypeStruct((), jnp.int32)), arguments


def expected_experts(config: Config, depth: int, batch_size: int, passes: float) -> float:
    """Experts that one pass of the block at this depth is expected to use, if all are used alike; 0 without experts.

    Each token of the pass takes a given expert with the probability A / N, or the expert it, with that of its capacity.
    """
    spec, e = config.blocks[depth], config.experts
    if not spec.has_experts:
        return 0.0
    tokens = batch_size * spec.capacity / passes
    taken = e.capacity / e.count if e.choice == "expert" else e.chosen / (e.count + e.noop)
    return e.count * (1 - (1 - min(1.0, taken)) ** tokens)


def bytes_read(
    config: Config, stack: Stack, cache: Cache, passes: list[float], rows: list[int], experts: list[float]
) -> dict[str, float]:
    """Bytes of weights and of caches that a chip must read in a step, by count: each pass a block's weights, of experts
    those that are used, and R rows' caches.

    Args:
      stack, cache: shapes of what a chip reads of them if it reads all.
      passes: expected number, by depth.
      rows: R, by depth.
      experts: how many a pass uses, by depth.
    """
    # Of a table that is not tied only B rows are read.
    embedder = stack.embedder
    weights = tree_bytes(embedder if embedder.tie else embedder.unembed_DV) + tree_bytes(stack.final_norm)
    cached = 0.0
    for depth, (block, block_cache) in enumerate(zip(stack.blocks, cache, strict=True)):
        used = experts[depth] / config.experts.count
        weights += weight_bytes(block, used)  # of a routed block: router and predictor, which always run
        kind = config.blocks[depth].kind
        if kind in stack.inside:
            weights += passes[depth] * weight_bytes(stack.inside[kind], used) / stack.kinds.count(kind)
        for array in jax.tree.leaves(block_cache):
            cached += passes[depth] * rows[depth] / array.shape[0] * tree_bytes(array)
    return {"weights": weights, "cache": cached}


def weight_bytes(block: Block | Routed, used: float) -> float:
    """Bytes of a block's weights, where `used` is the share of its experts that is read."""
    inside = block.block if block.routed else block  # None where it lies in a stack
    of_experts = 0
    if block.has_experts and inside is not None:
        of_experts = tree_bytes((inside.experts.up_EDF, inside.experts.down_EFD))
    return tree_bytes(block) - (1 - used) * of_experts


def read_loop(text: str, mesh_shape: dict[str, int], passes: list[float], experts: list[float]) -> program.Step:
    """One step of the compiled loop, routed blocks as often as `passes` says by depth, and as many experts a pass as
    `experts` does. A token is drawn by temperature: the two conditions of how to choose it are true without top-k and
    top-p."""

    def odds(source: str) -> float:
        if block := re.search(rf"/block(\d+)/(?:.*/)?{SERVED}/while$", source):
            return experts[int(block[1])]
        block = re.search(r"/block(\d+)/(?:cond|while)$", source)
        return passes[int(block[1])] if block else 1.0

    return program.read_step(text, mesh_shape, of_loop=True, odds=odds)


def _add_measures(report: dict[str, Any], plan: serving.Serving, compiled: topology.Compiled) -> None:
    """Adds what only a compiled program can tell: memory, FLOPs, traffic, and the estimate made from them."""
    mesh, chip = dict(plan.mesh.shape), plan.product.chip
    experts = report["experts"]["used"] if "experts" in report else []
    step = read_loop(compiled.text, mesh, report["passes"], experts)
    bypassed = read_loop(compiled.text, mesh, [0.0] * len(report["passes"]), experts)
    around_loop = program.read_step(compiled.text, mesh, odds=lambda _: 0.0)
    report["memory"] |= {**compiled.memory, "needed": compiled.hbm_bytes}
    report["flops"] |= {
        "compiled": step.flops * plan.mesh.size / report["batch"],
        "compiled_every_block": compiled.flops_once * plan.mesh.size / report["batch"],
    }
    report["read"] |= {
        "compiled": step.hbm_bytes,
        "compiled_bypassed": bypassed.hbm_bytes,
        "per_call": around_loop.hbm_bytes,
    }
    report["collectives"] = moved_by_chip(step)
    times = roofline.estimate(step, plan.product, tuning.peak_flops(chip.kind), topology.coordinates(plan.mesh))
    by_count = (report["read"]["weights"] + report["read"]["cache"]) / chip.hbm_bandwidth
    # A tiny model stays on the chip from step to step, as far as the program tells; no plan should count on that.
    seconds = max(times.seconds_exposed, by_count + times.interconnect)
    report["estimate"] = {
        **serving_report.terms(times),
        "seconds": seconds,
        "seconds_by_count": by_count,
        "tokens_per_second": report["batch"] / seconds,
    }


def describe(report: dict[str, Any]) -> str:
    """The report for a person, the verdict last."""
    rows = count(report["batch"], "row")
    what = f"a step is one token for {rows} of up to {report['context']:,} positions"
    return serving_report.describe(report, what, "step", _measures)


def _measures(report: dict[str, Any]) -> list[str]:
    flops = report["flops"]
    return [
        *([line("routed", _routed(report))] if _has_routed(report) else []),
        *([line("experts", _experts(report))] if "experts" in report else []),
        line(
            "flops",
            f"{flops['model']:.4g} a token by our count, caches full; {flops['compiled']:.4g} in the matrix "
            "products of the compiled program, without those of few rows, which run on the vector unit; the "
            f"compiler's own figure, every block once, is {flops['compiled_every_block']:.4g}",
        ),
        line("read", _read(report)),
        line("estimate", _estimate(report)),
    ]


def _read(report: dict[str, Any]) -> str:
    read = report["read"]
    kept = ", since much stays on the chip from step to step" if read["compiled"] < read["weights"] else ""
    bypassed = f", {size(read['compiled_bypassed'])} where no row enters a routed block" if _has_routed(report) else ""
    return (
        f"{size(read['weights'] + read['cache'])} a chip and step by our count: weights {size(read['weights'])}, full "
        f"caches {size(read['cache'])}. "
        f"{size(read['compiled'])} to and from HBM in the compiled program{kept}{bypassed}. "
        f"{size(read['per_call'])} more around the loop: once a generation, or once a token where text is streamed"
    )


def _has_routed(report: dict[str, Any]) -> bool:
    return any(map(is_routed, report["layout"]))


def _routed(report: dict[str, Any]) -> str:
    by_depth = zip(report["layout"], report["passes"], report["rows_per_pass"], strict=True)
    kinds = sorted({(passes, rows) for kind, passes, rows in by_depth if is_routed(kind)})
    expected = " or ".join(f"{passes:.3g} passes of {count(rows, 'row')}" for passes, rows in kinds)
    return f"{expected} a block and step, expected if each row enters by chance, with the block's capacity"


def _experts(report: dict[str, Any]) -> str:
    used = " or ".join(f"{used:.3g}" for used in sorted({used for used in report["experts"]["used"] if used}))
    return (
        f"{used} of {report['experts']['count']} a block and pass, expected if all are used alike; no others are read"
    )


def _estimate(report: dict[str, Any]) -> str:
    e, links = report["estimate"], serving_report.links(report)
    return (
        f"{1e3 * e['seconds']:.3g} ms a token and row, {e['tokens_per_second']:,.0f} tokens/s for all rows. A "
        f"roofline, optimistic, not a measurement, no TPU ran it: HBM {1e3 * e['hbm']:.3g} ms, matrix unit "
        f"{1e3 * e['compute']:.3g} ms{links}; HBM {1e3 * e['seconds_by_count']:.3g} ms by our count. Loops and "
        "branches of routed blocks count as often as expected above; a token is drawn without top-k and top-p"
    )
