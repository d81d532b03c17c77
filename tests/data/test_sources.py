"""Every kind of source: what it yields, which split it goes to, and how bad input is refused."""

import gzip
import json
import os
import shutil
import socket
import time

import pytest

from mod_jax.config import DataConfig
from mod_jax.data import files, sources, tfds_files
from mod_jax.errors import ConfigError, DataError


def read(tmp_path, source, **keys):
    """Both splits of a source, as {split: {name: text}}."""
    loaded = sources.load(DataConfig(source=source, **keys), tmp_path / "cache")
    return {split: dict(loaded.documents(split)) for split in sources.SPLITS}


def identity(tmp_path, source):
    return sources.load(DataConfig(source=source), tmp_path / "cache").identity


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@pytest.fixture
def offline(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("touched the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("source", ["", "stdlib", "python_stdlib:3", "tfds", "tfds:", "text:", "jsonl:", "csv:a.csv"])
def test_unknown_sources_are_refused(tmp_path, source):
    with pytest.raises(ConfigError, match=r"config\.data\.source = .* must be python_stdlib, synthetic, tfds:NAME"):
        read(tmp_path, source)


def test_one_name_in_ten_is_held_out_by_its_hash():
    # md5("a") = 0cc175b9c0f1b6a831c399e269772661 is 7 modulo 10; md5("0") = cfcd208495d565ef66e7dff9f98764da is 0.
    assert not sources.held_out("a")
    assert sources.held_out("0")
    held = [name for name in map(str, range(1000)) if sources.held_out(name)]
    assert 70 < len(held) < 130


# text:PATH


def test_text_folder_holds_out_whole_files_by_name(tmp_path):
    names = [f"sub{i % 3}/{i:03d}.txt" for i in range(60)]
    folder = write(tmp_path / "texts", {name: name.encode() for name in names})
    split = read(tmp_path, f"text:{folder}")
    assert sorted([*split["train"], *split["validation"]]) == sorted(names)
    assert list(split["validation"]) == sorted(name for name in names if sources.held_out(name))
    assert all(text == name.encode() for documents in split.values() for name, text in documents.items())


def test_text_files_that_are_binary_hidden_or_empty_are_left_out(tmp_path, caplog):
    files = {"a.txt": b"one", "b.md": b"two", "c": "é".encode(), "x.png": b"\x89PNG\xff", "nul": b"a\0b", "empty": b""}
    folder = write(tmp_path / "texts", files | {".hidden": b"three", ".git/config": b"four"})
    split = read(tmp_path, f"text:{folder}")
    assert "skipped 3 of 6 files: 1 empty (first empty), 1 with NUL bytes" in caplog.text
    assert "1 not UTF-8 (first x.png)" in caplog.text
    assert split["train"] | split["validation"] == {"a.txt": b"one", "b.md": b"two", "c": "é".encode()}


def test_a_handful_of_files_still_gives_two_splits(tmp_path):
    for count in range(2, 8):
        folder = write(tmp_path / str(count), {f"{i}.txt": b"text" for i in range(count)})
        split = read(tmp_path, f"text:{folder}")
        assert split["train"]
        assert split["validation"]


def test_train_and_validation_folders_are_used(tmp_path):
    files = {f"train/{i}.txt": b"t" for i in range(30)} | {f"validation/{i}.txt": b"v" for i in range(30)}
    folder = write(tmp_path / "texts", files | {"README": b"neither"})
    split = read(tmp_path, f"text:{folder}")
    assert set(split["train"].values()) == {b"t"}
    assert set(split["validation"].values()) == {b"v"}
    assert len(split["train"]) == len(split["validation"]) == 30


def test_a_folder_without_readable_text_is_not_replaced_by_the_other(tmp_path):
    folder = write(tmp_path / "texts", {"train/a": b"\xff", "validation/a": b"only text here"})
    with pytest.raises(DataError, match=r"no text in split 'train'; of all files, 1 not UTF-8 \(first train/a\)"):
        read(tmp_path, f"text:{folder}")


def test_a_single_file_gives_its_last_tenth_for_validation(tmp_path):
    # 95 bytes: 95 * 9 // 10 = 85 for training. Byte 85 is inside the two-byte é at 84, so the cut moves on to 86.
    text = b"a" * 84 + "é".encode() + b"b" * 9
    folder = write(tmp_path, {"book.txt": text})
    assert read(tmp_path, f"text:{folder}/book.txt") == dict(
        train={"book.txt": text[:86]}, validation={"book.txt": b"b" * 9}
    )


def test_text_without_text_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no visible file below"):
        read(tmp_path, f"text:{tmp_path}/empty")
    with pytest.raises(DataError, match="does not exist"):
        read(tmp_path, f"text:{tmp_path}/nowhere")
    latin1 = "é".encode("latin1")
    write(tmp_path, {"latin1": latin1, "short": b"x", "nothing": b"", "all/a": latin1, "all/b": latin1, "all/c": b""})
    for path, cause in {
        "short": "no text in split 'train'",
        "nothing": r"none of 1 files is UTF-8 text: 1 empty \(first nothing\)",
        "latin1": r"none of 1 files is UTF-8 text: 1 not UTF-8 \(first latin1\)",
        "all": r"none of 3 files is UTF-8 text: 2 not UTF-8 \(first a\), 1 empty \(first c\); .* iconv",
    }.items():
        with pytest.raises(DataError, match=f"{path}: {cause}"):
            read(tmp_path, f"text:{tmp_path}/{path}")


@pytest.mark.parametrize("hashed", ["content", "times"])
def test_identity_follows_the_files(tmp_path, monkeypatch, hashed):
    if hashed == "times":
        monkeypatch.setattr(files, "HASHED_BYTES", 19)  # five files of four bytes are more
    folder = write(tmp_path / "texts", {f"{i}.txt": b"text" for i in range(5)})
    seen = [identity(tmp_path, f"text:{folder}")]
    assert identity(tmp_path, f"text:{folder}") == seen[0]
    before = (folder / "0.txt").stat()
    time.sleep(0.02)  # the clock of a file system has steps
    write(folder, {"0.txt": b"TEXT"})  # in place, of the same size, and with the time set back
    os.utime(folder / "0.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
    seen.append(identity(tmp_path, f"text:{folder}"))
    write(folder, {"0.txt": b"other"})
    seen.append(identity(tmp_path, f"text:{folder}"))
    (folder / "0.txt").rename(folder / "9.txt")
    seen.append(identity(tmp_path, f"text:{folder}"))
    assert len(set(seen)) == 4


def test_content_alone_is_the_identity_of_small_files(tmp_path):
    for place in ("here", "there"):
        write(tmp_path / place, {f"{i}.txt": b"text" for i in range(5)})
    assert identity(tmp_path, f"text:{tmp_path}/here") == identity(tmp_path, f"text:{tmp_path}/there")
    os.utime(tmp_path / "here" / "0.txt", ns=(0, 0))
    assert identity(tmp_path, f"text:{tmp_path}/here") == identity(tmp_path, f"text:{tmp_path}/there")


def test_links_to_folders_are_followed_and_each_folder_is_entered_once(tmp_path, caplog):
    write(tmp_path / "texts", {f"own/{i}.txt": b"own" for i in range(9)})
    write(tmp_path / "elsewhere", {f"{i}.txt": b"far" for i in range(9)})
    links = {
        "up": "..",
        "again": "own",
        "far": "../elsewhere",
        "self": "self",
        "gone": "nowhere",
        "file.txt": "own/0.txt",
    }
    for name, target in links.items():
        (tmp_path / "texts" / name).symlink_to(target)
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "texts")
    split = read(tmp_path, f"text:{tmp_path}/texts")
    found = split["train"] | split["validation"]
    assert sorted(found.values()) == [b"far"] * 9 + [b"own"] * 10  # a link to a file is a file
    assert "left out 2 broken links, pipes, sockets or devices, first gone" in caplog.text


# jsonl:PATH


def jsonl(texts, key="text"):
    return b"".join(json.dumps({"id": i, key: text}).encode() + b"\n" for i, text in enumerate(texts))


def test_jsonl_reads_plain_and_gzipped_files_by_line(tmp_path):
    folder = tmp_path / "lines"
    texts = [f"text {i} \N{SNOWMAN}" for i in range(50)]
    content = jsonl(texts, key="body")
    write(folder, {"a.jsonl": content + b"\n  \n", "b.jsonl.gz": gzip.compress(content), "notes.txt": b"not read"})
    split = read(tmp_path, f"jsonl:{folder}", text_key="body")
    everything = split["train"] | split["validation"]
    assert everything == {
        f"{file}:{i + 1}": text.encode() for file in ("a.jsonl", "b.jsonl.gz") for i, text in enumerate(texts)
    }
    assert all(sources.held_out(name) for name in split["validation"])
    assert not any(sources.held_out(name) for name in split["train"])


def test_jsonl_train_and_validation_folders_are_used(tmp_path):
    write(tmp_path / "lines", {"train/a.jsonl": jsonl(["t"] * 30), "validation/a.jsonl": jsonl(["v"] * 30)})
    split = read(tmp_path, f"jsonl:{tmp_path}/lines")
    assert [len(split[name]) for name in sources.SPLITS] == [30, 30]
    assert set(split["validation"].values()) == {b"v"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "unclosed', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'["text"]', ".*found a list"),
        (b'{"body": "x"}', r"no string under data.text_key = 'text'; found fields \['body'\]"),
        (b'{"text": 3}', "no string under"),
        (b'{"text": "\\ud800"}', "not Unicode text"),
    ],
)
def test_malformed_jsonl_names_file_and_line(tmp_path, line, message):
    # whichever split line 31 is in, reading both reaches it
    path = write(tmp_path, {"a.jsonl": jsonl(["fine"] * 30) + line}) / "a.jsonl"
    with pytest.raises(DataError, match=rf"{path}, line 31: {message}"):
        read(tmp_path, f"jsonl:{path}")


def test_unreadable_jsonl_is_refused(tmp_path):
    write(tmp_path, {"cut.jsonl.gz": gzip.compress(jsonl(["text"] * 1000))[:-20], "plain.jsonl.gz": b"{}"})
    for name in ("cut", "plain"):
        with pytest.raises(DataError, match=f"cannot read .*{name}.jsonl.gz"):
            read(tmp_path, f"jsonl:{tmp_path}/{name}.jsonl.gz")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"no \.jsonl or \.jsonl\.gz or .* file below"):
        read(tmp_path, f"jsonl:{tmp_path}/folder")


