"""Checkpoints under every kind of damage: what comes back is bit for bit what was saved, or an error says why."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint._src.serialization import ocdbt_utils

from mod_jax import paths
from mod_jax.errors import CheckpointMismatch, ResumeRefused, StorageError
from mod_jax.training import checkpoint, damage
from mod_jax.training.checkpoint import Checkpointer
from mod_jax.training.damage import read_record
from mod_jax.training.digest import compute_digests

# Orbax leaves futures of a failed read unawaited; pytest reports them from whichever test runs next.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

LOSS = "eval/topk_loss"


class State(NamedTuple):
    step: jax.Array
    params: dict
    opt_state: Any
    bad_steps: jax.Array


def make_state(seed: int, width: int = 16) -> State:
    key_in, key_out = jax.random.split(jax.random.key(seed))
    params = {"embed": jax.random.normal(key_in, (64, width)), "blocks": {"w": jax.random.normal(key_out, (8, width))}}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1.0, 0.0, 10)))
    _, opt_state = optimizer.update(params, optimizer.init(params), params)
    return State(jnp.int32(seed), params, opt_state, jnp.int32(0))


def abstract(tree, sharding=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), tree)


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)  # named tuples of the optimizer included
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        assert np.asarray(a).tobytes() == np.asarray(e).tobytes()


@pytest.fixture
def directory(tmp_path):
    """A directory with good steps 1 and 2."""
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, make_state(step), {"seen": step})
    return tmp_path / "checkpoints"


def data_file(directory, item="params", step=2):
    """The largest data file of an item."""
    return max((directory / str(step) / item).rglob("d/*"), key=lambda path: path.stat().st_size)


def flip_bit(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_round_trip_is_bitwise_and_typed(tmp_path):
    state = make_state(3)
    state.params["blocks"]["w"] = state.params["blocks"]["w"].at[0, :3].set(jnp.array([jnp.nan, -0.0, jnp.inf]))
    state.params["half"] = jnp.arange(5, dtype=jnp.bfloat16)
    state.params["mask"] = jnp.array([True, False])
    metadata = {"config": {"model.width": 16}, "corpus": "abc", "loss": 0.1}
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(abstract(state)) is None
        assert checkpointer.read_metadata() is None
        assert checkpointer.latest_step() is None
        checkpointer.save(7, state, metadata)
        restored = checkpointer.restore(abstract(state))
    assert (restored.step, restored.metadata) == (7, metadata)
    assert_same_bits(restored.state, state)
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore_params(abstract(state.params), step=7)
        assert checkpointer.read_metadata() == metadata
    assert_same_bits(restored.state, state.params)


def test_buffers_may_be_donated_once_save_returns(tmp_path):
    state, expected = make_state(1), make_state(1)
    clear = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), donate_argnums=0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, {})
        clear(state)
        assert_same_bits(checkpointer.restore(abstract(expected)).state, expected)


def test_parameters_alone_do_not_need_the_rest(directory):
    shutil.rmtree(directory / "2" / "rest")
    with Checkpointer(directory) as checkpointer:
        restored = checkpointer.restore_params(abstract(make_state(2).params))
    assert restored.step == 2
    assert_same_bits(restored.state, make_state(2).params)


DAMAGES = {
    "data file truncated": lambda d: truncate(data_file(d)),
    "data file emptied": lambda d: data_file(d).write_bytes(b""),
    "data file deleted": lambda d: data_file(d).unlink(),
    "one bit flipped in the parameters": lambda d: flip_bit(data_file(d), 4 * data_file(d).stat().st_size),
    "one bit flipped in the rest": lambda d: flip_bit(data_file(d, "rest"), 4 * data_file(d, "rest").stat().st_size),
    "manifest deleted": lambda d: (d / "2/params/manifest.ocdbt").unlink(),
    "item metadata truncated": lambda d: truncate(d / "2/params/_METADATA"),
    "parameters deleted": lambda d: shutil.rmtree(d / "2/params"),
    "rest deleted": lambda d: shutil.rmtree(d / "2/rest"),
    "record deleted": lambda d: shutil.rmtree(d / "2/record"),
    "record truncated": lambda d: truncate(d / "2/record/metadata"),
    "record emptied": lambda d: (d / "2/record/metadata").write_bytes(b""),
    "one bit flipped in the record": lambda d: flip_bit(d / "2/record/metadata", 8 * 21),
    "step folder emptied": lambda d: [shutil.rmtree(d / "2" / item) for item in ("params", "rest", "record")],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_step_is_quarantined_and_the_previous_one_used(directory, damage, caplog):
    DAMAGES[damage](directory)
    with Checkpointer(directory) as checkpointer:
        restored = checkpointer.restore(abstract(make_state(0)))
        assert checkpointer.all_steps() == [1]
    assert (restored.step, restored.metadata) == (1, {"seen": 1})
    assert_same_bits(restored.state, make_state(1))
    assert (directory / "quarantine" / "2-damaged").is_dir()
    (line,) = [record.getMessage() for record in caplog.records if "CHECKPOINT" in record.getMessage()]
    assert "step 2 IS DAMAGED" in line
    assert "\n" not in line


@pytest.mark.parametrize("file", ["_CHECKPOINT_METADATA", "commit_success.txt", "params/_sharding"])
@pytest.mark.parametrize("damage", [truncate, os.unlink])
def test_files_that_hold_nothing_we_need_may_be_damaged(directory, file, damage):
    damage(directory / "2" / file)
    with Checkpointer(directory) as checkpointer:
        restored = checkpointer.restore(abstract(make_state(0)))
    assert restored.step == 2
    assert_same_bits(restored.state, make_state(2))


def test_no_flipped_bit_gets_through(directory):
    """32 bits spread over a data file: each is refused, or turns out to hold nothing of the state."""
    path = data_file(directory)
    refused = 0
    with Checkpointer(directory, read_only=True) as checkpointer:
        for bit in np.linspace(0, 8 * path.stat().st_size - 1, 32, dtype=int).tolist():
            flip_bit(path, bit)
            try:
                assert_same_bits(checkpointer.restore(abstract(make_state(0)), step=2).state, make_state(2))
            except StorageError:
                refused += 1
            flip_bit(path, bit)
    assert refused > 16


def test_without_the_digests_a_flipped_bit_is_restored_in_silence(directory, monkeypatch):
    """The guard of the test above: it is the digest that refuses, and nothing else would."""
    flip_bit(data_file(directory), 4 * data_file(directory).stat().st_size)
    saved = {}
    monkeypatch.setattr(checkpoint, "compute_digests", lambda leaves: {path: saved[path] for path in leaves})
    with Checkpointer(directory, read_only=True) as checkpointer:
        saved |= {path: leaf["digest"] for path, leaf in read_record(directory / "2")["leaves"].items()}
        restored = checkpointer.restore(abstract(make_state(0)), step=2)
    pairs = zip(jax.tree.leaves(restored.state), jax.tree.leaves(make_state(2)), strict=True)
    assert sum(not np.array_equal(a, b) for a, b in pairs) == 1


def test_digest_by_hand():
    def mix(x):
        x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
        x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    # 1.0 = 0x3f800000, 2.0 = 0x40000000, -1.0 = 0xbf800000; the words add up to 0x13f000000, modulo 2 ** 32 0x3f000000.
    words = [0x3F800000, 0x40000000, 0xBF800000]
    mixed = sum(mix(word ^ mix(position)) for position, word in enumerate(words)) % 2**32
    digests = compute_digests({"row": jnp.array([1.0, 2.0, -1.0]), "column": jnp.array([[1.0], [2.0], [-1.0]])})
    assert digests == dict.fromkeys(("row", "column"), f"3f000000{mixed:08x}")


def test_digest_sees_swaps_and_single_bits_and_no_sharding():
    row = np.zeros(512, np.float32)
    row[0], row[256], row[257] = 1.0, 2.0, -1.0
    swapped = [row.copy(), row.copy()]
    swapped[0][[0, 256]] = row[[256, 0]]  # position-weighted sums would agree: (1.0 - 2.0) * 256 is 2 ** 23 * 2 ** 8
    swapped[1][[0, 257]] = row[[257, 0]]  # and here: the words differ by 2 ** 31
    flipped = [
        (row.view(np.uint32) ^ (np.arange(512) == 300) * np.uint32(1 << bit)).view(np.float32) for bit in range(32)
    ]
    digests = compute_digests({str(i): jnp.asarray(x) for i, x in enumerate([row, *swapped, *flipped])})
    assert len(set(digests.values())) == 35

    sharded = jax.device_put(row.reshape(16, 32), NamedSharding(mesh(8), PartitionSpec("data", "tensor")))
    assert compute_digests({"0": sharded}) == {"0": digests["0"]}


def mesh(count):
    shape = {8: (4, 2), 4: (2, 2), 2: (1, 2), 1: (1, 1)}[count]
    return Mesh(np.array(jax.devices()[:count]).reshape(shape), ("data", "tensor"))


def test_restores_onto_other_meshes(tmp_path):
    """8 -> 4 -> 2 -> 1 -> 8 devices."""

    def shard(tree, count):
        spec = lambda x: PartitionSpec("data", "tensor") if len(x.shape) == 2 else PartitionSpec()  # noqa: E731
        return jax.tree.map(lambda x: NamedSharding(mesh(count), spec(x)), tree)

    expected = make_state(1)
    state = jax.device_put(expected, shard(expected, 8))
    with Checkpointer(tmp_path) as checkpointer:
        for step, count in enumerate((4, 2, 1, 8)):
            checkpointer.save(step, state, {})
            shardings = shard(expected, count)
            wanted = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), expected, shardings)
            state = checkpointer.restore(wanted).state
            assert jax.tree.map(lambda x: x.sharding, state) == shardings
            assert_same_bits(state, expected)


def test_another_model_is_a_mismatch_and_no_damage(directory):
    wider = abstract(make_state(0, width=32))
    deeper = abstract(make_state(0))
    deeper.params["blocks"]["v"] = deeper.params["blocks"].pop("w")
    half = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding), abstract(make_state(0))
    )
    with Checkpointer(directory) as checkpointer:
        with pytest.raises(
            CheckpointMismatch, match=r"(?s)params/embed: float32\[64, 16\] -> float32\[64, 32\]\n.*more"
        ):
            checkpointer.restore(wider)
        with pytest.raises(CheckpointMismatch, match=r"params/blocks/v: absent -> float32\[8, 16\]"):
            checkpointer.restore(deeper)
        with pytest.raises(CheckpointMismatch, match=r"params/blocks/w: float32\[8, 16\] -> absent"):
            checkpointer.restore_params(deeper.params, step=2)
        with pytest.raises(CheckpointMismatch, match=r"params/embed: float32\[64, 16\] -> bfloat16\[64, 16\]"):
            checkpointer.restore(half)
        assert checkpointer.all_steps() == [1, 2]
    assert not (directory / "quarantine").exists()


def test_a_requested_step_is_found_or_refused(directory):
    wanted = abstract(make_state(0))
    with Checkpointer(directory) as checkpointer:
        assert checkpointer.restore(wanted, step=1).metadata == {"seen": 1}
        assert checkpointer.read_metadata(step=1) == {"seen": 1}
        for call in (lambda: checkpointer.restore(wanted, step=5), lambda: checkpointer.read_metadata(step=5)):
            with pytest.raises(StorageError, match=r"no step 5; available steps: \[1, 2\]"):
                call()
        truncate(data_file(directory))
        with pytest.raises(StorageError, match=r"step 2 is damaged: .*other steps: \[1\]"):
            checkpointer.restore(wanted, step=2)


def test_nothing_usable_is_never_a_fresh_start_and_moves_nothing(directory):
    """Were no step readable because the library changed, setting them aside would hide every good one."""
    wanted = abstract(make_state(0))
    for step in (1, 2):
        truncate(data_file(directory, step=step))
    with Checkpointer(directory) as checkpointer:
        for _ in range(2):
            with pytest.raises(StorageError, match=r"can be read, and none was moved. step 2: .*; step 1: "):
                checkpointer.restore(wanted)
        assert checkpointer.all_steps() == [1, 2]
        (directory / "quarantine").mkdir()
        for step in (1, 2):
            (directory / str(step)).rename(directory / "quarantine" / f"{step}-damaged")
        with pytest.raises(StorageError, match=r"all were set aside; see .*quarantine. To start afresh, use another"):
            checkpointer.restore(wanted)


def test_read_only_falls_back_and_moves_nothing(directory):
    (directory / "3.orbax-checkpoint-tmp").mkdir()
    truncate(data_file(directory))
    with Checkpointer(directory, read_only=True) as checkpointer:
        assert checkpointer.restore(abstract(make_state(0))).step == 1
        with pytest.raises(StorageError, match="read-only"):
            checkpointer.save(3, make_state(3), {})
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2", "3.orbax-checkpoint-tmp"]


def test_a_leaf_without_sharding_is_no_damage(directory):
    wanted = jax.eval_shape(lambda: make_state(0))
    with Checkpointer(directory) as checkpointer:
        with pytest.raises(ValueError, match="step must have a sharding"):
            checkpointer.restore(wanted)
        with pytest.raises(ValueError, match="blocks/w must have a sharding"):
            checkpointer.restore_params(wanted.params)
        assert checkpointer.all_steps() == [1, 2]


def test_an_exhausted_device_is_no_damage(directory, monkeypatch):
    def exhausted(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(checkpoint, "compute_digests", exhausted)
    with Checkpointer(directory) as checkpointer:
        with pytest.raises(jax.errors.JaxRuntimeError):
            checkpointer.restore(abstract(make_state(0)))
        assert checkpointer.all_steps() == [1, 2]


def test_keeps_the_newest_and_the_best(tmp_path):
    losses = {1: 0.1, 2: 0.2, 3: 0.9, 4: 0.8}
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step, loss in losses.items():
            checkpointer.save(step, make_state(step), {}, {LOSS: loss})
        assert (checkpointer.all_steps(), checkpointer.best_step()) == ([1, 3, 4], 1)
    with Checkpointer(tmp_path, keep=2) as checkpointer:  # a resumed run knows which is best
        checkpointer.save(5, make_state(5), {}, {LOSS: float("nan")})
        checkpointer.save(6, make_state(6), {})
        assert (checkpointer.all_steps(), checkpointer.best_step()) == ([1, 5, 6], 1)
        checkpointer.save(7, make_state(7), {}, {LOSS: 0.05})
        checkpointer.save(8, make_state(8), {}, {LOSS: 0.05})
        assert (checkpointer.all_steps(), checkpointer.best_step()) == ([7, 8], 8)  # the newest of equals
        with pytest.raises(ValueError, match=LOSS):
            checkpointer.save(9, make_state(9), {}, {"eval/loss": 0.1})


def test_saving_after_a_rollback_sets_newer_steps_aside(directory):
    with Checkpointer(directory, keep=3) as checkpointer:
        checkpointer.save(3, make_state(3), {}, {LOSS: 0.1})
        rolled_back = checkpointer.restore(abstract(make_state(0)), step=1).state
        checkpointer.save(2, rolled_back, {"history": "new"})
        assert (checkpointer.all_steps(), checkpointer.best_step()) == ([1, 2], None)
        restored = checkpointer.restore(abstract(make_state(0)))
        assert (restored.step, restored.metadata) == (2, {"history": "new"})
        assert_same_bits(restored.state, make_state(1))
        checkpointer.save(2, make_state(2), {})
    assert sorted(path.name for path in (directory / "quarantine").iterdir()) == [
        "2-superseded",
        "2-superseded-again",
        "3-superseded",
    ]


def test_a_failed_save_is_reported_by_the_next_call_and_leaves_the_previous_step(tmp_path):
    """A limit on the size of files stands in for a full disk."""
    big = State(jnp.int32(2), {"w": jax.random.normal(jax.random.key(0), (1024, 512))}, (), jnp.int32(0))  # 2 MB
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, make_state(1), {})
        checkpointer.wait()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
        try:
            checkpointer.save(2, big, {})
            with pytest.raises(StorageError, match=r"saving step 2 failed: .*File too large"):
                checkpointer.save(3, make_state(3), {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert checkpointer.all_steps() == [1]
        checkpointer.save(2, make_state(2), {})  # once the disk has room again
        assert checkpointer.all_steps() == [1, 2]


def test_a_save_killed_half_way_leaves_the_previous_step_and_is_cleaned_up(tmp_path):
    program = """
