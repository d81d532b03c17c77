"""What training a config would take on a TPU slice that nobody here owns: memory, FLOPs, traffic, time.

`make_report` compiles the very program that `loop.train` would run there and reads the result; `describe` is the report
for a person. Memory is the compiler's own figure; FLOPs and traffic are read from the compiled program; the time is an
estimate (see `mod_jax.scaling.roofline`), never a measurement.
"""

import collections
import dataclasses
import math
import textwrap
from typing import Any

import jax

from mod_jax import config as config_lib
from mod_jax.config import Config, ConfigError, MeshConfig
from mod_jax.data import pipeline
from mod_jax.models.decoder import repeating_unit
from mod_jax.scaling import flops, program, roofline, sharding, topology
from mod_jax.scaling.collectives import token_movers
from mod_jax.training import loop, metrics
from mod_jax.training.step import make_model

BATCH_AXES = ("data", "fsdp")
TIGHT = 0.9  # of a chip's memory: beyond it, evaluation may not fit beside the train state


def make_report(config: Config, topology_name: str) -> dict[str, Any]:
    """Compiles the train step of `config` for a TPU slice; what it takes, as JSON-ready numbers of bytes and seconds.

    Raises:
      ConfigError: the slice does not exist, libtpu is missing, the config cannot be laid out on it, or has no
        vocab_size.
    """
    product, read_as = topology.find_product(topology_name)
    vocab_size = config.model.vocab_size
    if not vocab_size:
        raise ConfigError("config.model.vocab_size = 0: planning reads no corpus; set it to the tokenizer's size")
    devices = topology.devices(product)
    config, changed_mesh = with_workable_mesh(config, len(devices))
    mesh = sharding.make_mesh(config, devices)
    notes = [note for note in (read_as, changed_mesh) if note]
    if topology.splits_physical_axes(mesh):
        notes.append(f"mesh axes are no products of axes of {product.shape}: some neighbours are several hops apart")

    model = make_model(config, vocab_size)
    state = loop.abstract_state(config, model, mesh)
    num_steps = flops.train_steps(config, vocab_size)
    lowered = loop.lower_step(config, model, mesh, state, num_steps)
    cache = pipeline.cache_root(config.data) / "plans"
    compiled = topology.compile_for(lowered, product, mesh, cache)

    state_parts = [(leaf, math.prod(leaf.sharding.shard_shape(leaf.shape))) for leaf in jax.tree.leaves(state)]
    report = {
        "topology": {
            "name": product.name,
            "chips": product.num_chips,
            "devices": len(devices),
            "kind": devices[0].device_kind,
            "mesh": dict(mesh.shape),
        },
        "config": config_lib.changed_from_default(config),
        "fingerprint": config_lib.fingerprint(config),
        "notes": notes,
        "layout": "".join(block.kind for block in config.blocks),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "steps": num_steps,
        "rows": config.train.batch_size,
        "seq_len": config.data.seq_len,
        "compile": {name: getattr(compiled, name) for name in ("seconds", "cpu_seconds", "cached", "refused")},
        "memory": {
            "available": product.chip.hbm_bytes,
            "state": sum(leaf.dtype.itemsize * size for leaf, size in state_parts),
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

    moved = collections.defaultdict(lambda: {"count": 0, "bytes": 0.0})
    for collective, times in step.moved:
        entry = moved[collective.kind, collective.axes]
        entry["count"] += times
        entry["bytes"] += times * roofline.bytes_sent(collective)
    report["collectives"] = [
        {"kind": kind, "axes": axes, **entry}
        for (kind, axes), entry in sorted(moved.items(), key=lambda item: -item[1]["bytes"])
    ]
    shapes = [(leaf.shape, leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(params)]
    report["token_movers"] = [
        f"{c.kind} {c.dtype}{list(c.shape)} over {' and '.join(c.axes)} ({c.source or 'no name'})"
        for c in token_movers([collective for collective, _ in step.moved], shapes, BATCH_AXES)
    ]
    report["sorts"] = step.sorts

    peak = metrics.peak_flops(product.chip.kind)
    times = roofline.estimate(step, product, peak, topology.coordinates(mesh))
    report["estimate"] = dataclasses.asdict(times) | {
        f"mfu_{case}": report["flops"]["model"] / (peak * mesh.size * getattr(times, f"seconds_{case}"))
        for case in ("hidden", "exposed")
    }

    notes = report["notes"]
    known = {len(config.blocks) // repeating_unit(config.blocks), config.train.accumulation}
    if step.unknown_loops:
        notes.append(f"{step.unknown_loops} loops have no constant trip count: their bodies are counted once")
    if odd := sorted(set(step.trip_counts) - known):
        notes.append(f"loops of {odd} trips are neither the stack of blocks nor the micro-batches")
    if step.kernels:
        notes.append(f"{step.kernels} runs of custom kernels count as no FLOPs and no bytes here")


def with_workable_mesh(config: Config, num_devices: int) -> tuple[Config, str]:
    """The config, or one whose mesh covers that many devices where its own cannot, and a note of what was changed.

    Most often there are more chips than rows: the smallest tensor axis then takes the rest.
    """

    def problem(mesh: MeshConfig) -> str:
        try:
            covered = math.prod(sharding.mesh_shape(dataclasses.replace(config, mesh=mesh), num_devices))
        except ConfigError as error:
            return str(error)
        return "" if covered == num_devices else f"config.mesh covers {covered} of {num_devices} devices"

    why = problem(config.mesh)
    if not why:
        return config, ""
    for tensor in (n for n in range(1, num_devices + 1) if num_devices % n == 0):
        ways = num_devices // tensor
        mesh = MeshConfig(ways, 1, tensor) if config.mesh.fsdp == 1 else MeshConfig(1, ways, tensor)
        if not problem(mesh):
            keys = " ".join(f"--config.mesh.{name}={size}" for name, size in dataclasses.asdict(mesh).items())
            return dataclasses.replace(
                config, mesh=mesh
            ), f"{why}; planned instead with {keys}, to be given to train too"
    raise ConfigError(why)


def verdict(config: Config, report: dict[str, Any]) -> str:
    """Whether it fits, by how much, and if not what to change, what costs least first."""
    memory, name, mesh = report["memory"], report["topology"]["name"], report["topology"]["mesh"]
    if report["fits"]:
        tight = " (tight: evaluation needs room too)" if memory["needed"] > TIGHT * memory["available"] else ""
        return f"FITS on {name}: {_size(memory['available'] - memory['needed'])} a chip to spare{tight}"
    split = "--config.mesh.data=1 --config.mesh.fsdp=-1 (each chip now holds the whole state)"
    rows = report["rows"] // config.train.accumulation // (mesh["data"] * mesh["fsdp"])
    changes = [split] if mesh["data"] > 1 and memory["state"] > memory["available"] / 2 else []
    if config.model.remat != "full":
        changes.append("--config.model.remat=full")
    if rows > 1:
        changes.append(f"--config.train.accumulation={2 * config.train.accumulation}")
    if mesh["data"] > 1 and split not in changes:
        changes.append(split)
    changes.append("a larger slice")
    why = report["compile"]["refused"] or f"{_size(memory['needed'])} of {_size(memory['available'])} a chip"
    return f"DOES NOT FIT on {name}: {why}; try {', then '.join(changes)}"


def describe(report: dict[str, Any]) -> str:
    """The report for a person, the verdict last."""
    where, memory, flops, compiled = (report[name] for name in ("topology", "memory", "flops", "compile"))
    mesh = " x ".join(f"{name} {size}" for name, size in where["mesh"].items())
    kept = " (by an earlier run, and kept)" if compiled["cached"] else ""
    lines = [
        f"target    {where['name']}: {where['chips']} chips, {where['devices']} devices ({where['kind']}), mesh {mesh}",
        f"changed   {', '.join(f'{name}={value}' for name, value in report['config'].items())}",
        f"size      {report['layout']}, {report['parameters']:,} parameters, with optimizer {_size(memory['state'])} a "
        f"chip; a step is {report['rows']:,} rows of {report['seq_len']:,} tokens",
        f"compiled  in {compiled['seconds']:.0f} s, {compiled['cpu_seconds']:.0f} s of CPU{kept}",
        *(f"note      {note}" for note in report["notes"]),
    ]
    if not compiled["refused"]:
        lines += [
            f"memory    {_size(memory['needed'])} of {_size(memory['available'])} a chip: arguments "
            f"{_size(memory['argument'])} + temporaries {_size(memory['temp'])} + outputs {_size(memory['output'])} "
            f"- outputs written over arguments {_size(memory['alias'])}",
            f"flops     {flops['model']:.4g} a step by our count, nothing recomputed; {flops['compiled']:.4g} in the "
            f"matrix products of the compiled program, every loop times its trips; the compiler's own figure, every "
            f"loop once, is {flops['compiled_loops_once']:.4g}",
            "moved     runs and bytes sent, per chip and step, every loop times its trips",
            *(
                f"          {entry['kind']:<20}{' and '.join(entry['axes']) or 'no axis':<20}"
                f"{entry['count']:>7,} {entry['bytes'] / 2**20:>12,.1f} MiB"
                for entry in report["collectives"]
            ),
            _routing_line(report["token_movers"], report["sorts"]),
            _estimate_line(report),
        ]
    lines.append(f"verdict   {report['verdict']}")
    return "\n".join(
        part
        for line in lines
        for part in textwrap.wrap(line, 120, subsequent_indent=" " * 10, break_long_words=False, break_on_hyphens=False)
    )


def _routing_line(movers: list[str], sorts: int) -> str:
    if movers:
        return (
            f"routing   {len(movers)} COLLECTIVES MOVE TOKENS OR SCORES between rows of the batch: {'; '.join(movers)}"
        )
    return (
        "routing   no collective: only weights, gradients and sums move over data and fsdp, no token, score or index; "
        f"{sorts:,} sorts a step"
    )


def _estimate_line(report: dict[str, Any]) -> str:
    e, chips = report["estimate"], report["topology"]["chips"]
    low, high = (report["steps"] * e[f"seconds_{case}"] / 3600 for case in ("hidden", "exposed"))
    return (
        f"estimate  {e['seconds_hidden']:.3g} s a step if collectives hide behind work, {e['seconds_exposed']:.3g} s "
        f"if not; MFU {e['mfu_hidden']:.0%} or {e['mfu_exposed']:.0%}; {report['steps']:,} steps in {low:.3g} to "
        f"{high:.3g} h, {low * chips:.3g} to {high * chips:.3g} chip-hours. A roofline, optimistic, not a measurement: "
        f"compute {e['compute']:.3g} s, HBM {e['hbm']:.3g} s, interconnect {e['interconnect']:.3g} s"
    )


def _size(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.2f} MiB"