def test_jsonl_with_too_few_lines_to_hold_any_out_is_refused(tmp_path):
    name = next(name for name in map("{}.jsonl".format, range(99)) if not sources.held_out(f"{name}:1"))
    write(tmp_path, {name: jsonl(["only one"])})
    with pytest.raises(DataError, match="no text in split 'validation'; about one document in ten is held out"):
        read(tmp_path, f"jsonl:{tmp_path}/{name}")


# synthetic


def test_synthetic_is_fixed_and_has_the_structure_it_claims(tmp_path):
    split = read(tmp_path, "synthetic")
    assert split == read(tmp_path, "synthetic")
    assert len(split["train"]) + len(split["validation"]) == 1024
    assert all(len(text) == 32 * 64 for text in split["train"].values())  # lines * line_length
    lines = [line for text in split["train"].values() for line in text.decode().splitlines()]
    assert set("".join(lines)) == set("abcdefghijklmnop")
    successors = {}
    for line in lines:
        for i in range(2, len(line)):
            successors.setdefault(line[i - 2 : i], set()).add(line[i])
    assert max(map(len, successors.values())) == 4  # order 2, four successors each
    first, *rest = next(iter(split["train"].values())).decode().splitlines()
    repeats = sum(line == before for line, before in zip(rest, [first, *rest], strict=False))
    assert 3 <= repeats <= 17  # 31 * 0.3 = 9.3


