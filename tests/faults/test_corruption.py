"""Whatever happens to the files of the newest checkpoint: it is named and set aside, and the one before is used.

A seed makes a case: a kind of damage, a file, a place in it. CI tries some; all of a thousand are tried by

    python tests/faults/test_corruption.py --cases=1000

which rewrites `corruption.json` beside this file. A case is *set aside* (step 2 named in one line of the log and moved,
step 1 used bit for bit), *harmless* (step 2 came back bit for bit: the file held nothing of it), or *wrong*.
"""

import argparse
import collections
import json
import logging as python_logging
import os
import pathlib
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from absl import logging
from harness import Run, assert_same_run, train

from mod_jax.errors import ModJaxError
from mod_jax.training.checkpoint import Checkpointer

# Orbax leaves futures of a failed read unawaited; pytest reports them from whichever test runs next.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

RESULT = pathlib.Path(__file__).with_name("corruption.json")
SECONDS = 120  # for one case; only a hang takes as long
MEMORY = 2**30  # bytes that all cases together may add to this process


class State(NamedTuple):
    step: jax.Array
    params: dict
    opt_state: dict
    cutoffs_L: jax.Array


def make_state(step: int) -> State:
    key = jax.random.key(step)
    params = {"embed": jax.random.normal(key, (64, 32)), "blocks": {"w": jax.random.normal(key, (4, 16, 16))}}
    return State(jnp.int32(step), params, {"mu": jax.tree.map(jnp.square, params)}, jnp.full(2, step, jnp.float32))


def prepare(directory: pathlib.Path) -> None:
    """Good steps 1 and 2."""
    with Checkpointer(directory) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, make_state(step), {"seen": step})


# Kinds of damage. Each takes a file of step 2 and a source of chance.


def flip_bits(path: pathlib.Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 2, 64))):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def truncate(path: pathlib.Path, chance: random.Random) -> None:
    os.truncate(path, chance.choice((0, chance.randrange(path.stat().st_size))))


def append(path: pathlib.Path, chance: random.Random) -> None:
    with path.open("ab") as file:
        file.write(chance.randbytes(chance.randrange(1, 4096)))


def replace_by_noise(path: pathlib.Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(path.stat().st_size))


def delete(path: pathlib.Path, chance: random.Random) -> None:
    path.unlink()


def delete_folder(path: pathlib.Path, chance: random.Random) -> None:
    folder = path.parent if path.parent != root(path) else root(path) / chance.choice(("params", "rest", "record"))
    shutil.rmtree(folder)  # were the whole step gone, nothing would be left to tell of it


def swap_with_older_step(path: pathlib.Path, chance: random.Random) -> None:
    """With the file at the same place in step 1; names of data files differ, so with one of that folder."""
    older = root(path).with_name("1") / path.relative_to(root(path)).parent
    shutil.copy(chance.choice(sorted(file for file in older.iterdir() if file.is_file())), path)


def swap_folder_with_older_step(path: pathlib.Path, chance: random.Random) -> None:
    name = chance.choice(("params", "rest", "record", "."))
    shutil.rmtree(root(path) / name)
    shutil.copytree(root(path).with_name("1") / name, root(path) / name)


def swap_two_files(path: pathlib.Path, chance: random.Random) -> None:
    other = chance.choice(files_of(root(path)))
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def link_elsewhere(path: pathlib.Path, chance: random.Random) -> None:
    """To the very file, moved out of the step: its content is right, its place is not."""
    moved = root(path).parent.with_name("moved")
    path.rename(moved)
    path.symlink_to(chance.choice((moved, "/dev/zero", "/proc/self/mem", path)))


def link_folder_elsewhere(path: pathlib.Path, chance: random.Random) -> None:
    moved = root(path).parent.with_name("moved")
    path.parent.rename(moved)
    path.parent.symlink_to(moved)


