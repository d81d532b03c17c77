"""The TFDS builder over the standard library."""

import pathlib
import subprocess
import sys
import sysconfig

import pytest

from mod_jax.config import DataConfig
from mod_jax.data import sources
from mod_jax.errors import DataError

PREPARE = """
import sys
from mod_jax.config import DataConfig
from mod_jax.data.batches import train_batches
from mod_jax.data.corpus import prepare_corpus
corpus = prepare_corpus(DataConfig(cache_dir=sys.argv[1]))
next(train_batches(corpus, seq_len=64, batch_size=2, seed=0))
print(corpus.digest)
"""


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    source = sources.load(DataConfig(), tmp_path_factory.mktemp("cache"))
    return {split: list(source.documents(split)) for split in sources.SPLITS}


def test_it_is_the_interpreters_own_code_in_path_order(documents):
    stdlib = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for split, split_documents in documents.items():
        names = [name for name, _ in split_documents]
        assert names == sorted(names)
        assert [sources.held_out(name) for name in names] == [split == "validation"] * len(names)
        for name, text in split_documents:
            assert text == (stdlib / name).read_bytes().replace(b"\r\n", b"\n")
    names = {name for split_documents in documents.values() for name, _ in split_documents}
    assert {"dataclasses.py", "json/decoder.py"} <= names
    assert not any(set(pathlib.Path(name).parts) & set(sources.STDLIB_EXCLUDED) for name in names)
    assert sum(len(text) for text in dict(documents["train"]).values()) > 5e6


def test_a_second_read_builds_nothing(documents, tmp_path, monkeypatch):
    from mod_jax.data import python_stdlib

    first = list(sources.load(DataConfig(), tmp_path).documents("validation"))
    monkeypatch.setattr(python_stdlib.PythonStdlib, "_generate_examples", None)
    assert list(sources.load(DataConfig(), tmp_path).documents("validation")) == first == documents["validation"]


def test_line_ends_become_lf_and_the_text_is_the_identity(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    for i in range(200):
        path = tmp_path / "lib" / f"module{i}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x = %d\r\n" % i)
    for folder in ("test", "site-packages/numpy", "encodings"):
        (tmp_path / "lib" / folder).mkdir(parents=True)
        (tmp_path / "lib" / folder / "skipped.py").write_text("skipped")
    first = sources.load(DataConfig(), tmp_path)
    assert dict(sources.stdlib_documents()) == {f"module{i}.py": b"x = %d\n" % i for i in range(200)}
    (tmp_path / "lib" / "module0.py").write_bytes(b"x = 9\r\n")  # the same size
    assert sources.load(DataConfig(), tmp_path).identity != first.identity
    (tmp_path / "lib" / "module0.py").unlink()
    with pytest.raises(DataError, match=r"has 199 \.py files, need 200 .* text:PATH"):
        sources.load(DataConfig(), tmp_path)


def test_processes_prepare_at_once_without_tensorflow(tmp_path):
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise SystemExit('tensorflow was imported')")
    script = tmp_path / "prepare.py"  # its folder comes first on the path, so that tensorflow is the one above
    script.write_text(PREPARE)
    command = [sys.executable, str(script), str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], printed
    assert printed[0][0] == printed[1][0]
    assert len(printed[0][0].split()) == 1  # the digest: no progress bars, no announcements
    assert [err for _, err in printed] == ["", ""]
    assert len(list((tmp_path / "cache").iterdir())) == 2  # the TFDS folder, the corpus; nothing half-made


def test_the_tensorflow_trap_above_can_spring(tmp_path):
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise SystemExit('tensorflow was imported')")
    script = tmp_path / "touch.py"
    script.write_text("from tensorflow_datasets.core.utils.lazy_imports_utils import tensorflow as tf\ntf.io\n")
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert result.returncode != 0
    assert "tensorflow was imported" in result.stderr
