"""What the plans of training and of sampling have in common: the slice that is meant, and lines of a report."""

import collections
import textwrap
from collections.abc import Iterable
from typing import Any

import jax

from mod_jax import config as config_lib
from mod_jax.config import Config
from mod_jax.errors import ConfigError
from mod_jax.planning import roofline, topology
from mod_jax.planning.program import Step
from mod_jax.planning.topology import Compiled, Product

INDENT = 10
TIGHT = 0.9  # of a chip's memory: beyond it, what runs beside, an evaluation or a prefill, may not fit


def find_slice(config: Config, name: str) -> tuple[Product, str, list[jax.Device]]:
    """The slice of this name, a note where the name had to be read, and its devices.

    Raises:
      ConfigError: the slice does not exist, libtpu is missing, or the config has no vocab_size.
    """
    product, read_as = topology.find_product(name)
    if not config.model.vocab_size:
        raise ConfigError(
            "config.model.vocab_size = 0: planning reads no corpus; set it to the tokenizer's size, 257 for bytes"
        )
    return product, read_as, topology.devices(product)


def describe_inputs(config: Config, product: Product, devices: list[jax.Device], mesh: dict[str, int]) -> dict:
    """What was planned for what, JSON-ready: the first part of a report."""
    return {
        "topology": {
            "name": product.name,
            "chips": product.num_chips,
            "devices": len(devices),
            "kind": devices[0].device_kind,
            "mesh": mesh,
        },
        "config": config_lib.changed_from_default(config),
        "fingerprint": config_lib.fingerprint(config),
        "layout": "".join(block.kind for block in config.blocks),
    }


def describe_compilation(compiled: Compiled) -> dict[str, Any]:
    return {name: getattr(compiled, name) for name in ("seconds", "cpu_seconds", "cached", "refused")}


def moved_by_chip(step: Step) -> list[dict[str, Any]]:
    """Collectives of a step by kind and mesh axes: runs, and bytes that a chip sends; most bytes first."""
    moved = collections.defaultdict(lambda: {"count": 0, "bytes": 0.0})
    for collective, times in step.moved:
        entry = moved[collective.kind, collective.axes]
        entry["count"] += times
        entry["bytes"] += times * roofline.bytes_sent(collective)
    by_bytes = sorted(moved.items(), key=lambda item: -item[1]["bytes"])
    return [{"kind": kind, "axes": axes, **entry} for (kind, axes), entry in by_bytes if entry["count"]]


def moved_lines(collectives: list[dict[str, Any]], per: str) -> list[str]:
    if not collectives:
        return [line("moved", "nothing: no chip needs another")]
    lines = [line("moved", f"runs and bytes sent, per chip and {per}, every loop times its trips")]
    for entry in collectives:
        where = f"{entry['kind']:<20}{' and '.join(entry['axes']) or 'no axis':<20}"
        mib = entry["bytes"] / 2**20
        lines.append(line("", f"{where}{round(entry['count'], 1):>9,} {mib:>12,.{1 if mib >= 10 else 3}f} MiB"))
    return lines


def changed_line(report: dict[str, Any]) -> str:
    return line("changed", ", ".join(f"{name}={value}" for name, value in report["config"].items()))


def compiled_line(report: dict[str, Any]) -> str:
    compiled = report["compile"]
    kept = " (by an earlier run, and kept)" if compiled["cached"] else ""
    return line("compiled", f"in {compiled['seconds']:.0f} s, {compiled['cpu_seconds']:.0f} s of CPU{kept}")


def memory_line(memory: dict[str, float]) -> str:
    return line(
        "memory",
        f"{size(memory['needed'])} of {size(memory['available'])} a chip: arguments {size(memory['argument'])} + "
        f"temporaries {size(memory['temp'])} + outputs {size(memory['output'])} - outputs written over arguments "
        f"{size(memory['alias'])}",
    )


def line(name: str, text: str) -> str:
    """A line of a report: its name in a column of its own, then the text."""
    return f"{name:<{INDENT}}{text}"


def wrap(lines: Iterable[str]) -> str:
    """The report, no line longer than 120 columns."""
    options = dict(subsequent_indent=" " * INDENT, break_long_words=False, break_on_hyphens=False)
    return "\n".join(part for text in lines for part in textwrap.wrap(text, 120, **options))


def size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.2f} MiB"


def count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