def make_pipe(path: pathlib.Path, chance: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def make_folder(path: pathlib.Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


def grow_absurdly(path: pathlib.Path, chance: random.Random) -> None:
    os.truncate(path, 2 ** chance.randrange(33, 42))  # no room is taken: the rest of the file is a hole


def claim_absurd_numbers(path: pathlib.Path, chance: random.Random) -> None:
    """In JSON files: every number times 10 ** 12."""
    text = path.read_bytes()
    if path.name not in ("_METADATA", "metadata", "process_0", "_sharding"):
        text, path = (root(path) / "record/metadata").read_bytes(), root(path) / "record/metadata"
    path.write_bytes(b"".join(bytes([c]) + (b"000000000000" if 48 < c < 58 else b"") for c in text))


def claim_absurd_shape(path: pathlib.Path, chance: random.Random) -> None:
    """In the header of an array, by the library itself, so that every checksum of the index is right."""
    item = f"{root(path)}/params/"
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": item}}).result()
    header = json.loads(store.read("params/embed/.zarray").result().value)
    header[chance.choice(("shape", "chunks"))][chance.randrange(2)] = chance.choice((10**14, 10**7, 0, -1, 2**70))
    store.write("params/embed/.zarray", json.dumps(header)).result()


def remove_piece(path: pathlib.Path, chance: random.Random) -> None:
    item = f"{root(path)}/params/"
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": item}}).result()
    store.write(chance.choice(("params/embed/0.0", "params/blocks/w/.zarray")), None).result()


def nest_deeply(path: pathlib.Path, chance: random.Random) -> None:
    (root(path) / "record/metadata").write_text("[" * 10**6)


def add_files(path: pathlib.Path, chance: random.Random) -> None:
    (path.parent / f"{chance.randrange(2**32):08x}").write_bytes(chance.randbytes(100))


def root(path: pathlib.Path) -> pathlib.Path:
    """The folder of the step that a file belongs to."""
    return next(parent for parent in path.parents if parent.parent.name == "checkpoints")


def files_of(step: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in step.rglob("*") if path.is_file() and path.stat().st_size)


KINDS: list[Callable[[pathlib.Path, random.Random], None]] = [
    flip_bits,
    truncate,
    append,
    replace_by_noise,
    delete,
    delete_folder,
    swap_with_older_step,
    swap_folder_with_older_step,
    swap_two_files,
    link_elsewhere,
    link_folder_elsewhere,
    make_pipe,
    make_folder,
    grow_absurdly,
    claim_absurd_numbers,
    claim_absurd_shape,
    remove_piece,
    nest_deeply,
    add_files,
]


def same_bits(state: Any, expected: Any) -> bool:
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True)
    return all(a.dtype == e.dtype and np.asarray(a).tobytes() == np.asarray(e).tobytes() for a, e in pairs)


class Heard(python_logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def try_case(seed: int, good: pathlib.Path) -> tuple[str, str]:
    """Damages a copy of `good`, restores, and returns the case in words and what became of it."""
    chance = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    with tempfile.TemporaryDirectory() as scratch:
        directory = shutil.copytree(good, pathlib.Path(scratch, "checkpoints"))
        (directory / "untouched").write_text("")
        path = chance.choice(files_of(directory / "2"))
        name = f"{seed}: {kind.__name__} {path.relative_to(directory / '2')}"
        kind(path, chance)
        heard = Heard()
        logging.get_absl_logger().addHandler(heard)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.alarm(SECONDS)
        try:
            return name, outcome(directory, heard)
        except KeyboardInterrupt:
            return name, "wrong: hangs"
        finally:
            signal.alarm(0)
            logging.get_absl_logger().removeHandler(heard)


def outcome(directory: pathlib.Path, heard: Heard) -> str:
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), make_state(0))
    try:
        with Checkpointer(directory) as checkpointer:
            restored = checkpointer.restore(wanted)
            left = checkpointer.all_steps()
    except ModJaxError as error:
        return f"wrong: refused by {type(error).__name__}: {error}"
    except Exception as error:
        return f"wrong: {type(error).__name__}: {error}"
    if restored.metadata != {"seen": restored.step} or not same_bits(restored.state, make_state(restored.step)):
        return f"wrong: step {restored.step} came back changed"
    if restored.step == 2:
        return "harmless" if left == [1, 2] else f"wrong: steps {left} are left"
    aside = os.path.lexists(directory / "quarantine" / "2-damaged")
    named = [line for line in heard.lines if "CHECKPOINT step 2 IS DAMAGED" in line and "\n" not in line]
    return "set aside" if aside and len(named) == 1 and left == [1] else f"wrong: {aside=} {named=} {left=}"


def memory() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def try_cases(seeds: range, directory: pathlib.Path) -> dict[str, str]:
    prepare(directory)
    before = memory()
    outcomes = dict(try_case(seed, directory) for seed in seeds)
    assert memory() - before < MEMORY, f"{(memory() - before) / 2**30:.1f} GiB of memory"
    return outcomes


def test_damage_is_named_and_set_aside_and_the_older_step_used(tmp_path):
    outcomes = try_cases(range(2 * len(KINDS)), tmp_path / "checkpoints")
    wrong = {case: what for case, what in outcomes.items() if what.startswith("wrong")}
    assert not wrong
    assert collections.Counter(outcomes.values())["set aside"] > len(KINDS)


def test_the_committed_result_is_that_of_these_kinds_and_has_none_wrong():
    result = json.loads(RESULT.read_text())
    assert result["cases"] >= 1000
    assert result["wrong"] == []
    assert set(result["kinds"]) == {kind.__name__ for kind in KINDS}


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip_bits, make_pipe])
def test_a_run_goes_on_from_the_step_before_a_damaged_one(tmp_path, damage):
    train(tmp_path / "undisturbed")
    workdir = tmp_path / "run"
    train(workdir)
    (workdir / "result.json").unlink()  # as if killed before the end: a finished run reads no step
    newest = workdir / "checkpoints" / "14"
    damage(max(newest.rglob("ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size), random.Random(0))
    with Run(workdir) as run:
        assert run.end() == [0]
    assert run.reached("CHECKPOINT step 14 IS DAMAGED, step 10 is used")
    assert run.reached("RESUMED step 10 of 14")
    assert (workdir / "checkpoints" / "quarantine" / "14-damaged").is_dir()
    assert_same_run(workdir, tmp_path / "undisturbed")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    logging.set_verbosity(logging.ERROR)
    seeds = range(arguments.first, arguments.first + arguments.cases)
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = try_cases(seeds, pathlib.Path(scratch, "checkpoints"))
    kinds = collections.defaultdict(collections.Counter)
    for case, what in outcomes.items():
        kinds[case.split()[1]][what.split(":")[0]] += 1
    wrong = [f"{case}: {what}" for case, what in outcomes.items() if what.startswith("wrong")]
    result = dict(cases=len(outcomes), wrong=wrong, kinds={kind.__name__: kinds[kind.__name__] for kind in KINDS})
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(RESULT.read_text())
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
