"""What training a config would take on a TPU slice that nobody here owns: memory, FLOPs, traffic, time.

`make_report` compiles the very program that `loop.train` would run there and reads the result; `describe` is the report
for a person. Memory is the compiler's own figure; FLOPs and traffic are read from the compiled program; the time is an
estimate (see `mod_jax.planning.roofline`), never a measurement.
"""

import dataclasses
import math
import re
from typing import Any

import jax

from mod_jax import sharding, tuning
from mod_jax.config import Config, MeshConfig
from mod_jax.data.cache import cache_root
from mod_jax.errors import ConfigError
from mod_jax.models import flops
from mod_jax.models.decoder import repeating_unit
from mod_jax.models.flops import Parameters
from mod_jax.planning import program, roofline, topology
from mod_jax.planning.collectives import is_exchange, token_movers
from mod_jax.planning.report import (
    TIGHT,
    changed_line,
    compiled_line,
    count,
    describe_compilation,
    describe_inputs,
    find_slice,
    line,
    memory_line,
    moved_by_chip,
    moved_lines,
    size,
    wrap,
)
from mod_jax.training import loop, losses, prepare

BATCH_AXES = ("data", "fsdp", "expert")


def make_report(config: Config, topology_name: str) -> dict[str, Any]:
    """Compiles the train step of `config` for a TPU slice; what it takes, as JSON-ready numbers of bytes and seconds.

    Raises:
      ConfigError: the slice does not exist, libtpu is missing, the config cannot be laid out on it, or has no
        vocab_size.
    """
    product, read_as, devices = find_slice(config, topology_name)
    vocab_size = config.model.vocab_size
    config, changed_mesh = with_workable_mesh(config, len(devices))
    mesh = sharding.make_mesh(config, devices)
    notes = [note for note in (read_as, changed_mesh) if note]
    if topology.splits_physical_axes(mesh):
        notes.append(f"mesh axes are no products of axes of {product.shape}: some neighbours are several hops apart")

    task = prepare.make_task(config, vocab_size)
    state = prepare.abstract_state(config, task.model, mesh)
    num_steps = flops.train_steps(config, vocab_size)
    lowered = loop.lower_step(task, mesh, state, num_steps)
    cache = cache_root(config.data) / "plans"
    compiled = topology.compile_for(lowered, product, mesh, cache)

    state_parts = [(leaf, math.prod(leaf.sharding.shard_shape(leaf.shape))) for leaf in jax.tree.leaves(state)]
    report = {
        **describe_inputs(config, product, devices, dict(mesh.shape)),
        "program": "train",
        "notes": notes,
        "parameters": flops.count_parameters(config, task.model)._asdict(),
        "steps": num_steps,
        "rows": config.train.batch_size,
        "hosts": rows_by_host(mesh, config.train.batch_size),
        "seq_len": config.data.seq_len,
        "compile": describe_compilation(compiled),
        "memory": {
            "available": product.chip.hbm_bytes,
            "state": sum(leaf.dtype.itemsize * length for leaf, length in state_parts),
            "whole_state": sum(leaf.dtype.itemsize * leaf.size for leaf, _ in state_parts),
        },
        "flops": {"model": config.train.batch_size * flops.train_flops(config, vocab_size)},
    }
    if not compiled.refused:
        _add_measures(report, config, product, mesh, state.params, compiled)
    report["fits"] = not compiled.refused and compiled.hbm_bytes <= product.chip.hbm_bytes
    report["verdict"] = verdict(config, report)
    return report