import os, signal, sys
import jax, jax.numpy as jnp
from mod_jax.training.checkpoint import Checkpointer
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, {"step": jnp.int32(1), "params": {"w": jnp.ones(4)}}, {})
checkpointer.wait()
checkpointer.save(2, {"step": jnp.int32(2), "params": {"w": jax.random.normal(jax.random.key(0), (2**24,))}}, {})
while "tmp" not in (names := " ".join(os.listdir(sys.argv[1]))):
    assert "2" not in names, "saved before it could be killed"
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert any("tmp" in path.name for path in tmp_path.iterdir())
    state = {"step": jnp.int32(1), "params": {"w": jnp.ones(4)}}
    with Checkpointer(tmp_path) as checkpointer:
        assert_same_bits(checkpointer.restore(abstract(state)).state, state)
        checkpointer.save(2, state, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_a_relative_directory_is_fixed_when_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Checkpointer("run/checkpoints") as checkpointer:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir("elsewhere")
        checkpointer.save(1, make_state(1), {})
    assert (tmp_path / "run" / "checkpoints" / "1").is_dir()


def test_storage_is_checked_at_the_door(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write checkpoints here: NotADirectoryError"):
        Checkpointer(tmp_path / "file" / "checkpoints")
    # float32: embed 64 * 16, w 8 * 16, and the two moments: 3 * 4 * (1024 + 128) = 13824 bytes.
    # int32: step, bad_steps, and the counts of Adam and of the schedule: 16 bytes.
    with Checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 13_839))
        with pytest.raises(StorageError, match="needs 13,840 bytes, 13,839 are free"):
            checkpointer.check_space(abstract(make_state(0)))
        with pytest.raises(StorageError, match="13,839 are free"):
            checkpointer.save(1, make_state(1), {})


