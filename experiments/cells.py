"""The runs of a study: what each is, how one is run, by whom, and what became of it.

Vocabulary. A *cell* is one run of a study: one call of `python -m mod_jax.train` with a workdir of its own. Its *state*
is one of STATES. A *runner* is whatever starts cells: `run` below, xargs, a SLURM array (docs/studies.md). Any number
of runners may share a folder: the run itself claims its workdir (`mod_jax.training.claim`), resumes what was killed,
and prints the stored result of what is finished. So a runner needs to know nothing.
"""

import concurrent.futures
import dataclasses
import importlib.util
import math
import os
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mod_jax import config as config_lib
from mod_jax.config import Config
from mod_jax.errors import ConfigError, ModJaxError
from mod_jax.training import claim, result
from mod_jax.training.rows import read_metrics

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOOK_AGAIN = 30.0  # seconds between two looks at cells that another runner is working on
STATES = {
    "done": "finished",
    "diverged": "its loss is not finite, or worse than that of guessing",
    "failed": "ended with an error",
    "unfinished": "started and not finished: the same command goes on",
    "missing": "never started",
    "another": "its workdir holds a run of another config",
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run. `config` is FILE:ARGUMENT below configs/, `changes` are config keys set on the command line."""

    workdir: pathlib.Path
    config: str
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.workdir.name

    @property
    def log(self) -> pathlib.Path:
        """What the run prints goes here, beside the workdir: also what it says before it has one."""
        return self.workdir.with_name(f"{self.name}.log")

    @property
    def flags(self) -> list[str]:
        changes = [f"--config.{key}={value}" for key, value in self.changes.items()]
        return [f"--config=configs/{self.config}", f"--workdir={_from_root(self.workdir)}", *changes]

    @property
    def command(self) -> str:
        """One line for a shell, to be run in the root of the repository."""
        return f"python -m mod_jax.train {shlex.join(self.flags)} >> {shlex.quote(_from_root(self.log))} 2>&1"

    def load(self) -> Config:
        """The config that the command will read.

        Raises:
          ConfigError: it is not valid, or the config file refuses its argument.
        """
        file, _, argument = self.config.partition(":")
        try:
            values = load_config_file(file).get_config(*([argument] if argument else []))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        values.update_from_flattened_dict(self.changes)
        return config_lib.from_config_dict(values)


def load_config_file(name: str) -> Any:
    """The module configs/NAME. Config files belong to no package."""
    spec = importlib.util.spec_from_file_location(f"configs_{pathlib.Path(name).stem}", ROOT / "configs" / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Found(NamedTuple):
    """What became of a cell. `detail` says more of a state other than "done"; `result` is what result.json holds."""

    cell: Cell
    state: str
    detail: str = ""
    result: dict[str, Any] | None = None


def run(cells: Sequence[Cell], jobs: int = 1) -> list[Found]:
    """Trains every cell that is not finished, `jobs` at a time, and returns what became of each.

    With several jobs each computes on one thread: two runs of one thread each use two cores better than one run of two
    threads. A cell that another runner is working on is looked at again until that one has finished it, or has died.
    """
    environment = dict(os.environ)
    if jobs > 1:
        environment["XLA_FLAGS"] = environment.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"

    def train(cell: Cell) -> bool:
        """Whether another run is using the workdir."""
        if find(cell).state == "done":
            return False
        cell.workdir.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "mod_jax.train", *cell.flags]
        with cell.log.open("a") as log:
            before = log.tell()
            code = subprocess.run(command, stdout=log, stderr=log, env=environment, cwd=ROOT).returncode
        taken = bool(code) and claim.TAKEN.encode() in cell.log.read_bytes()[before:]
        print(f"{cell.name}: {'another runner works on it' if taken else _say(find(cell))}", flush=True)
        return taken

    waiting = list(cells)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        try:
            while waiting:
                taken = list(pool.map(train, waiting))
                waiting = [cell for cell, is_taken in zip(waiting, taken, strict=True) if is_taken]
                time.sleep(LOOK_AGAIN if waiting else 0)
        except BaseException:  # Ctrl-C: the runs that it reached save and end, and no other is begun
            pool.shutdown(cancel_futures=True)
            raise
    return [find(cell) for cell in cells]


def find(cell: Cell) -> Found:
    """What became of a cell, read from its workdir and its log."""
    stored = result.read(cell.workdir)
    if stored is not None:
        fingerprint = config_lib.fingerprint(cell.load())
        if stored["fingerprint"] != fingerprint:
            return Found(cell, "another", f"fingerprint {stored['fingerprint']}, not {fingerprint}")
        loss, guessing = stored["evaluation"]["eval/topk_loss"], math.log(stored["vocab_size"])
        if not loss < guessing:
            return Found(cell, "diverged", f"held-out loss {loss:.4g}, of guessing {guessing:.4g}", stored)
        return Found(cell, "done", "", stored)
    try:
        rows = [row for row in read_metrics(cell.workdir / "metrics.jsonl") if "train/loss" in row]
    except ModJaxError:
        rows = []
    reached = f"step {rows[-1]['step']}" if rows else "before its first step"
    if rows and not math.isfinite(rows[-1]["train/loss"]):
        return Found(cell, "diverged", f"loss not finite at {reached}")
    last = _last_line(cell.log)
    if last.startswith("error:"):
        return Found(cell, "failed", f"{reached}; {last}")
    if not cell.workdir.exists():
        return Found(cell, "missing")
    return Found(cell, "unfinished", reached)


def not_done(found: Sequence[Found]) -> list[str]:
    """One line for every cell that is not done: none is dropped in silence."""
    return [f"{f.cell.name}: {_say(f)}" for f in found if f.state != "done"]


def _say(found: Found) -> str:
    return found.state + (f", {found.detail}" if found.detail else "")


def _from_root(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def _last_line(log: pathlib.Path) -> str:
    """The last line that a run printed; those that came while another one worked were refused, and do not count."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line.strip() and claim.TAKEN not in line), "")
