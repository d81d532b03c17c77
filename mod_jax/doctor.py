"""Is this machine fit to train on? python -m mod_jax.doctor [--workdir=runs/mod]

One line per check, each with ok, WARN or FAIL: versions, devices, memory, disk, folders, data, clock, and a tiny model
that is trained, saved, restored and compared bit for bit. Paste all of it into a bug report: of the environment it
shows nothing but the variables that steer JAX and mod_jax.

Exit codes: 0 no check failed; 1 one did.
"""

import contextlib
import io
import os
import pathlib
import platform
import shutil
import tempfile
import time
from collections.abc import Callable

from absl import app, flags, logging

from mod_jax import buckets, cli
from mod_jax.errors import ModJaxError

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run, there or not yet, whose disk is checked too.")

OK, WARN, FAIL = "ok", "WARN", "FAIL"
Finding = tuple[str, str]  # one of the three, and the line
VARIABLES = ("JAX_PLATFORMS", "JAX_ENABLE_X64", "JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS", "MOD_JAX_CACHE")
LITTLE_MEMORY, LITTLE_DISK, NO_DISK = 2 * 2**30, 5 * 2**30, 2**28  # bytes


def main(argv: list[str]) -> int:
    cli.refuse_arguments(argv)
    failed = []

    def run() -> None:
        logging.set_verbosity(logging.ERROR)
        for name, check in checks(WORKDIR.value):
            level, text = examine(check)
            print(f"{level:<5} {name:<9} {text}", flush=True)
            if level == FAIL:
                failed.append(name)
        print(f"FAILED: {', '.join(failed)}" if failed else "no check failed", flush=True)

    return cli.exit_code(run) or bool(failed)


def checks(workdir: str | None) -> list[tuple[str, Callable[[], Finding]]]:
    """Every check with its name, in the order of the report."""
    found = [
        ("versions", check_versions),
        ("settings", check_settings),
        ("devices", check_devices),
        ("memory", check_memory),
        ("cache", lambda: check_folder(cache_folder())),
        ("data", check_data),
    ]
    if workdir is not None:
        from mod_jax import paths

        found.append(("workdir", lambda: check_folder(paths.folder_to_write("--workdir", workdir))))
    return [*found, ("clock", check_clock), ("training", check_training)]


def examine(check: Callable[[], Finding]) -> Finding:
    """What a check finds; whatever it raises is a finding too."""
    try:
        return check()
    except Exception as error:
        kind = "" if isinstance(error, ModJaxError) else f"{type(error).__name__}: "
        return FAIL, " ".join(f"{kind}{error}".split())[:400]


def check_versions() -> Finding:
    from mod_jax import versions

    found = versions.installed()
    text = ", ".join(f"{name} {version}" for name, version in found.items()) + f"; {platform.platform()}"
    return (FAIL if "missing" in found.values() else OK), text


def check_settings() -> Finding:
    """The variables that steer JAX and mod_jax, and no other: the environment holds secrets."""
    found = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    return OK, ", ".join(found) or f"none of {', '.join(VARIABLES)} is set"


def check_devices() -> Finding:
    import jax

    devices = jax.devices()
    kinds = sorted({device.device_kind for device in devices})
    stats = devices[0].memory_stats() or {}
    memory = f", {_gib(stats['bytes_limit'])} each" if "bytes_limit" in stats else ""
    return OK, f"{len(devices)} x {', '.join(kinds)} ({devices[0].platform}){memory}; {os.cpu_count()} CPU cores"


def check_memory() -> Finding:
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return OK, "unknown: this system has no /proc/meminfo"
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    total, free = sizes["MemTotal"], sizes["MemAvailable"]
    return (WARN if free < LITTLE_MEMORY else OK), f"{_gib(free)} of {_gib(total)} available"


def cache_folder() -> pathlib.Path:
    from mod_jax.config import DataConfig
    from mod_jax.data.cache import cache_root

    return cache_root(DataConfig())


