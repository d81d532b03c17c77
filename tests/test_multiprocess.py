"""Two processes of four devices train like one process of eight: the same stream, losses and checkpoints."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest
from tiny import TINY

from mod_jax.config import make_config
from mod_jax.training import loop
from mod_jax.training.loop import Outcome
from mod_jax.training.metrics import read_metrics

ROOT = pathlib.Path(__file__).resolve().parents[1]
TIMEOUT = 400
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


class Processes:
    """The processes of one run, each with its share of eight devices. On leaving the block none is left running."""

    def __init__(self, folder, workdir, changes, num_processes=2):
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        flags = f"--xla_force_host_platform_device_count={8 // num_processes} --xla_backend_optimization_level=1"
        environment = dict(os.environ, XLA_FLAGS=flags, JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
        command = [sys.executable, str(ROOT / "tests" / "multiprocess_worker.py"), str(port), str(num_processes)]
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

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        for process in self.processes:
            process.kill()
            process.wait()

    def wait_for_a_step(self):
        """Until both have loaded a batch."""
        deadline = time.monotonic() + TIMEOUT
        while not all(record.exists() and record.read_text() for record in self.records):
            assert time.monotonic() < deadline, self.outputs()
            assert all(process.poll() is None for process in self.processes), self.outputs()
            time.sleep(0.1)

    def finish(self):
        """(outcome, example ids of each step), by process."""
        codes = [process.wait(TIMEOUT) for process in self.processes]
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
def test_t4_two_processes_train_save_and_resume_like_one(one_process, tmp_path):
    workdir, ids = tmp_path / "run", one_process[1]

    # A SIGTERM to one of the two: both save at the same step and leave.
    with Processes(tmp_path / "first", workdir, CHANGES) as processes:
        processes.wait_for_a_step()
        processes.processes[1].send_signal(signal.SIGTERM)
        (outcome, first), (other_outcome, other_first) = processes.finish()
        assert outcome == other_outcome == "preempted"
        assert ["FRESH RUN" in output for output in processes.outputs()] == [True, False]  # one voice
    assert len(first) == len(other_first) < 6

    with Processes(tmp_path / "second", workdir, CHANGES) as processes:
        (outcome, second), (other_outcome, other_second) = processes.finish()
        assert outcome == other_outcome == "done"
        assert f"RESUMED step {len(first)} of 6" in processes.outputs()[0]
        assert "DONE at step 6" in processes.outputs()[0]

    # Each process loads half of every global batch, and together they load the stream of one.
    assert all(len(ids) == 4 for ids in first + second)
    assert [a + b for a, b in zip(first + second, other_first + other_second, strict=True)] == ids
    assert_same_losses(losses(workdir), losses(one_process[0]))
    assert (workdir / "report" / "loss.png").exists()

    # One process goes on from the checkpoint of two.
    assert loop.train(make_config(**CHANGES | {"train.steps": 7}), workdir, extend=True) is Outcome.DONE
