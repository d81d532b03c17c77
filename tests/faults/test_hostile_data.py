"""Data from strange hands: preparing it ends in seconds, in a corpus or in one line that names the place."""

import gzip
import json
import os
import pathlib
import resource
import socket
import subprocess
import sys
import time

import pytest

from mod_jax.config import DataConfig
from mod_jax.data import files
from mod_jax.data.corpus import prepare_corpus
from mod_jax.errors import ConfigError, DataError

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECONDS = 10  # of computing, for what takes less than one
MEMORY = 300 * 2**20  # bytes that a case may add to the process's peak


@pytest.fixture(autouse=True)
def in_seconds_and_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("MOD_JAX_CACHE", str(tmp_path / "cache"))
    peak, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    assert time.process_time() - start < SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024 < MEMORY
    if (tmp_path / "cache").exists():
        assert all(path.suffix == "" for path in (tmp_path / "cache").iterdir()), "a scratch folder was left"


def refused(error, source, match, **keys):
    with pytest.raises(error, match=match) as caught:
        prepare_corpus(DataConfig(source=source, **keys))
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 1000
    assert caught.value.exit_code in (2, 5)


# JSONL

LINE = b'{"text": "fine"}\n'
BAD_LINES = {
    "invalid UTF-8": (b'{"text": "\xff\xfe"}', "not JSON: 'utf-8' codec can't decode"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16"), "not JSON"),
    "a NUL in the raw": (b'{"text": "a\0b"}', "not JSON: Invalid control character"),
    "only NULs": (b"\0" * 10_000, "not JSON"),
    "nested": (b"[" * 100_000, "nested too deeply|not JSON"),
    "nested in a value": (b'{"text": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, "nested too deeply"),
    "a number": (b"7", "no string under .*; found a int"),
    "a huge number": (b'{"text": ' + b"9" * 100_000 + b"}", "not JSON: Exceeds the limit"),
    "an infinity": (b'{"text": 1e999}', "no string under"),
    "null": (b'{"text": null}', "no string under"),
    "a list in the field": (b'{"text": ["a"]}', "no string under"),
    "another case of the key": (b'{"Text": "a"}', r"found fields \['Text'\]"),
    "a key that breaks the line": (b'{"a\\nb\\u2028": 1}', "found fields"),
    "a thousand keys": (json.dumps(dict.fromkeys(map(str, range(1000)))).encode(), "found fields"),
    "a lone surrogate": (b'{"text": "\\udc80"}', "not Unicode text"),
    "two documents in a line": (b'{"text": "a"} {"text": "b"}', "not JSON: Extra data"),
    "cut off": (b'{"text": "a', "not JSON: (Unterminated string|Invalid control)"),
    "Python": (b"{'text': 'a'}", "not JSON"),
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_named_with_file_and_number(tmp_path, line):
    content, cause = BAD_LINES[line]
    (tmp_path / "a.jsonl").write_bytes(LINE * 30 + content + b"\n" + LINE)
    refused(DataError, f"jsonl:{tmp_path}/a.jsonl", rf"a\.jsonl, line 31: .*({cause})")


def test_lines_that_are_strange_and_right(tmp_path):
    strange = [
        b'\xef\xbb\xbf{"text": "after a byte order mark"}',
        b'{"text": "first", "text": "of a field that is there twice, the last counts"}',
        b'{"text": "a \\u0000 and a \\ud83d\\ude80", "n": NaN, "m": -0.0, "big": 1e400}',
        b"",
        b"  \t ",
        b'{"text": ""}',
        b'{"text": "' + b"x" * 10_000_000 + b'"}',
        b'{"text": "dos"}\r',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*strange, *[LINE.strip()] * 30]))
    corpus = prepare_corpus(DataConfig(source=f"jsonl:{tmp_path}/a.jsonl"))
    assert corpus.num_train_documents + len(corpus.validation_names) == 30 + len(strange) - 3
    assert corpus.num_train_bytes + corpus.num_validation_bytes > 10_000_000


def test_a_line_without_end_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE", 2**20)
    with gzip.open(tmp_path / "bomb.jsonl.gz", "wb") as file:
        for _ in range(100):
            file.write(b" " * 2**20)
    assert (tmp_path / "bomb.jsonl.gz").stat().st_size < 2**20
    refused(DataError, f"jsonl:{tmp_path}/bomb.jsonl.gz", "line 1: longer than 1,048,576 bytes")


# Places


def test_what_is_no_file_is_never_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(tmp_path)  # the path of a socket must be short
        listener.bind("socket")
        for name in ("pipe", "device", "socket"):
            for kind in ("text", "jsonl"):
                refused(DataError, f"{kind}:{tmp_path}/{name}", f"{name} is a pipe, socket or device")
            (tmp_path / f"{name}.jsonl").symlink_to(name)
            pytest.importorskip("sentencepiece")
            refused(ConfigError, "synthetic", f"{name} is not a file", tokenizer=f"sentencepiece:{tmp_path}/{name}")
        refused(DataError, f"jsonl:{tmp_path}", "no .jsonl or .jsonl.gz or .* file below")
        refused(DataError, f"text:{tmp_path}", "no visible file below")


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_places_that_cannot_be(tmp_path, kind):
    (tmp_path / "file").write_text("x")
    (tmp_path / "self").symlink_to("self")
    for path, cause in {
        "nowhere": "does not exist",
        "self": "cannot open .*symbolic links",
        "file/below": "cannot open .*Not a directory",
    }.items():
        refused(DataError, f"{kind}:{tmp_path}/{path}", cause)
    for path in ("gs://bucket/texts", "s3:/bucket", "a\0b", "a\nb", "a\udcffb", "~nobody-of-this-name/x", "n" * 300):
        refused(ConfigError, f"{kind}:{path}", "config.data.source = ")


def test_the_folder_of_a_cache_is_judged_like_any_other():
    for path in (
        "gs://bucket/cache",
        "hdfs:/x",
        "a\0b",
        "~nobody-of-this-name/x",
        "/proc/nothing",
        "/dev/null",
        "/dev/null/x",
    ):
        refused((ConfigError, DataError), "synthetic", "(config.data.cache_dir|MOD_JAX_CACHE)", cache_dir=path)


def test_names_that_are_no_text(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    names = [
        b"a\nb.txt",
        b"\xff\xfe.txt",
        b"%2e%2e%2fetc%2fpasswd",
        b"\xe2\x80\xae.txt",
        b"-rf",
        b"$(touch x)",
        b"a" * 255,
    ]
    for name in names:
        (folder / os.fsdecode(name)).write_text("fine")
    corpus = prepare_corpus(DataConfig(source=f"text:{folder}"))
    assert corpus.num_train_documents + len(corpus.validation_names) == len(names)
    again = prepare_corpus(DataConfig(source=f"text:{folder}"))
    assert again.validation_names == corpus.validation_names
    for name in names:
        (folder / os.fsdecode(name)).write_bytes(b"\xff")
    refused(DataError, f"text:{folder}", "none of 7 files is UTF-8 text")
    for name in names:
        (folder / os.fsdecode(name)).rename(folder / (os.fsdecode(name)[:200] + ".jsonl"))
    refused(DataError, f"jsonl:{folder}", "line 1: not JSON")


NOT_PERMITTED = """
import os, sys
from mod_jax.config import DataConfig
from mod_jax.data import corpus
os.setuid(54321)
for source in sys.argv[1:]:
    try:
        corpus.sources.load(DataConfig(source=source), None)
        print("read")
    except corpus.DataError as error:
        print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_what_may_not_be_read_is_named(tmp_path):
    for folder in [tmp_path, *tmp_path.parents]:
        if folder != folder.parent and folder.stat().st_uid == os.getuid():
            folder.chmod(folder.stat().st_mode | 0o711)
    for name in ("closed/a.txt", "inside/closed/a.txt", "inside/open.txt", "unlisted/a.txt", "files/a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "closed").chmod(0)
    (tmp_path / "inside" / "closed").chmod(0)
    (tmp_path / "unlisted").chmod(0o444)  # its names can be listed, and nothing else
    (tmp_path / "files" / "a.txt").chmod(0)
    places = ["closed", "inside", "unlisted", "files", "closed/a.txt"]
    command = [sys.executable, "-c", NOT_PERMITTED, *(f"text:{tmp_path}/{place}" for place in places)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=str(ROOT)))
    lines = done.stdout.splitlines()
    assert len(lines) == len(places), done.stderr
    for line, place in zip(lines, places, strict=True):
        assert f"text:{tmp_path}/{place}: cannot " in line, line
        assert "Permission denied" in line, line


# TFDS


def prepared_dataset(tmp_path, monkeypatch, features, info=None):
    folder = tmp_path / "tfds" / "words" / "1.0.0"
    folder.mkdir(parents=True)
    (folder / "features.json").write_text(features)
    shard = {
        "name": "train",
        "shardLengths": ["3"],
        "numBytes": "9",
        "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
    }
    known = {"name": "words", "version": "1.0.0", "fileFormat": "array_record", "splits": [shard]}
    (folder / "dataset_info.json").write_text(json.dumps(known) if info is None else info)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    return folder


TEXT_FEATURES = json.dumps(
    {
        "pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict",
        "featuresDict": {
            "features": {"text": {"pythonClassName": "tensorflow_datasets.core.features.text_feature.Text", "text": {}}}
        },
    }
)


@pytest.mark.parametrize("info", ["", "[]", "{", "[" * 100_000, '{"splits": 3}', "\0", '{"name": "words"}'])
def test_a_damaged_description_of_a_dataset_is_named(tmp_path, monkeypatch, info):
    prepared_dataset(tmp_path, monkeypatch, TEXT_FEATURES, info)
    refused(DataError, "tfds:words", "tfds:words: ")


@pytest.mark.parametrize("features", ["", "[]", "{", "[" * 100_000, '{"pythonClassName": 7}', "\0"])
def test_damaged_features_of_a_dataset_are_named(tmp_path, monkeypatch, features):
    prepared_dataset(tmp_path, monkeypatch, features)
    refused(DataError, "tfds:words", "tfds:words: ")


def test_files_of_a_dataset_that_are_missing_or_something_else_are_named(tmp_path, monkeypatch):
    folder = prepared_dataset(tmp_path, monkeypatch, TEXT_FEATURES)
    refused(DataError, "tfds:words", "tfds:words: ")
    for content in (b"", b"no array of records", bytes(range(256)) * 1000):
        (folder / "words-train.array_record-00000-of-00001").write_bytes(content)
        refused(DataError, "tfds:words", "tfds:words: ")


@pytest.mark.parametrize("key", ["pythonClassName", "type"])
def test_a_dataset_cannot_import_a_module(tmp_path, monkeypatch, key):
    (tmp_path / "stranger.py").write_text("raise SystemExit('code of a data set was run')")
    monkeypatch.syspath_prepend(tmp_path)
    prepared_dataset(tmp_path, monkeypatch, json.dumps({"a": [{key: "stranger.Feature", "content": "{}"}]}))
    refused(DataError, "tfds:words", "names the class 'stranger.Feature', which is not of tensorflow_datasets")
    prepared_dataset(tmp_path / "b", monkeypatch, json.dumps({key: "stranger.Feature", "content": "{}"}))
    refused(DataError, "tfds:words", "names the class 'stranger.Feature'")


@pytest.mark.parametrize(
    "name", ["../..", "/etc", "words/..", "words/../../x", "a" * 300, "words:1", "words:1.0.0/..", "\0", "*"]
)
def test_names_of_datasets_lead_nowhere_else(tmp_path, monkeypatch, name):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    refused((ConfigError, DataError), f"tfds:{name}", "tfds:")


# The real command


@pytest.mark.slow
def test_the_command_ends_in_one_line_and_writes_nothing(tmp_path):
    (tmp_path / "latin1").mkdir()
    for i in range(3):
        (tmp_path / "latin1" / f"{i}.txt").write_bytes("naïve".encode("latin1"))
    cases = {
        f"data.source=text:{tmp_path}/latin1": (5, "none of 3 files is UTF-8 text: 3 not UTF-8"),
        "data.cache_dir=gs://bucket/cache": (2, "config.data.cache_dir = 'gs://bucket/cache': must be"),
    }
    command = [sys.executable, "-m", "mod_jax.train", "--config=configs/smoke.py", f"--workdir={tmp_path}/run"]
    options = dict(stderr=subprocess.PIPE, text=True, cwd=ROOT, env=dict(os.environ, PYTHONPATH=str(ROOT)))
    running = {key: subprocess.Popen([*command, f"--config.{key}"], **options) for key in cases}
    for key, (code, message) in cases.items():
        _, said = running[key].communicate()
        assert running[key].returncode == code, said
        [line] = said.splitlines()
        assert line.startswith("error: ")
        assert message in line
    assert not (tmp_path / "run").exists()
