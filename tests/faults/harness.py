"""Real training processes to disturb: start one, wait for a moment of its life, end it, compare what two runs left.

    with Run(workdir) as run:
        run.wait_for(SAVING)
        run.send(signal.SIGKILL)
        assert run.end() == [-signal.SIGKILL]
    assert_same_run(workdir, uninterrupted)

Waiting is for progress, never for a clock: as long as a process computes or writes, it is waited for, however many
others share the machine. Compiled programs are kept below the temporary directory, so that a restart is fast.
"""

import contextlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable

# XLA compiles for CPUs more than twice as fast with these; what it makes is slower, but small here.
QUICK_COMPILER = "--xla_backend_optimization_level=0"
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones do not know this one
    QUICK_COMPILER += " --xla_cpu_use_fusion_emitters=false"

ROOT = pathlib.Path(__file__).resolve().parents[2]
CACHE = pathlib.Path(tempfile.gettempdir()) / f"mod_jax_tests-{os.getuid()}"
STALL = 90.0  # seconds in which a process that is alive computes or writes something

# Intervals that do not divide each other: saves and evaluations fall in the middle of an interval of the log.
SMALL = {
    "model.width": 16,
    "model.depth": 2,
    "model.num_heads": 2,
    "routing.capacity": 0.25,
    "routing.predictor": False,
    "data.source": "synthetic",
    "data.seq_len": 16,
    "data.eval_windows": 4,
    "train.batch_size": 4,
    "train.steps": 14,
    "train.log_every": 4,
    "train.eval_every": 6,
    "train.save_every": 5,
    "train.keep": 2,
}

# Moments of a life: a text of its output, or a path in its workdir that appears.
PREPARED = "^devices  "
RESTORED = "FRESH RUN|RESUMED step"
COMPILED = "compiled the train step"
STEPPING = r"^step +\d+/\d+  loss"
EVALUATED = "held out: "
SAVING = pathlib.Path("checkpoints/*.orbax-checkpoint-tmp*")
SAVED = pathlib.Path("checkpoints/[0-9]*[0-9]")
REPORTING = pathlib.Path("report/*")
DONE = "^DONE at step"

_LIVES = itertools.count()


class Run:
    """One life of a run: `python -m mod_jax.train` in one process, or in several. None is left on leaving the block."""

    def __init__(
        self,
        workdir: pathlib.Path,
        changes: dict | None = None,
        *,
        processes: int = 1,
        flags: Iterable[str] = (),
        environment: dict[str, str] | None = None,
        address: str = "",
    ):
        """Starts it. `changes`: to SMALL. The output of each process is kept beside `workdir`.

        `address`: where the run has its workdir instead, in a bucket.
        """
        self.workdir = pathlib.Path(workdir)
        self._started = time.time() - 0.1  # by the clock of a file system, which is coarse
        self._logs, self.processes = [], []
        settings = {**SMALL, **(changes or {})}
        command = [sys.executable, "-m", "mod_jax.train", "--config=configs/smoke.py"]
        command += [f"--workdir={address or workdir}", *flags]
        command += [f"--config.{name}={value}" for name, value in settings.items()]
        if processes > 1:
            command += ["--distributed", f"--coordinator_address=localhost:{free_port()}"]
            command += [f"--num_processes={processes}", "--heartbeat_timeout=10"]
        variables = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": QUICK_COMPILER,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPATH": str(ROOT),
            **(environment or {}),
        }
        variables.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE / "programs"))
        variables.setdefault("MOD_JAX_CACHE", str(CACHE / "corpora"))
        for i in range(processes):
            log = self.workdir.with_name(f"{self.workdir.name}-{os.getpid()}-{next(_LIVES)}.log")
            log.parent.mkdir(parents=True, exist_ok=True)
            mine = [f"--process_id={i}"] if processes > 1 else []
            with log.open("w") as file:
                streams = dict(stdin=subprocess.DEVNULL, stdout=file, stderr=file)
                self.processes.append(subprocess.Popen(command + mine, cwd=ROOT, env=variables, **streams))
            self._logs.append(log)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        for process in self.processes:
            process.kill()
            process.wait()

    def output(self, i: int = 0) -> str:
        """What process i has written to stdout and stderr."""
        return self._logs[i].read_text(errors="replace")

    def reached(self, moment: str | pathlib.Path) -> bool:
        """Whether process 0 has written a text (a regular expression) or a path in the workdir (a glob) is new."""
        if isinstance(moment, pathlib.Path):
            return any(self._is_new(path) for path in self.workdir.glob(str(moment)))
        return re.search(moment, self.output(), re.MULTILINE) is not None

    def wait_for(self, moment: str | pathlib.Path | Callable[[], bool], *, or_end: bool = False) -> bool:
        """Returns True at this moment of the run. If a process ends before, raises AssertionError, or returns False."""
        reached = moment if callable(moment) else lambda: self.reached(moment)

        def reached_or_over() -> bool:
            over = any(process.poll() is not None for process in self.processes)
            return reached() or over  # in this order: it may end right after

        self._wait_until(reached_or_over, moment)
        alive = all(process.poll() is None for process in self.processes)
        assert alive or or_end or reached(), f"ended before {moment}\n{self.outputs()}"
        return alive or (reached() and not or_end)

    def send(self, number: int, i: int | None = None) -> None:
        """Sends a signal to process i, or to all."""
        for process in self.processes if i is None else [self.processes[i]]:
            process.send_signal(number)

    def end(self) -> list[int]:
        """Waits for the end, and returns each exit code; minus the number of the signal that ended it, if one did."""
        self._wait_until(lambda: all(process.poll() is not None for process in self.processes), "the end")
        return [process.returncode for process in self.processes]

    def cpu_seconds(self) -> float:
        """CPU time of process 0 so far: a clock of its life that stands while others compute. 0 once it is gone."""
        return cpu_seconds(self.processes[0].pid)

    def _wait_until(self, condition: Callable[[], bool], what: object) -> None:
        def busy() -> float:
            alive = [process.pid for process in self.processes if process.poll() is None]
            return sum(map(cpu_seconds, alive)) + sum(log.stat().st_size for log in self._logs)

        wait_until(condition, busy, what, self.outputs)

    def _is_new(self, path: pathlib.Path) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return path.stat().st_mtime >= self._started
        return False

    def outputs(self) -> str:
        return "\n".join(f"process {i}: {self.output(i)}" for i in range(len(self.processes)))


