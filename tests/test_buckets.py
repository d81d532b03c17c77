"""Workdirs in a bucket, against an emulator: who is refused, what a kill leaves, and the run that comes out of it."""

import contextlib
import http.server
import json
import re
import signal
import subprocess
import sys
import threading

import emulator
import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import harness
from faults.harness import Run

from mod_jax import buckets, paths
from mod_jax.analysis import plots
from mod_jax.data import tokenizers
from mod_jax.errors import StorageError
from mod_jax.training.checkpoint import Checkpointer
from mod_jax.training.claim import Claim
from mod_jax.training.rows import MetricWriter, read_metrics
from mod_jax.training.step_folders import MARK

HOLD = """
import sys, time
from mod_jax import paths
from mod_jax.training.claim import Claim
held = Claim(paths.run_folder("workdir", sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def written(path):
    return json.loads(path.read_text())


# Who may use a bucket.


def test_a_bucket_that_is_not_there_is_one_line_and_leaves_nothing(emulated_bucket):
    for door in (paths.folder_to_read, paths.folder_to_write):
        with pytest.raises(StorageError, match=r"^gs://nobody/run: cannot be used: there is no such bucket$"):
            door("--workdir", "gs://nobody/run")


def test_the_door_leaves_nothing_behind(bucket):
    assert paths.folder_to_write("--workdir", bucket) == bucket
    assert buckets.sizes(bucket) == {}


@contextlib.contextmanager
def storage_that_answers(status, monkeypatch):
    """Steers the clients to a server that says nothing but `status`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
    buckets.client.cache_clear()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        buckets.client.cache_clear()


@pytest.mark.parametrize(
    ("status", "credentials", "why"),
    [
        (401, None, "no Google credentials were found; set GOOGLE_APPLICATION_CREDENTIALS"),
        (403, None, "no Google credentials were found; set GOOGLE_APPLICATION_CREDENTIALS"),
        (403, "some", "no permission"),
    ],
)
def test_credentials_that_are_missing_or_do_not_suffice_are_one_line(
    emulated_bucket, monkeypatch, status, credentials, why
):
    monkeypatch.setattr(buckets, "_credentials", lambda: credentials)
    with (
        storage_that_answers(status, monkeypatch),
        pytest.raises(StorageError, match=f"cannot be used: {why}") as error,
    ):
        paths.folder_to_read("--workdir", "gs://pod/run")
    assert "\n" not in str(error.value)


def test_no_answer_is_one_line(emulated_bucket, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{harness.free_port()}")
    buckets.client.cache_clear()
    with pytest.raises(StorageError, match=r"cannot be used: Google Cloud Storage cannot be reached$"):
        paths.folder_to_read("--workdir", "gs://pod/run")
    buckets.client.cache_clear()


def test_without_credentials_the_client_is_anonymous(monkeypatch):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", "/nowhere")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    buckets.client.cache_clear()
    buckets._credentials.cache_clear()
    assert buckets._credentials() is None
    assert type(buckets.client()._credentials).__name__ == "AnonymousCredentials"
    buckets.client.cache_clear()
    buckets._credentials.cache_clear()


# One run at a time.


def test_a_second_run_is_refused_while_the_first_lives_and_free_when_it_is_killed(bucket):
    command = [sys.executable, "-c", HOLD, str(bucket)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(StorageError, match=rf"{bucket}: another run is using this workdir: pid {first.pid} on "):
            Claim(bucket, silence=1e6)
        assert written(bucket / "claim.json")["pid"] == first.pid
        first.send_signal(signal.SIGKILL)
    Claim(bucket, silence=1e6).close()  # on the same host it is known to be dead
    assert "ended" in written(bucket / "claim.json")
    assert set(buckets.sizes(bucket)) == {"claim.json"}


def leave_claim_of_another_host(bucket, **changes):
    other = {"host": "elsewhere", "kernel": "another", "pid": 7, "since": "2026-01-01 00:00:00 UTC"} | changes
    (bucket / "claim.json").write_text(json.dumps(other))


def test_a_run_on_another_host_that_beats_is_alive_and_one_that_is_silent_is_dead(bucket):
    leave_claim_of_another_host(bucket)
    done = threading.Event()

    def beat():
        while not done.wait(0.1):
            leave_claim_of_another_host(bucket)

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(StorageError, match="pid 7 on elsewhere, since 2026-01-01 00:00:00 UTC"):
            Claim(bucket, silence=10.0)
    finally:
        done.set()
        beating.join()
    Claim(bucket, silence=0.3).close()


def test_a_silence_that_began_long_ago_is_not_waited_for(bucket, monkeypatch):
    from mod_jax.training.claim_places import InBucket

    leave_claim_of_another_host(bucket)
    monkeypatch.setattr(InBucket, "long_silence", -1.0)
    Claim(bucket, silence=1e6).close()


def test_of_two_that_take_a_claim_at_once_one_gets_it(bucket):
    leave_claim_of_another_host(bucket, ended="2026-01-01 00:01:00 UTC")
    start, results = threading.Barrier(4), []

    def take():
        start.wait()
        try:
            results.append(Claim(bucket, beat=0.2, silence=60.0))
        except StorageError as error:
            results.append(str(error))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [result for result in results if isinstance(result, Claim)]
    assert sum("another run is using this workdir" in result for result in results if isinstance(result, str)) == 3
    winner.check()
    winner.close()


def test_it_beats_and_a_run_that_lost_its_workdir_writes_no_more(bucket):
    held = Claim(bucket, beat=0.05)
    first = buckets.blob(bucket / "claim.json")
    first.reload()
    while True:
        now = buckets.blob(bucket / "claim.json")
        now.reload()
        if now.generation != first.generation:
            break
    held.check()
    leave_claim_of_another_host(bucket)
    with pytest.raises(StorageError, match=r"while this run stood still, pid 7 on elsewhere, .* took this workdir"):
        held.check()
    held.close()
    assert written(bucket / "claim.json")["pid"] == 7


# Steps.


def state(seed: int) -> dict:
    return {"params": {"w": jax.random.normal(jax.random.key(seed), (64, 16))}, "step": jnp.int32(seed)}


ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))


