"""What the reports of decoding and of prefill have in common: how they begin, what a person reads, the verdict."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mod_jax.config import Config
from mod_jax.models import flops
from mod_jax.models.flops import Parameters
from mod_jax.models.model import make_model
from mod_jax.planning import topology
from mod_jax.planning.report import (
    TIGHT,
    changed_line,
    compiled_line,
    describe_compilation,
    describe_inputs,
    line,
    memory_line,
    moved_lines,
    size,
    wrap,
)
from mod_jax.planning.roofline import Roofline
from mod_jax.planning.serving import Arguments, Serving, memory_by_count


def begin(
    config: Config, plan: Serving, arguments: Arguments, compiled: topology.Compiled, slots: tuple[int, ...]
) -> dict[str, Any]:
    """What was planned for what, its compilation, and its memory by count."""
    return {
        **describe_inputs(config, plan.product, plan.devices, dict(plan.mesh.shape)),
        "notes": plan.notes,
        "parameters": flops.count_parameters(config, make_model(config, config.model.vocab_size))._asdict(),
        "selection": plan.selection,
        "dtype": config.model.dtype,
        "batch": plan.batch_size,
        "context": plan.num_positions,
        "compile": describe_compilation(compiled),
        "memory": memory_by_count(config, arguments, plan, slots),
    }


def fits(report: dict[str, Any], compiled: topology.Compiled) -> bool:
    memory = report["memory"]
    return not compiled.refused and max(compiled.hbm_bytes, memory["loading"]) <= memory["available"]


def terms(times: Roofline) -> dict[str, float]:
    """Seconds of a roofline's parts, for a report's estimate."""
    return {name: getattr(times, name) for name in ("compute", "hbm", "interconnect")}


def describe(report: dict[str, Any], what: str, per: str, measures: Callable[[dict[str, Any]], list[str]]) -> str:
    """The report for a person, the verdict last.

    Args:
      what: is run, in words.
      per: what moved bytes are per, in a word.
      measures: of a report whose program was compiled, the lines between memory and what moves.
    """
    memory = report["memory"]
    lines = [
        target_line(report["topology"]),
        changed_line(report),
        line(
            "size",
            f"{report['layout']}, {Parameters(**report['parameters'])}, {size(memory['weights'])} a chip as they are "
            f"sampled from (matrices {report['dtype']}, the rest float32); {what}; selection {report['selection']}",
        ),
        compiled_line(report),
        *(line("note", note) for note in report["notes"]),
        cache_line(memory),
        loading_line(memory),
    ]
    if not report["compile"]["refused"]:
        *measured, estimate = measures(report)
        lines += [memory_line(memory), *measured, *moved_lines(report["collectives"], per), estimate]
    return wrap([*lines, line("verdict", report["verdict"])])


def links(report: dict[str, Any]) -> str:
    """What an estimate says of the links; nothing where nothing moves."""
    runs, seconds = sum(entry["count"] for entry in report["collectives"]), report["estimate"]["interconnect"]
    return f", links {1e3 * seconds:.3g} ms; the delay of {runs:,.0f} collectives is not in it" * (runs > 0)


def target_line(where: dict[str, Any]) -> str:
    mesh = " x ".join(f"{axis} {ways}" for axis, ways in where["mesh"].items() if ways > 1)
    used = int(np.prod(list(where["mesh"].values())))
    others = f"; the other {where['devices'] - used} are free for other samplers" if used < where["devices"] else ""
    if used == 1:
        return line("target", f"one chip of {where['name']} ({where['kind']}){others}")
    return line(
        "target",
        f"{used} chips of {where['name']} ({where['kind']}), mesh {mesh}: weights over fsdp and tensor, rows and their "
        f"caches over data and fsdp{others}",
    )


def cache_line(memory: dict[str, float]) -> str:
    return line(
        "cache",
        f"{size(memory['cache'])} a chip, {memory['cache'] / memory['dense_cache']:.3f} of a dense model's "
        f"{size(memory['dense_cache'])} at this depth",
    )


def loading_line(memory: dict[str, float]) -> str:
    return line(
        "loading", f"{size(memory['loading'])} a chip, before there is a cache: the checkpoint's float32, then rounded"
    )


def verdict(report: dict[str, Any], what: str, smaller: Mapping[str, tuple[int, int]]) -> str:
    """Whether it fits, by how much, and if not what to change, what costs least first.

    Args:
      what: takes memory, such as "decoding".
      smaller: by flag: the next smaller value, and the least that makes sense.
    """
    memory, name, mesh = report["memory"], report["topology"]["name"], report["topology"]["mesh"]
    where = f"on a chip of {name}" if np.prod(list(mesh.values())) == 1 else f"on {name}"
    available, loading = memory["available"], memory["loading"]
    needed = max(memory.get("needed", available), loading)
    if report["fits"]:
        tight = " (tight)" if needed > TIGHT * available else ""
        loads = " while it loads" if loading == needed else ""
        return f"FITS {where}: {size(available - needed)} a chip to spare{loads}{tight}"
    changes = []
    if mesh["data"] > 1:
        changes.append(f"--mesh.data=1 --mesh.fsdp={mesh['data'] * mesh['fsdp']} (weights split; more collectives)")
    larger = [f"{kind} ({size(chip.hbm_bytes)})" for kind, chip in topology.CHIPS.items() if chip.hbm_bytes > needed]
    changes.append("more chips" + (f", or chips of {' or '.join(larger)}" if larger else ""))
    if loading > available:
        why = f"loading takes {size(loading)} of {size(available)} a chip, float32 parameters beside those rounded"
    else:
        why = report["compile"]["refused"] or f"{what} takes {size(needed)} of {size(available)} a chip"
        changes = [f"--{flag}={value}" for flag, (value, least) in smaller.items() if value >= least] + changes
    return f"DOES NOT FIT {where}: {why}; try {', then '.join(changes)}"