def _add_measures(report: dict[str, Any], config: Config, product, mesh, params, compiled) -> None:
    """Adds what only a compiled program can tell: memory, FLOPs, collectives, and the estimate made from them."""
    step = program.read_step(compiled.text, dict(mesh.shape))
    report["memory"] |= {**compiled.memory, "needed": compiled.hbm_bytes}
    report["flops"] |= {
        "compiled": step.flops * mesh.size,
        "compiled_loops_once": compiled.flops_once * mesh.size,
    }

    report["collectives"] = moved_by_chip(step)
    moved = [collective for collective, _ in step.moved]
    report["token_movers"] = [
        f"{c.kind} {c.dtype}{list(c.shape)} over {' and '.join(c.axes)} ({c.source or 'no name'})"
        for c in token_movers(moved, gradient_shapes(config, mesh, params), BATCH_AXES)
    ]
    exchanges = [(times, times * roofline.bytes_sent(c)) for c, times in step.moved if is_exchange(c)]
    report["exchanges"] = {"count": sum(times for times, _ in exchanges), "bytes": sum(sent for _, sent in exchanges)}
    report["sorts"] = step.sorts

    peak = tuning.peak_flops(product.chip.kind)
    times = roofline.estimate(step, product, peak, topology.coordinates(mesh))
    report["estimate"] = dataclasses.asdict(times) | {
        f"mfu_{case}": report["flops"]["model"] / (peak * mesh.size * getattr(times, f"seconds_{case}"))
        for case in ("hidden", "exposed")
    }

    notes = report["notes"]
    rows = config.train.batch_size // config.train.accumulation
    with jax.set_mesh(mesh):
        loss_chunks = losses.num_chunks(rows, config.data.seq_len, config.train.loss_chunk)
    known = {len(config.blocks) // repeating_unit(config.blocks), config.train.accumulation, loss_chunks}
    if step.unknown_loops:
        notes.append(f"{step.unknown_loops} loops have no constant trip count: their bodies are counted once")
    if odd := sorted(set(step.trip_counts) - known):
        notes.append(f"loops of {odd} trips are neither the stack of blocks, nor micro-batches, nor chunks of the loss")
    if step.kernels:
        notes.append(f"{step.kernels} runs of kernels that are not known here count as no FLOPs: MFU is less")


def gradient_shapes(config: Config, mesh: jax.sharding.Mesh, params: Any) -> list[tuple[tuple[int, ...], ...]]:
    """Whole shape and shape of one device's part of all that gradients are summed as: of each parameter; and of the
    scales of queries and keys, [H], also before they are summed over heads, [N, H]."""
    shapes = [(leaf.shape, leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(params)]
    if config.model.qk_norm:
        for heads in (config.model.num_heads, config.model.num_kv_heads):
            part = heads // mesh.shape["tensor"]
            shapes.append(((heads, config.model.head_dim), (part, config.model.head_dim)))
    return shapes


def rows_by_host(mesh: jax.sharding.Mesh, batch_size: int) -> list[list[int]]:
    """The rows of a batch that each host loads."""
    hosts = sorted({device.process_index for device in mesh.devices.flat})
    return [sharding.local_rows(mesh, batch_size, host).tolist() for host in hosts]


def rows_at_a_time(config: Config, mesh_shape: dict[str, int]) -> int:
    """Rows of a micro-batch on each device."""
    return config.train.batch_size // config.train.accumulation // math.prod(mesh_shape[axis] for axis in BATCH_AXES)


def why_no_mesh(config: Config, num_devices: int) -> str:
    """What keeps the config's mesh from covering that many devices; "" where nothing does."""
    try:
        covered = math.prod(sharding.mesh_shape(config, num_devices))
    except ConfigError as error:
        return str(error)
    return "" if covered == num_devices else f"config.mesh covers {covered} of {num_devices} devices"


def with_workable_mesh(config: Config, num_devices: int) -> tuple[Config, str]:
    """The config, or one whose mesh covers that many devices where its own cannot, and a note of what was changed.

    Most often there are more chips than rows: the smallest tensor axis then takes the rest.
    """

    why = why_no_mesh(config, num_devices)
    if not why:
        return config, ""
    expert = config.mesh.expert if config.mesh.expert > 0 and num_devices % config.mesh.expert == 0 else 1
    for tensor in (n for n in range(1, num_devices // expert + 1) if num_devices // expert % n == 0):
        ways = num_devices // expert // tensor
        sizes = dict(data=ways) if config.mesh.fsdp == 1 else dict(data=1, fsdp=ways)
        mesh = MeshConfig(**sizes, tensor=tensor, expert=expert)
        planned = dataclasses.replace(config, mesh=mesh)
        if not why_no_mesh(planned, num_devices):
            keys = " ".join(f"--config.mesh.{axis}={ways}" for axis, ways in dataclasses.asdict(mesh).items())
            return planned, f"{why}; planned instead with {keys}, to be given to train too"
    raise ConfigError(why)


def verdict(config: Config, report: dict[str, Any]) -> str:
    """Whether it fits, by how much, and if not what to change, what costs least first."""
    memory, name, mesh = report["memory"], report["topology"]["name"], report["topology"]["mesh"]
    if report["fits"]:
        tight = " (tight: evaluation needs room too)" if memory["needed"] > TIGHT * memory["available"] else ""
        return f"FITS on {name}: {size(memory['available'] - memory['needed'])} a chip to spare{tight}"
    state, chips_for_state = memory["whole_state"], math.ceil(memory["whole_state"] / memory["available"])
    if chips_for_state > report["topology"]["devices"]:
        return (
            f"DOES NOT FIT on {name}: parameters and optimizer alone take {size(state)}, {chips_for_state} x "
            f"{size(memory['available'])}, and a step needs room beside them; try a larger slice"
        )
    split = "--config.mesh.data=1 --config.mesh.fsdp=-1 (each chip now holds the whole state)"
    rows = rows_at_a_time(config, mesh)
    changes = [split] if mesh["data"] > 1 and memory["state"] > memory["available"] / 2 else []
    if config.model.remat != "full":
        changes.append("--config.model.remat=full")
    if rows > 1:
        excess = (bytes_asked(report["compile"]["refused"]) or memory["needed"]) / memory["available"]
        parts = min(rows, 2 ** max(1, math.ceil(math.log2(excess))))
        changes.append(f"--config.train.accumulation={parts * config.train.accumulation}")
    if mesh["data"] > 1 and split not in changes:
        changes.append(split)
    changes.append("a larger slice")
    why = report["compile"]["refused"] or f"{size(memory['needed'])} of {size(memory['available'])} a chip"
    return f"DOES NOT FIT on {name}: {why}; try {', then '.join(changes)}"


def bytes_asked(refused: str) -> float:
    """What a refused program needs: the complaint names that first, and then what there is. 0 if it does not."""
    asked = re.search(r"\((\d+\.?\d*)G\)", refused)
    return float(asked[1]) * 2**30 if asked else 0.0


def describe(report: dict[str, Any]) -> str:
    """The report for a person, the verdict last."""
    where, memory, flops = (report[name] for name in ("topology", "memory", "flops"))
    chips, devices = count(where["chips"], "chip"), count(where["devices"], "device")
    mesh = " x ".join(f"{axis} {ways}" for axis, ways in where["mesh"].items())
    lines = [
        line("target", f"{where['name']}: {chips}, {devices} ({where['kind']}), mesh {mesh}"),
        line("hosts", _hosts(report["hosts"])),
        changed_line(report),
        line(
            "size",
            f"{report['layout']}, {Parameters(**report['parameters'])}, with optimizer {size(memory['state'])} a chip; "
            f"a step is {report['rows']:,} rows of {report['seq_len']:,} tokens",
        ),
        compiled_line(report),
        *(line("note", note) for note in report["notes"]),
    ]
    if not report["compile"]["refused"]:
        lines += [
            memory_line(memory),
            line(
                "flops",
                f"{flops['model']:.4g} a step by our count, nothing recomputed; {flops['compiled']:.4g} in the matrix "
                "products of the compiled program, every loop times its trips; the compiler's own figure, every loop "
                f"once, is {flops['compiled_loops_once']:.4g}",
            ),
            *moved_lines(report["collectives"], "step"),
            line("routing", _routing(report)),
            line("estimate", _estimate(report)),
        ]
    return wrap([*lines, line("verdict", report["verdict"])])


def _hosts(rows_by_host: list[list[int]], shown: int = 8) -> str:
    first, most = rows_by_host[0], max(map(len, rows_by_host))
    rows = ", ".join(map(str, first[:shown])) + (", ..." if len(first) > shown else "")
    return (
        f"{count(len(rows_by_host), 'host')}, up to {count(most, 'row')} of a batch each; the first loads rows {rows}"
    )


def _routing(report: dict[str, Any]) -> str:
    movers, exchanges = report["token_movers"], report["exchanges"]
    if movers:
        return f"{len(movers)} COLLECTIVES MOVE TOKENS OR SCORES between rows of the batch: {'; '.join(movers)}"
    moved = (
        f"no collective: only weights, gradients and sums move over {', '.join(BATCH_AXES[:-1])} and {BATCH_AXES[-1]}"
    )
    if exchanges["count"]:
        moved += (
            f", and tokens to their experts and back: {exchanges['count']:,} all-to-alls, "
            f"{exchanges['bytes'] / 2**20:,.1f} MiB, over expert alone"
        )
    else:
        moved += ", no token, score or index"
    return f"{moved}; {report['sorts']:,} sorts a step"


def _estimate(report: dict[str, Any]) -> str:
    e, chips = report["estimate"], report["topology"]["chips"]
    low, high = (report["steps"] * e[f"seconds_{case}"] / 3600 for case in ("hidden", "exposed"))
    return (
        f"{e['seconds_hidden']:.3g} s a step if collectives hide behind work, {e['seconds_exposed']:.3g} s "
        f"if not; MFU {e['mfu_hidden']:.0%} or {e['mfu_exposed']:.0%}; {report['steps']:,} steps in {low:.3g} to "
        f"{high:.3g} h, {low * chips:.3g} to {high * chips:.3g} chip-hours. A roofline, optimistic, not a measurement: "
        f"compute {e['compute']:.3g} s, HBM {e['hbm']:.3g} s, interconnect {e['interconnect']:.3g} s"
    )
