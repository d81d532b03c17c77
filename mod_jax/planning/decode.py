"""What decoding a config would take on a TPU chip that nobody here owns: memory, FLOPs, bytes read, time per token.

`make_report` compiles the very loop that `Sampler` would run there, for a model that need not be trained; `describe` is
the report for a person. A sampler holds the whole model on one chip, so a plan is for one chip of the slice. Memory is
the compiler's own figure; FLOPs and traffic are read from the compiled program; the time is an estimate (see
`mod_jax.planning.roofline`), never a measurement.

What no program can tell is how often a routed block runs. Here each row enters it with the probability `capacity`,
whatever the other rows do, and a block makes as many passes as the rows that enter need: one trip of its loop each or,
at batch 1, the true branch of its conditionals. Vocabulary: B rows, R rows per pass, L routed blocks.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, SingleDeviceSharding

from mod_jax import tuning
from mod_jax.config import Config
from mod_jax.data.cache import cache_root
from mod_jax.errors import ConfigError
from mod_jax.layout import is_routed
from mod_jax.models import flops
from mod_jax.models.blocks import Block, Choice, Routed
from mod_jax.models.flops import Parameters
from mod_jax.models.model import make_model
from mod_jax.models.moe import SERVED
from mod_jax.planning import program, roofline, topology
from mod_jax.planning.report import (
    changed_line,
    compiled_line,
    count,
    describe_compilation,
    describe_inputs,
    find_slice,
    line,
    memory_line,
    size,
    wrap,
)
from mod_jax.sampling import cache as cache_lib
from mod_jax.sampling.choice import Options, make_knobs
from mod_jax.sampling.generate import MIN_BUCKET, batch_bucket, bucket
from mod_jax.sampling.programs import Programs, Request, serving_stack
from mod_jax.sampling.stack import Stack
from mod_jax.trained import causal_selection
from mod_jax.tuning import rows_per_pass

PLATFORM = "tpu"
ONE_CHIP = {"chip": 1}
TIGHT = 0.9  # of a chip's memory: beyond it, prefill may not fit


def make_report(config: Config, topology_name: str, batch_size: int, context: int | None = None) -> dict[str, Any]:
    """Compiles the decoding loop of `config` for a TPU chip; what it takes, as JSON-ready numbers of bytes and seconds.

    Args:
      batch_size: rows that are generated together.
      context: positions of a row, prompt and new tokens; None: `model.context`. Rounded up as the sampler does.

    Raises:
      ConfigError: the slice does not exist, libtpu is missing, or this config cannot be sampled like this.
    """
    if batch_size < 1:
        raise ConfigError(f"--batch={batch_size}: must be >= 1")
    asked, batch_size = batch_size, batch_bucket(batch_size)
    longest = config.model.context
    if context is not None and not 2 <= context <= longest:
        raise ConfigError(f"--context={context}: must be in [2, {longest}], the model's context")
    selection = causal_selection(config)
    product, read_as, devices = find_slice(config, topology_name)
    num_positions = bucket(context or longest, longest)

    traced, stack = trace_decoding(config, selection, batch_size, num_positions, devices[0])
    mesh = jax.make_mesh((1,), tuple(ONE_CHIP), axis_types=(AxisType.Auto,), devices=devices[:1])
    compiled = topology.compile_for(traced.lower(), product, mesh, cache_root(config.data) / "plans")

    slots = cache_lib.slot_counts(config, num_positions)
    rows = [rows_per_pass(batch_size, block.capacity, PLATFORM) for block in config.blocks]
    passes = [expected_passes(batch_size, block.capacity) for block in config.blocks]
    experts = [expected_experts(config, depth, batch_size, passes[depth]) for depth in range(len(config.blocks))]
    parameters = flops.count_parameters(config, make_model(config, config.model.vocab_size))
    weights = tree_bytes(stack)
    report = {
        **describe_inputs(config, product, devices, ONE_CHIP),
        "program": "decode",
        "notes": [read_as] if read_as else [],
        "parameters": parameters._asdict(),
        "selection": selection,
        "dtype": config.model.dtype,
        "batch": batch_size,
        "context": num_positions,
        "passes": passes,
        "rows_per_pass": rows,
        "compile": describe_compilation(compiled),
        "memory": {
            "available": product.chip.hbm_bytes,
            "weights": weights,
            "cache": cache_lib.cache_bytes(config, batch_size, slots),
            "dense_cache": cache_lib.cache_bytes(config, batch_size, (num_positions,) * len(slots)),
            "loading": 4 * parameters.total + weights,  # a checkpoint is float32, and rounded beside itself
        },
        "flops": {"model": flops.decode_flops(config, config.model.vocab_size, slots).total},
        "read": bytes_read(config, stack, batch_size, slots, passes, rows, experts),
    }
    if config.routing.skipped_keys == "kept":
        report["notes"].append("the weights that make keys and values of bypassed tokens are not in what a step reads")
    if config.expert_depths:
        report["experts"] = {"count": config.experts.count, "used": experts}
    if batch_size != asked:
        report["notes"].append(f"--batch={asked} is rounded up to {batch_size}, as the sampler does")
    if context not in (None, num_positions):
        report["notes"].append(f"--context={context} is rounded up to {num_positions}, as the sampler does")
    if not compiled.refused:
        _add_measures(report, product, mesh, compiled)
    report["fits"] = (
        not compiled.refused and max(compiled.hbm_bytes, report["memory"]["loading"]) <= product.chip.hbm_bytes
    )
    report["verdict"] = verdict(report)
    return report


def trace_decoding(
    config: Config, selection: str, batch_size: int, num_positions: int, device: jax.Device
) -> tuple[jax.stages.Traced, Stack]:
    """`Programs.advance` as `Sampler` compiles it, all on one device; and the weights as the sampler keeps them."""
    vocab_size = config.model.vocab_size
    model = make_model(config, vocab_size)
    stack = jax.eval_shape(functools.partial(serving_stack, config, model, platform=PLATFORM), model.abstract_params)
    weights, structure = jax.tree.flatten(stack)
    programs = Programs(config, structure, config.capacity_L, vocab_size, 0, PLATFORM)

    def request():
        cutoffs_L, stop_BV = jnp.zeros(config.num_routed), jnp.zeros((batch_size, vocab_size), bool)
        options = [Options()] * batch_size
        keys_B = jax.vmap(jax.random.key)(jnp.zeros(batch_size, jnp.uint32))
        shape_LE = len(config.expert_depths), config.experts.count
        choice = Choice(selection, cutoffs_L, expert_cutoffs_LE=jnp.zeros(shape_LE) if config.experts_choose else None)
        return Request(choice, make_knobs(options), keys_B, stop_BV)

    request = jax.eval_shape(request)
    slots = cache_lib.slot_counts(config, num_positions)
    prefill = functools.partial(programs.prefill, num_positions=num_positions, slots=slots)
    ids_BT, ids_B, scalar = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch_size, 1), (batch_size,), ()))
    state, _ = jax.eval_shape(prefill, weights, request, ids_BT, ids_B, ids_B)

    here = SingleDeviceSharding(device)
    lies = programs.state_shardings(device)

    def place(tree, shardings=None):
        shardings = shardings or jax.tree.map(lambda _: here, tree)
        return jax.tree.map(lambda a, lies: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=lies), tree, shardings)

    advance = jax.jit(programs.advance, donate_argnames="state", out_shardings=lies)
    return advance.trace(place(weights), place(request), state=place(state, lies), target=place(scalar)), stack


def expected_passes(batch_size: int, capacity: float) -> float:
    """E[ceil(n / R)], where each of B rows enters with the probability `capacity`, and n of them do.

    At batch 1 this is the probability that the block runs; of a full block it is 1.
    """
    chance_n = np.ones(1)
    for _ in range(batch_size):
        chance_n = np.convolve(chance_n, [1 - capacity, capacity])
    passes_n = np.ceil(np.arange(batch_size + 1) / rows_per_pass(batch_size, capacity, PLATFORM))
    return float(chance_n @ passes_n)


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
    config: Config,
    stack: Stack,
    batch_size: int,
    slots: tuple[int, ...],
    passes: list[float],
    rows: list[int],
    experts: list[float],
) -> dict[str, float]:
    """Bytes of weights and of caches that a step must read, by count: each pass a block's weights, of experts those
    that are used, and R rows' caches.

    Args:
      passes: expected number, by depth.
      rows: R, by depth.
      experts: how many a pass uses, by depth.
    """
    # Of a table that is not tied only B rows are read.
    embedder = stack.embedder
    weights = tree_bytes(embedder if embedder.tie else embedder.unembed_DV) + tree_bytes(stack.final_norm)
    cached = 0.0
    cache = jax.eval_shape(lambda: cache_lib.init_cache(config, batch_size, slots))
    for depth, (block, block_cache) in enumerate(zip(stack.blocks, cache, strict=True)):
        used = experts[depth] / config.experts.count
        weights += weight_bytes(block, used)  # of a routed block: router and predictor, which always run
        kind = config.blocks[depth].kind
        if kind in stack.inside:
            weights += passes[depth] * weight_bytes(stack.inside[kind], used) / stack.kinds.count(kind)
        cached += passes[depth] * rows[depth] / batch_size * tree_bytes(block_cache)
    return {"weights": weights, "cache": cached}


def weight_bytes(block: Block | Routed, used: float) -> float:
    """Bytes of a block's weights, where `used` is the share of its experts that is read."""
    inside = block.block if block.routed else block  # None where it lies in a stack
    of_experts = 0
    if block.has_experts and inside is not None:
        of_experts = tree_bytes((inside.experts.up_EDF, inside.experts.down_EFD))
    return tree_bytes(block) - (1 - used) * of_experts


