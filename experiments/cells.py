"""Many runs of one study: each a process of its own, finished ones not repeated, as many at a time as asked for."""

import concurrent.futures
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Cell(NamedTuple):
    """One run: `config` is FILE:ARGUMENT below configs/, `overrides` are --config.KEY=VALUE flags."""

    config: str
    workdir: pathlib.Path
    overrides: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        flags = [f"--config={ROOT / 'configs' / self.config}", f"--workdir={self.workdir}", *self.overrides]
        return [sys.executable, "-m", "mod_jax.train", *flags]


def run(cells: Sequence[Cell], jobs: int = 1) -> None:
    """Trains every cell. What a run prints goes to WORKDIR.log. With several jobs each computes on one thread.

    Two runs of one thread each use two cores better than one run of two threads.

    Raises:
      SystemExit: naming the cells that failed, after all others have been run.
    """
    environment = dict(os.environ)
    if jobs > 1:
        one_thread = " --xla_cpu_multi_thread_eigen=false"
        environment["XLA_FLAGS"] = environment.get("XLA_FLAGS", "") + one_thread

    def train(cell: Cell) -> int:
        cell.workdir.parent.mkdir(parents=True, exist_ok=True)
        with cell.workdir.with_suffix(".log").open("w") as log:
            code = subprocess.run(cell.command, stdout=log, stderr=log, env=environment, cwd=ROOT).returncode
        print(f"{cell.workdir.name}: {'done' if code == 0 else f'exit code {code}, see {log.name}'}", flush=True)
        return code

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        codes = list(pool.map(train, cells))
    if failed := [cell.workdir.name for cell, code in zip(cells, codes, strict=True) if code]:
        raise SystemExit(f"failed: {', '.join(failed)}")