def wait_until(condition: Callable[[], bool], busy: Callable[[], float], what: object, explain: Callable[[], str]):
    """Returns when `condition()` holds. Raises AssertionError when `busy()`, which progress raises, has stood still."""
    done, last_change = busy(), time.monotonic()
    while not condition():
        time.sleep(0.02)
        now = busy()
        if abs(now - done) > 0.05:
            done, last_change = now, time.monotonic()
        assert time.monotonic() - last_change < STALL, f"stands still before {what}\n{explain()}"


def cpu_seconds(pid: int) -> float:
    """CPU time of a process; 0 if it is gone. Where there is no /proc, the time of day: then a clock has to do."""
    if not sys.platform.startswith("linux"):
        return time.monotonic()
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def train(workdir: pathlib.Path, changes: dict | None = None, **options) -> Run:
    """A run that nothing disturbs, after its end."""
    with Run(workdir, changes, **options) as run:
        codes = run.end()
        assert not any(codes), (codes, run.outputs())
    return run


def learned_rows(workdir: pathlib.Path) -> list[dict]:
    """The rows of metrics.jsonl without what the clock measured. Every line must be whole."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith("perf/")} for row in rows]


def newest_step(workdir: pathlib.Path) -> int:
    """The newest step on disk; -1 if there is none."""
    folder = workdir / "checkpoints"
    steps = folder.iterdir() if folder.exists() else ()
    return max((int(path.name) for path in steps if path.name.isdigit()), default=-1)


def newest_arrays(workdir: pathlib.Path) -> dict:
    """The leaves of the newest step, as they are on disk."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    handler, arrays = ocp.PyTreeCheckpointHandler(), {}
    for item in ("params", "rest"):
        folder = workdir.absolute() / "checkpoints" / str(newest_step(workdir)) / item
        tree = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), dict(handler.metadata(folder).tree))
        arrays |= handler.restore(folder, args=ocp.args.PyTreeRestore(restore_args=tree))
    return arrays


def files_beside_checkpoints(workdir: pathlib.Path) -> set[str]:
    paths = (path.relative_to(workdir) for path in workdir.rglob("*"))
    return {str(path) for path in paths if path.parts[0] != "checkpoints"}


def assert_same_run(actual: pathlib.Path, expected: pathlib.Path) -> None:
    """Both left the same newest arrays, bit for bit, the same rows but for times, and files of the same names."""
    assert newest_step(actual) == newest_step(expected)
    mine, theirs = newest_arrays(actual), newest_arrays(expected)
    assert mine.keys() == theirs.keys()
    differing = [name for name in theirs if mine[name].tobytes() != theirs[name].tobytes()]
    assert not differing, differing
    assert learned_rows(actual) == learned_rows(expected)
    assert files_beside_checkpoints(actual) == files_beside_checkpoints(expected)