def tree_bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def read_loop(text: str, passes: list[float], experts: list[float]) -> program.Step:
    """One step of the compiled loop, routed blocks as often as `passes` says by depth, and as many experts a pass as
    `experts` does. A token is drawn by temperature: the two conditions of how to choose it are true without top-k and
    top-p."""

    def odds(source: str) -> float:
        if block := re.search(rf"/block(\d+)/(?:.*/)?{SERVED}/while$", source):
            return experts[int(block[1])]
        block = re.search(r"/block(\d+)/(?:cond|while)$", source)
        return passes[int(block[1])] if block else 1.0

    return program.read_step(text, ONE_CHIP, of_loop=True, odds=odds)


def _add_measures(report: dict[str, Any], product, mesh, compiled) -> None:
    """Adds what only a compiled program can tell: memory, FLOPs, traffic, and the estimate made from them."""
    experts = report["experts"]["used"] if "experts" in report else []
    step = read_loop(compiled.text, report["passes"], experts)
    bypassed = read_loop(compiled.text, [0.0] * len(report["passes"]), experts)
    around_loop = program.read_step(compiled.text, ONE_CHIP, odds=lambda _: 0.0)
    report["memory"] |= {**compiled.memory, "needed": compiled.hbm_bytes}
    report["flops"] |= {
        "compiled": step.flops / report["batch"],
        "compiled_every_block": compiled.flops_once / report["batch"],
    }
    report["read"] |= {
        "compiled": step.hbm_bytes,
        "compiled_bypassed": bypassed.hbm_bytes,
        "per_call": around_loop.hbm_bytes,
    }
    times = roofline.estimate(step, product, tuning.peak_flops(product.chip.kind), topology.coordinates(mesh))
    by_count = (report["read"]["weights"] + report["read"]["cache"]) / product.chip.hbm_bandwidth
    # A tiny model stays on the chip from step to step, as far as the program tells; no plan should count on that.
    seconds = max(times.seconds_exposed, by_count)
    report["estimate"] = {
        **{name: value for name, value in dataclasses.asdict(times).items() if name in ("compute", "hbm")},
        "seconds": seconds,
        "seconds_by_count": by_count,
        "tokens_per_second": report["batch"] / seconds,
    }