def test_leaf_without_elements_survives_though_orbax_refuses_it(tmp_path):
    """A dense model has no routed block, so its cut-offs are an array of shape (0,)."""
    state = {"params": {"w": jnp.arange(3.0)}, "cutoffs_L": jnp.zeros(0)}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, {})
        restored = checkpointer.restore(abstract).state
    assert restored["cutoffs_L"].shape == (0,)
    np.testing.assert_array_equal(restored["params"]["w"], [0.0, 1.0, 2.0])


ERRNOS = (
    *(errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE),
    *(errno.ETIMEDOUT, errno.EROFS, errno.ENOTCONN, errno.EHOSTDOWN, errno.ENODEV, errno.ENXIO),
)


def errors_that_prove_nothing():
    for code in ERRNOS:
        yield OSError(code, os.strerror(code))
        wrapped = Exception("Encountered error while reading array index: (slice(0, 512, 1),)")  # by Orbax, of:
        wrapped.__cause__ = ValueError(f"UNKNOWN: Error reading: {os.strerror(code)} [os_error_code='{code}']")
        yield wrapped
    yield from (MemoryError(), ConnectionResetError("peer"), TimeoutError("server"))


def changed_library():
    yield from (AttributeError("restore"), TypeError("unexpected keyword"), ImportError("x"), NotImplementedError())


