"""What to train a config with on a TPU slice: mesh, recomputation, micro-batches, chunk of the loss.

`make_report` compiles the train step of the config as it is and of the candidates that look best by a count, each as
`train_step` does, and ranks them by estimated step time: the one in which no collective hides behind work, since how
much a TPU hides is measured nowhere here. None of these keys changes what is learned, so a run may take them up at any
restart. What is compiled is kept, so a search that was interrupted goes on, and a second one compiles nothing.

The count (see `counts`) says what is too large to try, and in which order to try the rest. Each compilation corrects
it for the candidates that are alike. The first half of the compilations goes to meshes and recomputations that were not
tried yet, with the default's chunk of the loss, since of chunks the count knows least; after that all compete.
"""

import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax

from mod_jax import config as config_lib
from mod_jax import sharding
from mod_jax.config import FIELDS, Config, MeshConfig, TrainConfig
from mod_jax.errors import ConfigError
from mod_jax.planning import counts, topology, train_step
from mod_jax.planning.report import TIGHT, changed_line, count, describe_inputs, find_slice, line, size, wrap
from mod_jax.training import losses

LOSS_CHUNKS = (0, 512, 8192)  # tokens; 0 is what the platform prefers
LIMIT = 12  # compilations
SEARCHED = ("mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.expert", "model.remat", "train.accumulation")
SEARCHED += ("train.loss_chunk",)


@dataclasses.dataclass(frozen=True)
class Candidate:
    config: Config
    count: counts.Count

    @property
    def layout(self) -> tuple[MeshConfig, str]:
        """What the candidates that differ in micro-batches or chunk alone have in common."""
        return self.config.mesh, self.config.model.remat