def verdict(report: dict[str, Any]) -> str:
    """Whether it fits, by how much, and if not what to change, what costs least first."""
    memory, name = report["memory"], report["topology"]["name"]
    available, loading = memory["available"], memory["loading"]
    needed = max(memory.get("needed", available), loading)
    if report["fits"]:
        tight = " (tight: a prompt needs room too)" if needed > TIGHT * available else ""
        loads = " while it loads" if loading == needed else ""
        return f"FITS on a chip of {name}: {size(available - needed)} to spare{loads}{tight}"
    larger = [f"{kind} ({size(chip.hbm_bytes)})" for kind, chip in topology.CHIPS.items() if chip.hbm_bytes > needed]
    changes = [f"a chip of {' or '.join(larger)}" if larger else "fewer parameters: sampling splits no model"]
    if loading > available:
        why = f"loading takes {size(loading)} of {size(available)}, parameters in float32 beside those rounded"
    else:
        why = report["compile"]["refused"] or f"decoding takes {size(needed)} of {size(available)}"
        smaller = (("batch", report["batch"] // 2, 1), ("context", report["context"] // 2, MIN_BUCKET))
        changes = [f"--{flag}={value}" for flag, value, least in smaller if value >= least] + changes
    return f"DOES NOT FIT on a chip of {name}: {why}; try {', then '.join(changes)}"


def describe(report: dict[str, Any]) -> str:
    """The report for a person, the verdict last."""
    where, memory, flops = (report[name] for name in ("topology", "memory", "flops"))
    others = f"; the other {where['chips'] - 1} are free for samplers of their own" if where["chips"] > 1 else ""
    lines = [
        line("target", f"one chip of {where['name']} ({where['kind']}): a sampler keeps a model on one chip{others}"),
        changed_line(report),
        line(
            "size",
            f"{report['layout']}, {Parameters(**report['parameters'])}, {size(memory['weights'])} as they are sampled "
            f"from (matrices {report['dtype']}, the rest float32); a step is one token for "
            f"{count(report['batch'], 'row')} of up to {report['context']:,} positions; selection "
            f"{report['selection']}",
        ),
        compiled_line(report),
        *(line("note", note) for note in report["notes"]),
        line(
            "cache",
            f"{size(memory['cache'])}, {memory['cache'] / memory['dense_cache']:.3f} of a dense model's "
            f"{size(memory['dense_cache'])} at this depth",
        ),
        line("loading", f"{size(memory['loading'])}, before there is a cache: the checkpoint's float32, then rounded"),
    ]
    if not report["compile"]["refused"]:
        lines += [
            memory_line(memory),
            *([line("routed", _routed(report))] if _has_routed(report) else []),
            *([line("experts", _experts(report))] if "experts" in report else []),
            line(
                "flops",
                f"{flops['model']:.4g} a token by our count, caches full; {flops['compiled']:.4g} in the matrix "
                "products of the compiled program, without those of few rows, which run on the vector unit; the "
                f"compiler's own figure, every block once, is {flops['compiled_every_block']:.4g}",
            ),
            line("read", _read(report)),
            line("moved", "nothing: one chip"),
            line("estimate", _estimate(report)),
        ]
    return wrap([*lines, line("verdict", report["verdict"])])


def _read(report: dict[str, Any]) -> str:
    read = report["read"]
    kept = ", since much stays on the chip from step to step" if read["compiled"] < read["weights"] else ""
    bypassed = f", {size(read['compiled_bypassed'])} where no row enters a routed block" if _has_routed(report) else ""
    return (
        f"{size(read['weights'] + read['cache'])} a step by our count: weights {size(read['weights'])}, full caches "
        f"{size(read['cache'])}. {size(read['compiled'])} to and from HBM in the compiled program{kept}{bypassed}. "
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
    e = report["estimate"]
    return (
        f"{1e3 * e['seconds']:.3g} ms a token and row, {e['tokens_per_second']:,.0f} tokens/s for all rows. A "
        f"roofline, optimistic, not a measurement, no TPU ran it: HBM {1e3 * e['hbm']:.3g} ms, matrix unit "
        f"{1e3 * e['compute']:.3g} ms; HBM {1e3 * e['seconds_by_count']:.3g} ms by our count. Loops and branches of "
        "routed blocks count as often as expected above; a token is drawn without top-k and top-p"
    )