PLACES = {
    "listing of files": (damage, "check_files"),
    "record": (damage, "read_record"),
    "index of the arrays": (damage, "check_arrays"),
    "arrays": (ocp.StandardCheckpointHandler, "restore"),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_does_not_prove_damage_leaves_every_step_in_place(directory, monkeypatch, place):
    """The same error at every step, or at the newest alone while the older one could be read."""
    wanted = abstract(make_state(0))
    owner, name = PLACES[place]
    works = getattr(owner, name)

    def failing(error, times):
        def fail(*args, **kwargs):
            nonlocal times
            times -= 1
            if times >= 0:
                raise error
            return works(*args, **kwargs)

        return fail

    cases = [(error, times) for error in errors_that_prove_nothing() for times in (1, 1000)]
    cases += [(error, 1000) for error in changed_library()]
    with Checkpointer(directory) as checkpointer:
        for error, times in cases:
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, failing(error, times))
                with pytest.raises(StorageError) as raised:
                    checkpointer.restore(wanted)
            assert "\n" not in str(raised.value)
            assert str(directory) in str(raised.value)
        assert checkpointer.restore(wanted).step == 2
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2"]


def test_a_folder_that_is_gone_or_empty_while_a_run_uses_it(directory):
    with Checkpointer(directory) as checkpointer:
        directory.rename(directory.with_name("unmounted"))
        for call in (checkpointer.all_steps, lambda: checkpointer.restore(abstract(make_state(0)))):
            with pytest.raises(StorageError, match=f"{directory}: cannot be read: FileNotFoundError"):
                call()
        with pytest.raises(StorageError, match=f"{directory}: cannot be read"):
            checkpointer.save(3, make_state(3), {})
        directory.with_name("unmounted").rename(directory)
        assert checkpointer.restore(abstract(make_state(0))).step == 2


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_files_that_this_user_may_not_read_are_no_damage(directory):
    program = """
import os, sys
import jax, jax.numpy as jnp
from mod_jax.errors import StorageError
from mod_jax.training.checkpoint import Checkpointer
here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
os.setuid(65534)
try:
    with Checkpointer(sys.argv[1], read_only=True) as checkpointer:
        checkpointer.restore_fields(lambda metadata: {"step": jax.ShapeDtypeStruct((), jnp.int32, sharding=here)})
except StorageError as error:
    print(error)
"""
    for folder in (directory, *directory.parents[:4]):  # pytest keeps its folders to its user
        folder.chmod(0o755)
    (directory / "2/record/metadata").chmod(0)
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": ""}
    said = subprocess.run(
        [sys.executable, "-c", program, directory], capture_output=True, text=True, check=True, env=environment
    )
    assert "could not be read, and was left as it is: PermissionError" in said.stdout, said.stderr