# tfds:NAME


@pytest.mark.parametrize("name", ["c4/en", "lm1b", "tiny_shakespeare:1.0.0", "wikipedia/20230601.en:1.0.0"])
def test_tfds_with_nothing_on_disk_says_how_to_get_it_at_once(tmp_path, monkeypatch, offline, name):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    start = time.monotonic()
    with pytest.raises(DataError, match=rf"nothing prepared below .*builder\('{name}'.*download_and_prepare") as error:
        read(tmp_path, f"tfds:{name}")
    assert time.monotonic() - start < 5
    assert "\n" not in str(error.value)


def test_tfds_names_are_checked(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"config\.data\.source = 'tfds:\.\./etc'"):
        read(tmp_path, "tfds:../etc")
    monkeypatch.setenv("TFDS_DATA_DIR", "gs://bucket/data")
    with pytest.raises(ConfigError, match="TFDS_DATA_DIR = 'gs://bucket/data': must be a folder"):
        read(tmp_path, "tfds:lm1b")


@pytest.fixture(scope="module")
def stdlib_tfds(tmp_path_factory):
    """A TFDS data folder that holds one real dataset."""
    root = tmp_path_factory.mktemp("tfds")
    source = sources.load(DataConfig(), root)
    next(source.documents("train"))
    [data_dir] = root.iterdir()
    return data_dir