def check_folder(folder: pathlib.Path) -> Finding:
    """That a file can be written, read back and renamed there, on the disk that has room and keeps time."""
    if buckets.is_bucket(folder):
        return OK, f"{folder} can be listed, and objects written and deleted there"  # which `folder_to_write` has tried
    there = next(path for path in (folder, *folder.parents) if path.exists())
    probe = there / f".mod_jax_doctor.{os.getpid()}"
    try:
        probe.write_bytes(b"written")
        skew = probe.stat().st_mtime - time.time()
        renamed = probe.replace(probe.with_suffix(".renamed"))
        read = renamed.read_bytes()
        renamed.unlink()
    finally:
        probe.unlink(missing_ok=True)
    free = shutil.disk_usage(there).free
    text = f"{folder} can be written{'' if there == folder else f' (made in {there})'}, {_gib(free)} free"
    if read != b"written" or free < NO_DISK:
        return FAIL, text
    if abs(skew) > 60:
        return WARN, f"{text}; its clock is {skew:+.0f} s from this machine's"
    return (WARN if free < LITTLE_DISK else OK), text


def check_data() -> Finding:
    folders = sorted(path.parent for path in cache_folder().glob("*/meta.json"))
    size = sum(file.stat().st_size for folder in folders for file in folder.iterdir() if file.is_file())
    return OK, f"{len(folders)} prepared corpora, {_gib(size)}: {', '.join(folder.name for folder in folders) or '-'}"


def check_clock() -> Finding:
    """A clock before the newest of our own files, or one that jumps, makes nonsense of times in logs."""
    newest = max(path.stat().st_mtime for path in pathlib.Path(__file__).parent.rglob("*.py"))
    wall, steady = time.time(), time.monotonic()
    time.sleep(0.2)
    drift = (time.time() - wall) - (time.monotonic() - steady)
    text = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(wall))
    if wall < newest - 60:
        return WARN, f"{text} lies before the last change of this source"
    return (OK, text) if abs(drift) < 0.1 else (WARN, f"{text}; it moved by {drift:+.2f} s in 0.2 s")


def check_training() -> Finding:
    """Two steps of a tiny model, a save, a restore: the same bits, and the same bits again after a third step."""
    import jax

    from mod_jax.config import make_config
    from mod_jax.training import loop, prepare
    from mod_jax.training.checkpoint import Checkpointer

    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mod_jax_doctor-") as folder, contextlib.redirect_stdout(io.StringIO()):
        config = make_config(**TINY, **{"data.cache_dir": folder, "train.batch_size": max(8, jax.device_count())})
        run = prepare.prepare_run(config, pathlib.Path(folder) / "run")
        with jax.set_mesh(run.mesh), Checkpointer(run.workdir / "checkpoints", keep=1) as checkpointer:
            state = loop.fresh_state(run)
            train_step, batches = loop.compile_step(run), loop.open_batches(run, 0)
            for _ in range(2):
                state, metrics = train_step(state, loop.put_batch(run, next(batches)))
            checkpointer.save(2, state, {})
            checkpointer.wait()
            restored = checkpointer.restore(run.abstract_state).state
            differing = different_leaves(state, restored)
            batch = loop.put_batch(run, next(batches))
            after = train_step(state, batch)[0], train_step(restored, batch)[0]  # donates both
            differing += different_leaves(*after)
            loss = float(metrics["train/loss"])
    if differing:
        return FAIL, f"{len(differing)} arrays are not what was saved or go on differently, {differing[0]} for example"
    return OK, f"trained, saved, restored bit for bit in {time.perf_counter() - start:.1f} s, loss {loss:.4f}"


TINY = {
    "model.width": 16,
    "model.depth": 2,
    "model.num_heads": 2,
    "model.scan": False,
    "data.source": "synthetic",
    "data.seq_len": 16,
    "train.steps": 3,
}


def different_leaves(one, other) -> list[str]:
    """Names of the arrays of two pytrees that differ in any bit."""
    import jax
    import numpy as np

    pairs = zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True)
    return [jax.tree_util.keystr(path) for (path, a), b in pairs if np.asarray(a).tobytes() != np.asarray(b).tobytes()]


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