def test_a_save_that_cannot_be_opened_is_an_error_and_older_steps_stay(tmp_path, monkeypatch):
    """Orbax merges the files of its processes by a pattern; where it finds none, it says nothing and writes nothing."""

    async def merge_nothing(*args, **kwargs):
        return None

    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, make_state(1), {})
        checkpointer.wait()
        with monkeypatch.context() as patch:
            patch.setattr(ocdbt_utils, "merge_ocdbt_per_process_files", merge_nothing)
            checkpointer.save(2, make_state(2), {})
            with pytest.raises(StorageError, match=r"step 2 was saved and cannot be read back: .*manifest.ocdbt"):
                checkpointer.wait()
        assert checkpointer.all_steps() == [1, 2]
        assert checkpointer.restore(abstract(make_state(0))).step == 1
        checkpointer.save(2, make_state(2), {})
        assert checkpointer.all_steps() == [2]


@pytest.mark.parametrize("name", ["{a,b}", "née ~", "a:b", "100%25", "x]", "#1 & more", "-x", "'\""])
def test_any_path_that_the_door_lets_in_can_be_saved_to(tmp_path, name):
    state = {"params": {"w": jnp.arange(3.0)}}
    with Checkpointer(paths.folder_to_write("--workdir", tmp_path / name)) as checkpointer:
        checkpointer.save(1, state, {})
        assert_same_bits(checkpointer.restore(abstract(state)).state, state)