def make_report(config: Config, topology_name: str, limit: int = LIMIT) -> dict[str, Any]:
    """Compiles the default and the candidates that look best, at most `limit` of them; a table of them, JSON-ready.

    Raises:
      ConfigError: as `train_step.make_report`; the limit leaves nothing to compare.
    """
    if limit < 2:
        raise ConfigError(f"--search_limit={limit}: must be >= 2, the default and one other")
    product, read_as, devices = find_slice(config, topology_name)
    default, changed_mesh = train_step.with_workable_mesh(config, len(devices))
    start = time.perf_counter()
    default = _with_sizes(default, len(devices))
    waiting = [
        Candidate(c, counts.count(c, product, sharding.make_mesh(c, devices))) for c in candidates(default, devices)
    ]
    first = next(c for c in waiting if c.config == default)
    _say(f"{count(len(waiting), 'candidate')} counted in {time.perf_counter() - start:.0f} s, up to {limit} compiled")

    search = _Search(product.chip.hbm_bytes)
    while first is not None and len(search.tried) < limit:
        waiting.remove(first)
        row = {
            "flags": flags(config, first.config),
            "default": first.config == default,
            "far": topology.splits_physical_axes(sharding.make_mesh(first.config, devices)),
            **_row(first, topology_name),
        }
        search.add(first, row)
        _say(f"{len(search.tried):>3}/{limit} {_words(row)}")
        first = search.next(waiting, default.train.loss_chunk if len(search.tried) < (limit + 1) // 2 else None)
    too_large = sum(not search.may_fit(candidate) for candidate in waiting)
    rows = sorted((row for _, row in search.tried), key=rank)
    mesh = sharding.make_mesh(default, devices)
    report = {
        **describe_inputs(config, product, devices, dict(mesh.shape)),
        "program": "search",
        "notes": [note for note in (read_as, changed_mesh) if note],
        "available": product.chip.hbm_bytes,
        "candidates": {
            "counted": len(waiting) + len(rows),
            "tried": len(rows),
            "too_large": too_large,
            "not_tried": len(waiting) - too_large,
        },
        "rows": rows,
    }
    winner = next((row for row in rows if row["fits"] and (row["default"] or not row["tight"])), None)
    return report | {"winner": winner, "verdict": verdict(report, winner)}


# What there is to try.


def candidates(default: Config, devices: list[jax.Device]) -> Iterator[Config]:
    """Every way to train that divides evenly, the default among them. Chunks that give as many are one."""
    batch_size = default.train.batch_size
    chunks = dict.fromkeys((default.train.loss_chunk, *LOSS_CHUNKS))
    for mesh_config in meshes(default, len(devices)):
        on_mesh = dataclasses.replace(default, mesh=mesh_config)
        rows = batch_size // (mesh_config.data * mesh_config.fsdp * mesh_config.expert)
        mesh = sharding.make_mesh(dataclasses.replace(on_mesh, train=_train(default, 1, 0)), devices)
        for micro in (n for n in range(1, rows + 1) if rows % n == 0):
            with jax.set_mesh(mesh):
                different = {
                    losses.num_chunks(batch_size // micro, default.data.seq_len, c): c for c in [*chunks][::-1]
                }
            for chunk, remat in itertools.product(different.values(), FIELDS["model.remat"].metadata["choices"]):
                model = dataclasses.replace(default.model, remat=remat)
                yield dataclasses.replace(on_mesh, model=model, train=_train(default, micro, chunk))


def meshes(config: Config, num_devices: int) -> Iterator[MeshConfig]:
    """Every mesh that covers that many devices and that batch and model divide by."""
    sizes = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    whole_batch = dataclasses.replace(config, train=_train(config, 1, 0))
    experts = sizes if config.expert_depths else sorted({1, config.mesh.expert})
    for expert, tensor, data in itertools.product(experts, sizes, sizes):
        fsdp, rest = divmod(num_devices, expert * tensor * data)
        mesh = MeshConfig(data, fsdp, tensor, expert)
        if not rest and fsdp and not train_step.why_no_mesh(dataclasses.replace(whole_batch, mesh=mesh), num_devices):
            yield mesh


def _train(config: Config, micro: int, chunk: int) -> TrainConfig:
    return dataclasses.replace(config.train, accumulation=micro, loss_chunk=chunk)


def _with_sizes(config: Config, num_devices: int) -> Config:
    return dataclasses.replace(config, mesh=MeshConfig(*sharding.mesh_shape(config, num_devices)))


def flags(config: Config, planned: Config) -> dict[str, Any]:
    """The searched keys on which a candidate differs from the config as it was given."""
    return {key: new for key, (_, new) in config_lib.difference(config, planned).items() if key in SEARCHED}


# Which to try.


class _Search:
    """What was tried, and what it says of the rest."""

    def __init__(self, available: float):
        self.available = available
        self.tried: list[tuple[Candidate, dict[str, Any]]] = []

    def add(self, candidate: Candidate, row: dict[str, Any]) -> None:
        self.tried.append((candidate, row))

    def next(self, waiting: list[Candidate], new_with_chunk: int | None) -> Candidate | None:
        """The one that looks fastest of those that may fit: with this chunk on a new mesh, or with a new remat, if
        there is one; None: of all."""
        known = {candidate.layout for candidate, _ in self.tried}
        able = [candidate for candidate in waiting if self.may_fit(candidate)]
        new = [c for c in able if c.layout not in known and c.config.train.loss_chunk == new_with_chunk]
        return min(new or able, key=lambda c: (self.expected(c, "seconds"), c.count.memory), default=None)

    def may_fit(self, candidate: Candidate) -> bool:
        return self.expected(candidate, "memory") <= self.available

    def expected(self, candidate: Candidate, what: str) -> float:
        """The count of `what`, corrected by those that are most like this one: by mesh and remat, by remat, any."""
        alike = [
            [(c, row) for c, row in self.tried if c.layout == candidate.layout],
            [(c, row) for c, row in self.tried if c.layout[1] == candidate.layout[1]],
            self.tried,
        ]
        for group in alike:
            if ratios := [row[what] / getattr(c.count, what) for c, row in group if row[what]]:
                return getattr(candidate.count, what) * sum(ratios) / len(ratios)
        return getattr(candidate.count, what)


def _row(candidate: Candidate, topology_name: str) -> dict[str, Any]:
    """A line of the table: what was compiled, and what the compiler and the estimate say of it. Sizes in bytes."""
    config = candidate.config
    row = {
        "mesh": dataclasses.asdict(config.mesh),
        "remat": config.model.remat,
        "accumulation": config.train.accumulation,
        "loss_chunk": config.train.loss_chunk,
        "counted": candidate.count._asdict(),
        "fits": False,
        "tight": False,
        "memory": 0.0,
        "seconds": 0.0,
    }
    try:
        plan = train_step.make_report(config, topology_name)
    except jax.errors.JaxRuntimeError as error:  # the compiler's own fault: no reason to lose the others
        return row | {"refused": " ".join(str(error).split()), "compile": None}
    refused = plan["compile"]["refused"]
    row |= {"refused": refused, "compile": plan["compile"], "fits": plan["fits"]}
    if refused:
        return row | {"memory": train_step.bytes_asked(refused)}
    needed, estimate = plan["memory"]["needed"], plan["estimate"]
    return row | {
        "tight": needed > TIGHT * plan["memory"]["available"],
        "memory": needed,
        "seconds": estimate["seconds_exposed"],
        "estimate": estimate,
        "token_movers": plan["token_movers"],
    }


def rank(row: dict[str, Any]) -> tuple:
    """What fits comes first, the fastest of it; of equally fast ones the default, then what takes least."""
    hidden = row["estimate"]["seconds_hidden"] if row["seconds"] else math.inf
    return not row["fits"], row["seconds"] or math.inf, hidden, not row["default"], row["memory"]


# What is said.


def verdict(report: dict[str, Any], winner: dict[str, Any] | None) -> str:
    """Whether something beats the default, by how much, and what to give to `train`."""
    name, rows = report["topology"]["name"], report["rows"]
    default = next(row for row in rows if row["default"])
    if winner is None:
        return f"NOTHING THAT WAS TRIED FITS on {name} with room for evaluation; try a larger slice"
    if winner is default:
        return f"THE DEFAULT WINS on {name}: none of {count(len(rows) - 1, 'other')} tried is estimated faster"
    told = " ".join(f"--config.{key}={value}" for key, value in winner["flags"].items())
    if not default["fits"]:
        return f"THE DEFAULT DOES NOT FIT on {name}; the fastest that does: {told}"
    less = 1 - winner["seconds"] / default["seconds"]
    return f"FASTER THAN THE DEFAULT on {name}, by estimate: {less:.1%} less time a step; give to train: {told}"


def describe(report: dict[str, Any]) -> str:
    """The table for a person, and the verdict last."""
    where, numbers, rows = report["topology"], report["candidates"], report["rows"]
    experts = any(row["mesh"]["expert"] > 1 for row in rows)
    axes = [axis for axis in sharding.AXES if axis != "expert" or experts]
    lines = [
        line("target", f"{where['name']}: {count(where['chips'], 'chip')} ({where['kind']})"),
        changed_line(report),
        line(
            "tried",
            f"{numbers['tried']} of {count(numbers['counted'], 'candidate')}; {numbers['too_large']} more are too "
            f"large by count, {numbers['not_tried']} were not tried (--search_limit)",
        ),
        *(line("note", note) for note in report["notes"]),
        line(
            "estimate",
            "seconds of a step and MFU, if no collective hides behind work (by this they are ranked) and if "
            "all do; a roofline, optimistic, not a measurement",
        ),
    ]
    header = (
        f"{'exposed':>9} {'hidden':>8} {'MFU':>9} {'HBM a chip':>11}  {' x '.join(axes):<22} {'remat':<6} "
        f"{'micro-batches':>13} {'loss chunk':>10}"
    )
    table = [header, *(_table_row(row, axes) for row in rows)]
    ending = []
    if report["winner"] and (other := _better_if_hidden(report)):
        told = " ".join(f"--config.{key}={value}" for key, value in other["flags"].items()) or "the default"
        hidden = other["estimate"]["seconds_hidden"]
        ending.append(line("note", f"if all collectives hide, this is the fastest: {hidden:.4g} s with {told}"))
    if any(row["far"] for row in rows):
        ending.append(
            line("note", "*: mesh axes are no products of axes of the slice; some neighbours are several hops apart")
        )
    return "\n".join([wrap(lines), *table, wrap([*ending, line("verdict", report["verdict"])])])


def _table_row(row: dict[str, Any], axes: list[str]) -> str:
    if row["seconds"]:
        e = row["estimate"]
        times = f"{e['seconds_exposed']:>9.4g} {e['seconds_hidden']:>8.4g}"
        times += f" {e['mfu_exposed']:>4.0%} {e['mfu_hidden']:>4.0%} {size(row['memory']):>11}"
    else:
        asked = size(row["memory"]) if row["memory"] else ""
        times = f"{'does not fit' if row['compile'] else 'the compiler fails':>28} {asked:>11}"
    mesh = " x ".join(str(row["mesh"][axis]) for axis in axes) + ("*" if row["far"] else "")
    remarks = [name for name in ("default", "tight") if row[name]]
    if row["seconds"] and not row["fits"]:
        remarks.append("does not fit")
    return (
        f"{times}  {mesh:<22} {row['remat']:<6} {row['accumulation']:>13} {row['loss_chunk']:>10}  {', '.join(remarks)}"
    ).rstrip()


def _better_if_hidden(report: dict[str, Any]) -> dict[str, Any] | None:
    """The row that would win if all collectives hid behind work, where that is another one."""
    able = [row for row in report["rows"] if row["fits"] and (row["default"] or not row["tight"])]
    best = min(able, key=lambda row: row["estimate"]["seconds_hidden"])
    less = best["estimate"]["seconds_hidden"] < report["winner"]["estimate"]["seconds_hidden"]
    return best if less else None


def _words(row: dict[str, Any]) -> str:
    """A line of progress."""
    mesh = " x ".join(f"{axis} {ways}" for axis, ways in row["mesh"].items() if ways > 1) or "one device"
    told = f"{mesh}, remat {row['remat']}, accumulation {row['accumulation']}, "
    told += f"loss chunk {row['loss_chunk']}: "
    if not row["compile"]:
        return f"{told}the compiler fails: {row['refused'][:120]}"
    kept = "kept from before" if row["compile"]["cached"] else f"compiled in {row['compile']['seconds']:.0f} s"
    if row["refused"]:
        return f"{told}does not fit ({kept})"
    return f"{told}{row['seconds']:.4g} s, {size(row['memory'])} a chip ({kept})"


def _say(text: str) -> None:
    print(f"search: {text}", file=sys.stderr, flush=True)