@pytest.fixture
def steps(bucket):
    """A folder with good steps 1 and 2."""
    with Checkpointer(bucket / "checkpoints") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step), {"seen": step})
    return bucket / "checkpoints"


def damage(folder, step=2):
    sizes = {name: size for name, size in buckets.sizes(folder / str(step)).items() if "params/ocdbt" in name}
    path = folder / str(step) / max(sizes, key=sizes.get)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def assert_restored(restored, step):
    assert (restored.step, restored.metadata) == (step, {"seen": step})
    for mine, theirs in zip(jax.tree.leaves(restored.state), jax.tree.leaves(state(step)), strict=True):
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()


def test_a_damaged_newest_step_is_set_aside_and_the_one_before_is_used(steps, caplog):
    before = buckets.sizes(steps / "2")
    damage(steps)
    with Checkpointer(steps) as checkpointer:
        assert_restored(checkpointer.restore(ABSTRACT), 1)
        assert checkpointer.all_steps() == [1]
        assert buckets.sizes(steps / "quarantine" / "2-damaged") == before
        assert "CHECKPOINT step 2 IS DAMAGED, step 1 is used" in caplog.text
        checkpointer.save(2, state(2), {"seen": 2})
        assert_restored(checkpointer.restore(ABSTRACT), 2)
    damage(steps)
    with Checkpointer(steps) as checkpointer:
        assert_restored(checkpointer.restore(ABSTRACT), 1)
    assert buckets.sizes(steps / "quarantine" / "2-damaged-again")


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", ["copying", "marking", "removing"])
def test_setting_aside_that_a_kill_interrupts_loses_nothing(steps, monkeypatch, moment):
    before = buckets.sizes(steps / "2")
    damage(steps)
    copy, remove, calls = fsspec.filesystem("gcs").copy, buckets.remove, []

    class Interrupted:
        """The file system, until the kill."""

        def __getattr__(self, name):
            return getattr(fsspec.filesystem("gcs", finalize_on_close=True), name)

        def copy(self, sources, targets):
            calls.append(sources)
            if moment == "copying" or (moment == "marking" and len(calls) == 2):
                half = len(sources) // 2
                copy(sources[:half], targets[:half])
                raise Killed
            copy(sources, targets)

    def remove_half(path, mark):
        if moment == "removing":
            (path / mark).unlink()
            raise Killed
        remove(path, mark)

    with monkeypatch.context() as patch:
        patch.setattr(buckets, "_file_system", Interrupted)
        patch.setattr(buckets, "remove", remove_half)
        with Checkpointer(steps) as checkpointer, pytest.raises(Killed):
            checkpointer.restore(ABSTRACT)

    with Checkpointer(steps) as checkpointer:
        assert checkpointer.all_steps() == ([1] if moment == "removing" else [1, 2])
        assert_restored(checkpointer.restore(ABSTRACT), 1)
        assert checkpointer.all_steps() == [1]
    assert buckets.sizes(steps / "quarantine") == {f"2-damaged/{name}": size for name, size in before.items()}
    assert not buckets.sizes(steps / "2")