def test_a_reader_takes_the_next_step_when_one_vanishes_while_it_is_read(directory, monkeypatch):
    """As beside a run that saves often and keeps one step: here the newest is replaced each time it is being read."""
    reads = []
    read_record = damage.read_record

    def vanishing(step):
        record = read_record(step)
        reads.append(int(step.name))
        if len(reads) <= 3:
            newer = step.with_name(str(int(step.name) + 1))
            shutil.copytree(step, newer)
            forged = record | {"step": int(newer.name)}
            checksum = damage.record_checksum(forged)
            (newer / damage.RECORD).write_text(json.dumps(forged | {"sha256": checksum}))
            shutil.rmtree(step)
        return read_record(step)

    shutil.rmtree(directory / "1")
    with Checkpointer(directory, read_only=True) as checkpointer, monkeypatch.context() as patch:
        patch.setattr(damage, "read_record", vanishing)
        restored = checkpointer.restore(abstract(make_state(0)))
    assert reads == [2, 3, 4, 5]
    assert restored.step == 5
    assert_same_bits(restored.state, make_state(2))


def test_metadata_and_arrays_are_of_one_step(directory):
    """The newest record is good, its arrays are not: what describes the arrays must come from the older step too."""
    truncate(data_file(directory))
    asked = []

    def wanted(metadata):
        asked.append(metadata)
        return {"params": abstract(make_state(0).params)}

    with Checkpointer(directory, read_only=True) as checkpointer:
        restored = checkpointer.restore_fields(wanted)
    assert asked == [{"seen": 2}, {"seen": 1}]
    assert (restored.step, restored.metadata) == (1, {"seen": 1})


def test_what_the_caller_refuses_is_the_caller_s_error(directory):
    def wanted(metadata):
        raise ResumeRefused("not this run")

    with Checkpointer(directory) as checkpointer:
        with pytest.raises(ResumeRefused):
            checkpointer.restore(wanted)
        assert checkpointer.all_steps() == [1, 2]


def test_the_worst_of_what_several_processes_met_decides_for_all(directory, monkeypatch):
    """One process meets a damaged shard, another a disk that is gone: nobody may take that for damage alone."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for other, expected in ((0, damage.DamageError), (1, damage.DamageError), (2, StorageError)):
        monkeypatch.setattr(multihost_utils, "process_allgather", lambda mine, other=other: np.array([mine, other]))

        def read():
            raise damage.DamageError("mine")

        with pytest.raises(expected):
            checkpoint._together(read, directory / "2")
        if other:
            with pytest.raises(expected, match="another process could not read it"):
                checkpoint._together(lambda: "good", directory / "2")
