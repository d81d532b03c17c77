"""Two processes of four devices train like one process of eight: the same stream, losses and checkpoints.

And as a person starts them, `python -m mod_jax.train --distributed`: when one of them is missing, dies, hangs or is
another program, each that is left ends in bounded time, with one line on stderr and exit code 6.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import pytest
from faults import harness
from tiny import TINY

from mod_jax import cli, distributed
from mod_jax.config import make_config
from mod_jax.errors import ConfigError
from mod_jax.training import loop
from mod_jax.training.loop import Outcome
from mod_jax.training.rows import read_metrics

ROOT = pathlib.Path(__file__).resolve().parents[1]
GLOO_PATIENCE = 30  # seconds that JAX's collectives between CPUs wait for a process, the first time
CHANGES = {
    **TINY,
    "model.depth": 2,
    "routing.aux_weight": 0.1,
    "optimizer.eps": 1e-3,  # so that another order of summation stays a rounding error
    "seed": 1,
    "data.eval_windows": 8,
    "mesh.data": 2,
    "mesh.fsdp": 2,
    "mesh.tensor": 2,
    "train.steps": 6,
    "train.log_every": 1,
    "train.eval_every": 3,
    "train.save_every": 2,
}


class NoneLeft:
    """On leaving the block, none of `self.processes` is left running. Waits as long as they compute or write."""

    def wait_until(self, condition, what):
        """Until it holds, while all processes are alive."""

        def holds():
            over = any(process.poll() is not None for process in self.processes)
            assert condition() or not over, self.outputs()
            return condition()

        harness.wait_until(holds, self.busy, what, lambda: str(self.outputs()))

    def wait_for_the_end(self):
        """The exit codes."""
        for process in self.processes:
            harness.wait_until(lambda: process.poll() is not None, self.busy, "its end", lambda: str(self.outputs()))  # noqa: B023
        return [process.returncode for process in self.processes]

    def busy(self):
        return sum(harness.cpu_seconds(process.pid) for process in self.processes if process.poll() is None)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        for process in self.processes:
            process.kill()
            process.wait()


class Processes(NoneLeft):
    """The processes of one run, each with its share of eight devices."""

    def __init__(self, folder, workdir, changes, num_processes=2, order=range(8), late=0):
        port = harness.free_port()
        flags = f"--xla_force_host_platform_device_count={8 // num_processes} {harness.QUICK_COMPILER}"
        environment = dict(os.environ, XLA_FLAGS=flags, JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
        command = [sys.executable, str(ROOT / "tests" / "multiprocess_worker.py"), str(port), str(num_processes)]
        self.may_go_on = folder / "may_go_on"
        command += [json.dumps([*order]), str(late), str(self.may_go_on)]
        folder.mkdir()
        self.records = [folder / f"{i}.jsonl" for i in range(num_processes)]
        self.logs = [folder / f"{i}.log" for i in range(num_processes)]
        self.processes = []
        for i, (record, log) in enumerate(zip(self.records, self.logs, strict=True)):
            arguments = [str(i), str(workdir), json.dumps(changes), str(record)]
            with log.open("w") as file:
                self.processes.append(
                    subprocess.Popen(command + arguments, cwd=ROOT, env=environment, stdout=file, stderr=file)
                )

    def wait_for_a_step(self):
        """Until both have loaded a batch, behind which they wait for `finish`."""
        self.wait_until(lambda: all(record.exists() and record.read_text() for record in self.records), "a step")

    def finish(self):
        """(outcome, example ids of each step), by process."""
        self.may_go_on.touch()
        codes = self.wait_for_the_end()
        assert not any(codes), (codes, self.outputs())
        lines = [[json.loads(line) for line in record.read_text().splitlines()] for record in self.records]
        return [(outcome, ids) for *ids, outcome in lines]

    def outputs(self):
        return [log.read_text(errors="replace") for log in self.logs]


def losses(workdir):
    names = ("train/loss", "train/aux_loss", "train/predictor_loss", "eval/topk_loss", "eval/causal_loss/threshold")
    rows = read_metrics(workdir / "metrics.jsonl")
    return [(row["step"], name, row[name]) for row in rows for name in names if name in row]


def assert_same_losses(actual, expected):
    assert [key[:2] for key in actual] == [key[:2] for key in expected]
    for (*where, value), (*_, wanted) in zip(actual, expected, strict=True):
        # Held-out windows have scores that tie at the cut but for rounding; one token chosen otherwise moves 3e-5 nats.
        tolerance = 1e-5 if where[1].startswith("train/") else 5e-4
        assert value == pytest.approx(wanted, abs=tolerance), where


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """(workdir, example ids of each step) of the same run in this process."""
    workdir, ids = tmp_path_factory.mktemp("one") / "run", []
    put_batch = loop.put_batch

    def put(run, batch):
        ids.append(batch["example_ids_B"].tolist())
        return put_batch(run, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "put_batch", put)
        assert loop.train(make_config(**CHANGES), workdir) is Outcome.DONE
    return workdir, ids


@pytest.mark.slow
def test_two_processes_train_save_and_resume_like_one(one_process, tmp_path):
    workdir, ids = tmp_path / "run", one_process[1]

    # Ctrl-C in one of the two, which makes it a SIGTERM: both save at the same step and leave.
    with Processes(tmp_path / "first", workdir, CHANGES) as processes:
        processes.wait_for_a_step()
        processes.processes[1].send_signal(signal.SIGINT)
        (outcome, first), (other_outcome, other_first) = processes.finish()
        assert outcome == other_outcome == "preempted"
        assert ["FRESH RUN" in output for output in processes.outputs()] == [True, False]  # one voice
    assert len(first) == len(other_first) < 6

    # On a pod a process owns a tile of the mesh. Each pair of devices below holds two rows.
    order, late = [0, 4, 1, 2, 5, 6, 3, 7], GLOO_PATIENCE + 1
    with Processes(tmp_path / "second", workdir, CHANGES, order=order, late=late) as processes:
        (outcome, second), (other_outcome, other_second) = processes.finish()
        assert outcome == other_outcome == "done"
        assert f"RESUMED step {len(first)} of 6" in processes.outputs()[0]
        assert "DONE at step 6" in processes.outputs()[0]

    # Together they load the stream of one process.
    done = len(first)
    assert (first, other_first) == ([rows[:4] for rows in ids[:done]], [rows[4:] for rows in ids[:done]])
    for mine, held in ((second, [0, 1, 2, 3, 6, 7]), (other_second, [0, 1, 4, 5, 6, 7])):
        assert mine == [[rows[i] for i in held] for rows in ids[done:]]
    assert_same_losses(losses(workdir), losses(one_process[0]))
    assert (workdir / "report" / "loss.png").exists()

    # One process goes on from the checkpoint of two.
    assert loop.train(make_config(**CHANGES | {"train.steps": 7}), workdir, extend=True) is Outcome.DONE


class Commands(NoneLeft):
    """`python -m mod_jax.train --distributed` as often as told, on one port and, unless told otherwise, one workdir."""

    def __init__(self, folder, steps=100_000):
        changes = {**TINY, "model.depth": 2, "data.eval_windows": 8, "train.steps": steps, "train.save_every": 20}
        changes |= {"train.log_every": 10, "train.eval_every": 0}
        self.folder, self.port, self.processes = folder, harness.free_port(), []
        self.flags = ["--config=configs/smoke.py", "--distributed", f"--coordinator_address=localhost:{self.port}"]
        self.flags += ["--num_processes=2", f"--workdir={folder / 'run'}"]
        self.flags += [f"--config.{name}={value}" for name, value in changes.items()]

    def start(self, process_id, *flags, root=ROOT, initialization_timeout=300, **variables):
        number = len(self.processes)
        threads = f"--xla_force_host_platform_device_count=1 {harness.QUICK_COMPILER}"
        environment = dict(os.environ, XLA_FLAGS=threads, JAX_PLATFORMS="cpu", PYTHONPATH=str(root)) | variables
        timeouts = [f"--initialization_timeout={initialization_timeout}", "--heartbeat_timeout=10"]
        command = [sys.executable, "-m", "mod_jax.train", *self.flags, f"--process_id={process_id}", *timeouts, *flags]
        with (self.folder / f"{number}.out").open("w") as out, (self.folder / f"{number}.err").open("w") as err:
            process = subprocess.Popen(command, cwd=root, env=environment, stdout=out, stderr=err)
        self.processes.append(process)
        return number

    def output(self, number):
        return (self.folder / f"{number}.out").read_text()

    def outputs(self):
        return [path.read_text(errors="replace") for path in sorted(self.folder.glob("*.*"))]

    def wait_for_a_checkpoint(self):
        self.wait_until((self.folder / "run" / "checkpoints" / "20").exists, "step 20 is saved")

    def end(self, number):
        """(exit code, the only line on stderr) of a process that ends by itself."""
        process, error = self.processes[number], self.folder / f"{number}.err"

        def ended():  # the reader of its stderr lives a moment longer
            return process.poll() is not None and error.read_text().endswith("\n")

        def busy():
            return harness.cpu_seconds(process.pid) if process.poll() is None else -1.0

        harness.wait_until(ended, busy, "its end", lambda: str(self.outputs()))
        (line,) = error.read_text().splitlines()
        return process.returncode, line


@pytest.mark.slow
def test_a_process_that_never_starts_or_starts_too_late(tmp_path):
    with Commands(tmp_path) as commands:
        for process_id in (0, 1):  # the second comes when the first has given up
            alone = commands.start(process_id, initialization_timeout=3)
            code, line = commands.end(alone)
            assert code == 6
            assert line.startswith("error: not all processes came before --initialization_timeout ran out; was each")


@pytest.mark.slow
def test_a_killed_process_ends_the_other_and_the_same_command_resumes(tmp_path):
    with Commands(tmp_path, steps=60) as commands:
        commands.start(0)
        commands.start(1)
        commands.wait_for_a_checkpoint()
        commands.processes[1].kill()
        code, line = commands.end(0)
        assert code == 6
        assert line.startswith(("error: another process failed, died", "error: process 1 failed, died"))
        assert line.endswith("; the same command on all processes resumes from the newest checkpoint")

    with Commands(tmp_path, steps=60) as commands:
        commands.start(0)
        commands.start(1)
        assert commands.wait_for_the_end() == [0, 0]
        assert "RESUMED step " in commands.output(0)
        assert "DONE at step 60" in commands.output(0)


@pytest.mark.slow
def test_a_process_that_hangs_and_what_it_finds_when_it_wakes(tmp_path):
    with Commands(tmp_path) as commands:
        commands.start(0)
        commands.start(1)
        commands.wait_for_a_checkpoint()
        commands.processes[1].send_signal(signal.SIGSTOP)
        code, line = commands.end(0)
        assert code == 6
        assert line.startswith(
            "error: process 1 failed, died, hangs or cannot be reached (see its own output); the same"
        )

        commands.processes[1].send_signal(signal.SIGCONT)
        code, line = commands.end(1)
        assert code == 6
        # It was given up: it hears so, or finds nobody, whichever comes first.
        assert line.startswith(tuple(f"error: {who}" for who in ("process 0, which", "another process", "process 1 f")))


@pytest.mark.slow
def test_processes_that_are_not_the_same_program(tmp_path):
    (tmp_path / "code").mkdir()
    other = tmp_path / "other"
    shutil.copytree(ROOT / "configs", other / "configs")
    shutil.copytree(ROOT / "mod_jax", other / "mod_jax")
    (other / "mod_jax" / "routing.py").open("a").write("# edited on one machine only\n")
    with Commands(tmp_path / "code") as commands:
        commands.start(0)
        commands.start(1, root=other)
        for number in (0, 1):
            code, line = commands.end(number)
            assert code == 6
            assert line.startswith("error: the processes could not connect: process ")
            assert line.count(", code ") == 2

    (tmp_path / "count").mkdir()
    with Commands(tmp_path / "count") as commands:
        commands.start(0)
        commands.start(1, "--num_processes=3")
        for number in (0, 1):
            code, line = commands.end(number)
            assert code == 6
            assert "2 processes, jax " in line
            assert "3 processes, jax " in line


@pytest.mark.slow
def test_a_process_id_given_twice(tmp_path):
    with Commands(tmp_path) as commands:
        for process_id in (0, 1, 1):
            commands.start(process_id, initialization_timeout=30)
        ends = [commands.end(number) for number in range(3)]
        assert [code for code, _ in ends] == [6, 6, 6]
        assert any("process_id 1 was given twice, or started again while" in line for _, line in ends)


@pytest.mark.slow
def test_a_process_that_fails_alone_keeps_its_own_error(tmp_path):
    with Commands(tmp_path) as commands:
        commands.start(0)
        bad = commands.start(1, MOD_JAX_CACHE="/proc/nowhere")
        code, line = commands.end(bad)
        assert code == 5
        assert line.startswith("error: cannot write to the cache /proc/nowhere")
        code, line = commands.end(0)
        assert code == 6
        assert line.startswith("error: ")


@pytest.mark.slow
def test_all_processes_refuse_two_configs_alike(tmp_path):
    with Commands(tmp_path) as commands:
        commands.start(0)
        commands.start(1, "--config.seed=5")
        for number in (0, 1):
            code, line = commands.end(number)
            assert code == 2
            assert line.startswith("error: the processes of this run hold different configs, by process: ")


FATAL = (
    "F1130 01:41:21.805935   27609 client.h:80] Terminating process because the JAX distributed service detected fatal "
    "errors. This most likely indicates that another task died. absl::Status: "
)
UNHEALTHY = (
    "E1130 01:41:21.805325   27598 coordination_service.cc:1549] [17] Use error polling to propagate the following\n"
    f"{FATAL}UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n1\n3\nThe tasks crashed."
    "\n\nRPC: /xla.coordination.CoordinationService/PollForError\n"
)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (UNHEALTHY, "process 1, 3 failed, died"),
        (
            f"{FATAL}DEADLINE_EXCEEDED: Deadline Exceeded\n\nRPC: /xla.coordination.CoordinationService/Heartbeat\n",
            "process 0,",
        ),
        (f"{FATAL}UNAVAILABLE: Failed to send RPC. Either the leader task was preempted/died\n", "process 0,"),
        (
            f"{FATAL}DEADLINE_EXCEEDED: \n\nRPC: /xla.coordination.CoordinationService/RegisterTask\n",
            "not all processes came",
        ),
        (
            f"{FATAL}ABORTED: 1 unexpectedly tried to connect with a different incarnation.\n",
            "process_id 1 was given twice",
        ),
        (
            f"{FATAL}INTERNAL: what nobody\n has seen\n",
            "the processes lost each other: INTERNAL: what nobody has seen; the same",
        ),
    ],
)
def test_last_words_in_one_line(words, expected):
    line = distributed.cause(words)
    assert line.startswith(expected)
    assert "\n" not in line


def test_the_reader_of_stderr_passes_on_all_but_the_last_words():
    command = [sys.executable, "-I", distributed.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=0) as reader:

        def write(text):
            reader.stdin.write(text)
            reader.stdin.flush()

        write("a warning\n")
        assert reader.stderr.readline() == "a warning\n"  # at once
        native = "W1130 01:40:15.1 27 preemption_sync_manager.cc:147] Failed to retrieve preemption notice\n"
        write(native)
        assert reader.stderr.readline() == native  # after a while, since nothing came of it
        reader.send_signal(signal.SIGTERM)
        write("é, whatever\n")
        assert reader.stderr.readline() == "é, whatever\n"
        write(UNHEALTHY)
        write("    @     0x7f6bd7e9a82e  std::_Function_handler<>::_M_invoke()\n")
        expected = "process 1, 3 failed, died, hangs or cannot be reached (see its own output)"
        assert reader.stderr.readline() == f"error: {expected}; {distributed.RESUME}\n"
        reader.stdin.close()
        assert reader.stderr.read() == ""
        assert reader.wait(10) == 0


def test_a_process_that_named_its_own_error_says_nothing_more():
    command = [sys.executable, "-I", distributed.__file__]
    done = subprocess.run(
        command, input="error: mine\n" + UNHEALTHY, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == "error: mine\n"


def test_the_reader_changes_no_byte():
    data = "é€𝄞".encode() * 30_000 + b"\n" + bytes(range(256)) * 400  # characters split between reads, and no UTF-8
    command = [sys.executable, "-I", distributed.__file__]
    assert subprocess.run(command, input=data, capture_output=True, timeout=60, check=True).stderr == data


def test_an_error_of_a_single_process_needs_no_private_part_of_jax(monkeypatch, capsys):
    def fail():
        raise ConfigError("config.seed = -1: must be >= 0")

    monkeypatch.setitem(sys.modules, "jax._src.distributed", None)  # as if a new version had it elsewhere
    assert cli.exit_code(fail) == 2
    assert capsys.readouterr().err == "error: config.seed = -1: must be >= 0\n"


def test_several_processes_do_without_the_private_part_of_jax(monkeypatch, capsys):
    ended = []
    monkeypatch.setitem(sys.modules, "jax._src.distributed", None)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(distributed.time, "sleep", lambda seconds: None)
    distributed.check_same_program(1)
    assert "each must run the same code" in capsys.readouterr().err
    distributed.leave(5)
    assert ended == [5]
    lost = jax.errors.JaxRuntimeError("UNAVAILABLE: Connection reset by peer")
    assert distributed.explanation(lost).startswith("another process failed, died or cannot be reached")
