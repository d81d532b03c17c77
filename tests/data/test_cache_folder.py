"""The cache: one line where it cannot be written, and nothing left behind that blocks or fills it."""

import errno
import os
import pathlib
import pwd
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
from texts import write_texts

from mod_jax.config import DataConfig
from mod_jax.data import cache
from mod_jax.data.corpus import prepare_corpus
from mod_jax.errors import DataError

ROOT = pathlib.Path(__file__).resolve().parents[2]

PREPARE = """
import sys
from mod_jax.config import DataConfig
from mod_jax.data.corpus import prepare_corpus
try:
    print(prepare_corpus(DataConfig(source=sys.argv[1], cache_dir=sys.argv[2])).digest)
except Exception as error:
    print(type(error).__name__, error)
"""


def start_preparing(source, directory, **options):
    command = [sys.executable, "-c", PREPARE, source, str(directory)]
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, **options)


def test_without_a_home_the_variable_is_named(monkeypatch):
    def unknown(uid):
        raise KeyError(uid)

    for name in ("HOME", "MOD_JAX_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(DataError, match="no home folder for the cache is known here; set MOD_JAX_CACHE"):
        cache.cache_root(DataConfig())


def test_a_cache_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot write to the cache .*file \(File exists\); set MOD_JAX_CACHE"):
        cache.cache_root(DataConfig(cache_dir=str(tmp_path / "file")))


def test_a_read_only_cache_serves_what_it_has(tmp_path, monkeypatch):
    keys = dict(source="synthetic", cache_dir=str(tmp_path / "cache"))
    there = prepare_corpus(DataConfig(**keys))

    def refuse(path, *args, exist_ok=False, **kwargs):
        if not (exist_ok and path.is_dir()):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(pathlib.Path, "mkdir", refuse)  # root may write into a folder without permissions
    assert prepare_corpus(DataConfig(**keys)).digest == there.digest
    source = f"text:{ROOT / 'tests' / 'data'}"
    with pytest.raises(DataError, match=r"write to the cache .* \(Read-only file system\); set MOD_JAX_CACHE to"):
        prepare_corpus(DataConfig(**keys | dict(source=source)))


@pytest.mark.parametrize("source", ["synthetic", pytest.param("python_stdlib", marks=pytest.mark.slow)])
def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, source):
    """A limit on the size of files stands for the disk: what is written meets the same error of the system."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, 2**19))

    process = start_preparing(source, tmp_path / "cache", preexec_fn=limit)
    said, _ = process.communicate()
    assert said.startswith("DataError "), said
    assert "set MOD_JAX_CACHE to another folder" in said
    assert len(said.splitlines()) == 1
    assert list((tmp_path / "cache").iterdir()) == []
    again = start_preparing(source, tmp_path / "cache")
    assert len(again.communicate()[0].strip()) == 64


def test_two_processes_and_a_killed_one_prepare_one_corpus(tmp_path):
    folder = write_texts(
        tmp_path / "texts", train=[b"the cat sat on the mat " * 200_000] * 8, validation=[b"on the mat"]
    )
    source, directory = f"text:{folder}", tmp_path / "cache"
    killed = start_preparing(source, directory)
    while not any(directory.glob("*.*/train.npy")):  # in the middle of its work
        assert killed.poll() is None
        time.sleep(0.001)
    killed.kill()
    killed.wait()
    [left] = directory.iterdir()
    assert "." in left.name
    running = [start_preparing(source, directory) for _ in range(2)]
    digests = {process.communicate()[0].strip() for process in running}
    assert len(digests) == 1
    assert len(digests.pop()) == 64
    assert left.exists()  # it was too fresh to be told from one that starts
    long_ago = time.time() - 2 * cache.GRACE
    os.utime(left, (long_ago, long_ago))
    with cache.scratch_folder(directory / "other") as mine:
        assert not left.exists()
        os.utime(mine, (long_ago, long_ago))
        cache.remove_stale(directory)
        assert mine.exists()  # its process lives
    assert len(list(directory.iterdir())) == 1


def test_only_scratch_folders_are_ever_removed(tmp_path):
    names = ["corpus", "notes.txt", "a." + "0" * 31, "a." + "g" * 32, "a." + "0" * 32]
    for name in names:
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / ("file." + "0" * 32)).touch()
    (tmp_path / ("link." + "0" * 32)).symlink_to("corpus")
    cache.remove_stale(tmp_path)
    assert not (tmp_path / names[-1]).exists()
    assert len(list(tmp_path.iterdir())) == len(names) + 1


def test_a_cache_that_vanishes_is_made_again(tmp_path):
    first = prepare_corpus(DataConfig(source="synthetic", cache_dir=str(tmp_path / "cache")))
    shutil.rmtree(tmp_path / "cache")
    assert prepare_corpus(DataConfig(source="synthetic", cache_dir=str(tmp_path / "cache"))).digest == first.digest