def test_a_step_that_was_not_finished_is_no_step_and_is_removed(steps):
    (steps / "2" / MARK).unlink()
    with Checkpointer(steps, read_only=True) as checkpointer:
        assert_restored(checkpointer.restore(ABSTRACT), 1)
    assert buckets.sizes(steps / "2")
    with Checkpointer(steps) as checkpointer:
        assert checkpointer.all_steps() == [1]
    assert not buckets.sizes(steps / "2")


def test_old_steps_are_deleted_whole(bucket):
    with Checkpointer(bucket / "checkpoints", keep=1) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step), {"seen": step})
        assert checkpointer.all_steps() == [3]
    assert {name.split("/")[0] for name in buckets.sizes(bucket / "checkpoints")} == {"3"}


# Rows, plots, tokenizers.


def test_rows_go_up_whole_and_none_is_lost_or_repeated(bucket):
    path = bucket / "metrics.jsonl"
    writer = MetricWriter(bucket)
    writer.write(1, {"train/loss": 2.5})
    writer.flush()
    writer.write(2, {"train/loss": 2.25})
    assert [row["step"] for row in read_metrics(path)] == [1]  # as a kill would leave it
    writer.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    with contextlib.closing(MetricWriter(bucket, resumed_at=1)) as writer:
        writer.write(2, {"train/loss": float("nan")})
        writer.write(3, {"train/loss": 2.0})
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert np.isnan(rows[1]["train/loss"])


def test_rows_go_up_now_and_then(bucket, monkeypatch):
    monkeypatch.setattr("mod_jax.training.rows.UPLOAD_EVERY", 0.0)
    with contextlib.closing(MetricWriter(bucket)) as writer:
        writer.write(1, {"train/loss": 2.5})
        assert [row["step"] for row in read_metrics(bucket / "metrics.jsonl")] == [1]


def test_rows_that_are_not_there_are_a_named_error(bucket):
    with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot be read \("):
        read_metrics(bucket / "metrics.jsonl")


def test_plots_and_tokenizers(bucket):
    plots.save(plots.loss_curves([{"step": 1, "train/loss": 1.0}]), bucket / "report" / "loss.png")
    assert (bucket / "report" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert tokenizers.load(bucket / "tokenizer") is None
    made = tokenizers.make("bpe:260", [b"some text, some more text"])
    tokenizers.save(tokenizers.make("bpe:258", [b"text text text"]), bucket / "tokenizer")
    tokenizers.save(made, bucket / "tokenizer")
    assert tokenizers.load(bucket / "tokenizer").digest == made.digest
    assert len(buckets.sizes(bucket / "tokenizer")) == 2


# Whole runs.


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_killed_and_resumed_in_a_bucket_is_bit_for_bit_a_local_one(bucket, tmp_path, processes):
    harness.train(tmp_path / "local", processes=processes)
    address = str(bucket)
    with Run(tmp_path / "killed", processes=processes, address=address) as run:
        run.wait_for(lambda: (bucket / "checkpoints" / "5" / MARK).exists())
        run.send(signal.SIGKILL)
        run.end()
    assert not (bucket / "result.json").exists()
    end = harness.train(tmp_path / "resumed", processes=processes, address=address)
    assert re.search(rf"^RESUMED step (5|10) of 14 from {address}/checkpoints$", end.output(), re.MULTILINE)
    harness.assert_same_run(emulator.download(bucket, tmp_path / "copy"), tmp_path / "local")
    assert not list((tmp_path).glob("**/gs:*"))

    # The copy is a run of its own, and so is a preempted one in the bucket.
    sample = [sys.executable, "-m", "mod_jax.sample", f"--workdir={tmp_path / 'copy'}", "--prompt=ab"]
    subprocess.run([*sample, "--max_new_tokens=2"], cwd=harness.ROOT, check=True, capture_output=True, timeout=300)


@pytest.mark.slow
def test_a_preempted_run_ends_with_the_code_that_was_asked_for(bucket, tmp_path):
    changes = {"train.steps": 100_000, "train.save_every": 0}
    with Run(tmp_path / "run", changes, address=str(bucket), flags=["--preempted_exit_code=42"]) as run:
        run.wait_for(harness.STEPPING)
        run.send(signal.SIGTERM)
        assert run.end() == [42]
        assert run.reached("^PREEMPTED at step")
    (step,) = [name for name in buckets.sizes(bucket / "checkpoints") if re.fullmatch(rf"\d+/{MARK}", name)]
    assert written(bucket / "claim.json").keys() >= {"ended"}
    assert f"{step.split('/')[0]}," in (bucket / "metrics.jsonl").read_text()