def test_tfds_reads_a_prepared_dataset(stdlib_tfds, tmp_path, monkeypatch, offline):
    monkeypatch.setenv("TFDS_DATA_DIR", str(stdlib_tfds))
    split = read(tmp_path, "tfds:python_stdlib")
    expected = {name: text for name, text in sources.stdlib_documents() if text}
    held = [text for name, text in expected.items() if sources.held_out(name)]
    assert list(split["validation"].values()) == held
    assert len(split["train"]) == len(expected) - len(held)
    with pytest.raises(DataError, match=r"no field data.text_key = 'body'; it has \['path', 'text'\]"):
        read(tmp_path, "tfds:python_stdlib", text_key="body")


def test_tfds_picks_versions_and_asks_for_a_config(stdlib_tfds, tmp_path, monkeypatch):
    shutil.copytree(stdlib_tfds / "python_stdlib", tmp_path / "python_stdlib")
    [config] = (path for path in (tmp_path / "python_stdlib").iterdir() if path.name != ".config")
    for version in ("1.2.0", "1.10.0"):
        shutil.copytree(config / "1.0.0", config / version)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    assert tfds_files.prepared_directory("python_stdlib") == config / "1.10.0"  # 10 > 2
    assert tfds_files.prepared_directory("python_stdlib:1.2.0") == config / "1.2.0"
    with pytest.raises(DataError, match="nothing prepared"):
        tfds_files.prepared_directory("python_stdlib:3.0.0")
    shutil.copytree(config, config.with_name("other"))
    with pytest.raises(DataError, match=r"several configs .* name one of \['cpython.*', 'other'\]"):
        tfds_files.prepared_directory("python_stdlib")
    assert tfds_files.prepared_directory("python_stdlib/other:1.0.0") == config.with_name("other") / "1.0.0"


def edit_info(stdlib_tfds, tmp_path, monkeypatch, edit):
    shutil.copytree(stdlib_tfds / "python_stdlib", tmp_path / "python_stdlib")
    [path] = (tmp_path / "python_stdlib").glob("**/dataset_info.json")
    info = json.loads(path.read_text())
    edit(info)
    path.write_text(json.dumps(info))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))


def test_tfds_without_validation_split_holds_out_by_index(stdlib_tfds, tmp_path, monkeypatch):
    edit_info(stdlib_tfds, tmp_path, monkeypatch, lambda info: info["splits"].pop())
    split = read(tmp_path, "tfds:python_stdlib")
    assert split["validation"]
    assert all(sources.held_out(name) for name in split["validation"])
    assert not split["train"].keys() & split["validation"].keys()


def test_tfds_in_a_format_that_needs_tensorflow_is_refused(stdlib_tfds, tmp_path, monkeypatch):
    edit_info(stdlib_tfds, tmp_path, monkeypatch, lambda info: info.update(fileFormat="tfrecord"))
    with pytest.raises(DataError, match=r"is not in the array_record format.*file_format='array_record'"):
        read(tmp_path, "tfds:python_stdlib")
