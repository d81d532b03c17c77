"""Folders that a person names: what is refused before anything else happens."""

import importlib.util
import os
import pathlib

import pytest

from mod_jax import paths
from mod_jax.errors import ConfigError, StorageError


@pytest.mark.parametrize("url", ["gs://bucket/run", "s3://bucket/run", "hf-x+y://a", pathlib.Path("gs://bucket/run")])
def test_a_bucket_is_no_local_folder(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^--workdir = '(gs|s3|hf-x\+y):/.*: must be a folder of a file system"):
        paths.local_folder("--workdir", url)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("door", [paths.run_folder, paths.folder_to_read, paths.folder_to_write])
@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://bucket/run", "s3:// is not supported, since Orbax cannot write checkpoints there"),
        (pathlib.Path("s3://bucket/run"), "s3:// is not supported"),
        ("hf-x+y://a", "since nothing here knows such an address"),
        ("gs://", "must be gs://BUCKET/FOLDER"),
        ("gs://bucket", "must be gs://BUCKET/FOLDER"),
        ("gs://bucket//", "must be gs://BUCKET/FOLDER"),
        ("gs://Bucket_/run", "must be gs://BUCKET/FOLDER"),
        ("gs://bucket/../run", "must not contain"),
        ("gs://bucket/lr[3]", "must not contain"),
        ("gs://bucket/a#1", "must not contain"),
        ("gs://bucket/a\nb", "must not contain"),
    ],
)
def test_an_address_that_no_run_can_have_is_refused_in_one_line(url, why, door, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^--workdir = ") as refused:
        door("--workdir", url)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_in_a_bucket_keeps_its_address_however_it_is_written():
    for url in ("gs://bucket/a/run", "gs://bucket//a/run/", pathlib.Path("gs://bucket/a/run")):
        path = paths.run_folder("--workdir", url)
        assert str(path) == str(paths.as_folder(path)) == "gs://bucket/a/run"
        assert str(path / "checkpoints") == "gs://bucket/a/run/checkpoints"


def test_an_extra_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"gs://bucket/run.*pip install -e '\.\[gcs\]'"):
        paths.run_folder("--workdir", "gs://bucket/run")


@pytest.mark.parametrize(
    "text", ["", "  ", "a\nb", "a\0b", b"\xff", "~nobody-of-this-name/x", "a/" + "é" * 128, "a/" * 2500, None, 3]
)
def test_what_names_no_folder_is_refused(text):
    with pytest.raises(ConfigError, match=r"^--workdir = ") as refused:
        paths.local_folder("--workdir", text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["lr[1e-3]", "a*b", "a?b", "a\\b", "runs[1]/deeper"])
def test_a_path_that_orbax_would_take_for_a_pattern_is_refused_for_writing(name, tmp_path):
    with pytest.raises(ConfigError, match="must not contain"):
        paths.folder_to_write("--workdir", tmp_path / name)
    paths.local_folder("--workdir", tmp_path / name)


def test_home_and_relative_paths_are_resolved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert paths.local_folder("--workdir", "~/run") == tmp_path / "home" / "run"
    for odd in ("-run", "a:b", "{a,b}", "100%", "née ~", "x]", "a/../b"):
        assert paths.folder_to_write("--workdir", odd) == tmp_path / odd


def test_a_folder_that_cannot_be_written_is_refused_before_it_is_created(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(StorageError, match=r"cannot be written: .*(file is not a folder|Not a directory)"):
            paths.folder_to_write("--workdir", path)
    with pytest.raises(ConfigError, match="longer than a name may be, 255 bytes"):
        paths.folder_to_write("--workdir", tmp_path / ("x" * 300))
    assert paths.folder_to_write("--workdir", tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_no_permission_and_a_read_only_disk_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(StorageError, match=f"no permission in {tmp_path}, or a read-only file system"):
        paths.folder_to_write("--workdir", tmp_path / "run")


def test_an_error_while_writing_names_the_folder_and_the_cause(tmp_path):
    message = r"run: cannot be written: No such file or directory \(.*report\)"
    with pytest.raises(StorageError, match=message), paths.writing(tmp_path / "run"):
        os.mkdir(tmp_path / "run" / "report")
