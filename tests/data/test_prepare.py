"""Prepared corpora: one digest however they are made, the text that went in, and a stream that is exact at any step."""

import gzip
import itertools
import json
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from mod_jax import buckets
from mod_jax.config import make_config
from mod_jax.data import corpus as corpus_lib
from mod_jax.data import preparation, prepared, shards
from mod_jax.data.batches import eval_batches, eval_window_starts, train_batches
from mod_jax.data.corpus import describe_corpus, prepare_corpus
from mod_jax.data.inputs import find_inputs
from mod_jax.data.sources import held_out
from mod_jax.errors import ConfigError, DataError

ROOT = pathlib.Path(__file__).resolve().parents[2]
ONE_IN = 4


def texts_of(file: int, count: int = 12) -> list[str]:
    """Words of no pattern, so that a shard in the wrong place is seen."""
    rng = random.Random(file)
    return [f"{file} {i} " + "é" * rng.randrange(3) + "x" * rng.randrange(60) for i in range(count)]


def write_jsonl(folder: pathlib.Path, files: int = 3, pattern: str = "{:02d}.jsonl") -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file in range(files):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts_of(file))
        (folder / pattern.format(file)).write_text(lines)
    return folder


@pytest.fixture
def source(tmp_path):
    return f"jsonl:{write_jsonl(tmp_path / 'source')}"


def prepare(source, out, **options):
    return preparation.prepare(source, out, one_in=ONE_IN, **options)


def config(source, tmp_path, **changes):
    return make_config(**{"data.source": source, "data.cache_dir": str(tmp_path / "cache"), "train.steps": 1} | changes)


def opened(source, tmp_path, **changes):
    return prepare_corpus(config(source, tmp_path, **changes).data)


# What is written.


def test_the_tokens_are_those_of_the_documents_in_their_order(source, tmp_path):
    index = prepare(source, tmp_path / "out")
    corpus = opened(f"tokens:{tmp_path / 'out'}", tmp_path)
    named = {f"{file:02d}.jsonl:{i + 1}": text for file in range(3) for i, text in enumerate(texts_of(file))}
    expected = {"train": b"", "validation": b""}
    starts, sizes = [], []
    for name, text in named.items():
        split = "validation" if held_out(name, ONE_IN) else "train"
        if split == "validation":
            starts.append(sum(sizes))
            sizes.append(len(text.encode()) + 1)
        expected[split] += b"\xff" + text.encode()  # 0xff is in no UTF-8, so it can stand for the separator
    for split, numbers in (("train", corpus.train_parts[0]), ("validation", corpus.validation_tokens)):
        ids = numbers.all()
        assert bytes(0xFF if i == 0 else i - 1 for i in ids.tolist()) == expected[split]
    assert 0 < len(starts) < 36
    assert corpus.validation_starts.tolist() == starts
    assert corpus.validation_bytes.all().tolist() == (corpus.validation_tokens.all() > 0).astype(int).tolist()
    assert corpus.num_train_documents == 36 - len(starts)
    assert corpus.num_train_bytes == len(expected["train"].replace(b"\xff", b""))
    assert corpus.digest == index["digest"]
    assert "36" not in describe_corpus(corpus).split("validation")[1].split("documents")[0]


def test_every_way_gives_the_same_bytes(source, tmp_path, bucket):
    def files(out):
        return {path.name: path.read_bytes() for path in out.iterdir() if path.name != "tokenizer"}

    prepare(source, tmp_path / "one")
    prepare(source, tmp_path / "processes", processes=2)
    assert prepare(source, tmp_path / "hosts", mine=1, hosts=2) is None
    assert not (tmp_path / "hosts" / "index.json").exists()
    prepare(source, tmp_path / "hosts", mine=0, hosts=2)
    prepare(source, bucket)
    expected = files(tmp_path / "one")
    assert len([name for name in expected if name.endswith(".bin")]) == 12
    for out in (tmp_path / "processes", tmp_path / "hosts", bucket):
        assert files(out) == expected


def test_other_folders_of_the_same_files_give_the_same_corpus(tmp_path):
    digests = {
        prepare(f"jsonl:{write_jsonl(tmp_path / name)}", tmp_path / f"{name}-out")["digest"] for name in ("a", "b")
    }
    assert len(digests) == 1


def test_compressed_files_and_parquet_hold_the_same_documents(source, tmp_path):
    zstandard, pyarrow, parquet = (pytest.importorskip(name) for name in ("zstandard", "pyarrow", "pyarrow.parquet"))
    lines = [(tmp_path / "source" / f"{i:02d}.jsonl").read_bytes() for i in range(3)]

    for ending, compress in ((".json.gz", gzip.compress), (".jsonl.zst", zstandard.ZstdCompressor().compress)):
        folder = tmp_path / ending.strip(".")
        folder.mkdir()
        for i in range(3):
            (folder / f"{i:02d}{ending}").write_bytes(compress(lines[i]))
        found = find_inputs(f"jsonl:{folder}", "text")
        assert [[text for _, text in one.read("jsonl", "text")] for one in found] == [
            [text.encode() for text in texts_of(i)] for i in range(3)
        ]
        (folder / f"01{ending}").write_bytes(compress(lines[1])[:-20])
        with pytest.raises(DataError, match=rf"cannot read .*01{ending}"):
            list(found[1].read("jsonl", "text"))
    (tmp_path / "parquet").mkdir()
    for i in range(3):
        table = pyarrow.table({"text": [*texts_of(i), None], "other": range(13)})
        parquet.write_table(table, tmp_path / "parquet" / f"{i:02d}.parquet")
    found = find_inputs(f"parquet:{tmp_path / 'parquet'}", "text")
    assert [text for one in found for _, text in one.read("parquet", "text")] == [
        text.encode() for i in range(3) for text in texts_of(i)
    ]
    with pytest.raises(DataError, match=r"00\.parquet: no text in column data\.text_key = 'other'; it is int64"):
        list(found[0].read("parquet", "other"))


def test_names_of_files_may_say_the_split(tmp_path):
    folder = write_jsonl(tmp_path / "c4", 1, "c4-validation.{:05d}-of-00001.json")
    write_jsonl(folder, 2, "c4-train.{:05d}-of-00002.json")
    index = prepare(f"jsonl:{folder}", tmp_path / "out")
    assert [(shard["train"]["documents"], shard["validation"]["documents"]) for shard in index["shards"]] == [
        (0, 12),
        (12, 0),
        (12, 0),
    ]
    assert prepare(f"jsonl:{folder}", tmp_path / "first", first=2)["shards"] == index["shards"][:2]


def test_text_files_make_groups(tmp_path, monkeypatch):
    monkeypatch.setattr("mod_jax.data.inputs.GROUP_BYTES", 20)
    (tmp_path / "text").mkdir()
    for i in range(7):
        (tmp_path / "text" / f"{i}.txt").write_text("some text")
    (tmp_path / "text" / "empty.txt").write_text("")
    found = find_inputs(f"text:{tmp_path / 'text'}", "text")
    assert [len(one.files) for one in found] == [3, 3, 2]
    assert sum(len(list(one.read("text", "text"))) for one in found) == 7
    (tmp_path / "text" / "3.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"3\.txt is not UTF-8"):
        list(found[1].read("text", "text"))


def write_tfds(root: pathlib.Path, texts: dict[str, list[str]]) -> None:
    """A dataset `words` in the array_record format, in shards of four documents."""
    import tensorflow_datasets as tfds

    folder = root / "words" / "1.0.0"
    folder.mkdir(parents=True)
    info = tfds.core.DatasetInfo(
        builder=tfds.core.DatasetIdentity(name="words", version="1.0.0", data_dir=str(folder), module_name="words"),
        features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
    )
    writer = tfds.core.SequentialWriter(info, 4, file_format=tfds.core.FileFormat.ARRAY_RECORD)
    writer.initialize_splits(list(texts))
    writer.add_examples({split: [{"text": text} for text in found] for split, found in texts.items()})
    writer.close_all()


def test_a_tfds_dataset_is_prepared_by_shard(tmp_path, monkeypatch):
    """Ten documents in three shards and three in one; the same corpus from two hosts, the later shards first."""
    train, validation = texts_of(0, 10), texts_of(1, 3)
    write_tfds(tmp_path / "tfds", {"train": train, "validation": validation})
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    index = prepare("tfds:words", tmp_path / "out")
    documents = [(shard["train"]["documents"], shard["validation"]["documents"]) for shard in index["shards"]]
    assert documents == [(0, 3), (4, 0), (4, 0), (2, 0)]
    corpus = opened(f"tokens:{tmp_path / 'out'}", tmp_path)
    for tokens, texts in ((corpus.train_parts[0], train), (corpus.validation_tokens, validation)):
        expected = b"".join(b"\xff" + text.encode() for text in texts)
        assert bytes(0xFF if i == 0 else i - 1 for i in tokens.all().tolist()) == expected

    assert prepare("tfds:words", tmp_path / "hosts", mine=1, hosts=2) is None
    assert prepare("tfds:words", tmp_path / "hosts", mine=0, hosts=2)["digest"] == index["digest"]
    assert prepare("tfds:words", tmp_path / "first", first=2)["shards"] == index["shards"][:2]


def test_a_tfds_dataset_without_validation_holds_documents_out(tmp_path, monkeypatch):
    write_tfds(tmp_path / "tfds", {"train": texts_of(0, 10)})
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    index = prepare("tfds:words", tmp_path / "out")
    held = [held_out(f"train[{i}]", ONE_IN) for i in range(10)]
    assert [shard["validation"]["documents"] for shard in index["shards"]] == [
        sum(held[first : first + 4]) for first in (0, 4, 8)
    ]
    assert 0 < sum(held) < 10


def test_bpe_is_trained_once_and_lies_with_the_corpus(source, tmp_path):
    index = prepare(source, tmp_path / "out", tokenizer="bpe:300")
    corpus = opened(f"tokens:{tmp_path / 'out'}", tmp_path)
    assert corpus.tokenizer.name == index["tokenizer"] == "bpe:300"
    assert corpus_lib.known_vocab_size(config(f"tokens:{tmp_path / 'out'}", tmp_path).data) is None
    assert corpus.tokenizer.decode(corpus.validation_tokens.all()).decode().startswith("0 ")
    with pytest.raises(ConfigError, match=r"data\.tokenizer = 'bpe:400': .* was prepared with 'bpe:300'"):
        opened(f"tokens:{tmp_path / 'out'}", tmp_path, **{"data.tokenizer": "bpe:400"})


def test_a_model_file_may_lie_elsewhere_when_the_corpus_is_read(source, tmp_path):
    prepare(source, tmp_path / "out", tokenizer="bpe:300")
    index = shards.read_json(tmp_path / "out" / "index.json")
    as_if = index | {"tokenizer": "sentencepiece:/there/tokenizer.model"}
    (tmp_path / "out" / "index.json").write_text(json.dumps(as_if))
    spec = f"tokens:{tmp_path / 'out'}"
    assert opened(spec, tmp_path, **{"data.tokenizer": "sentencepiece:tokenizer.model"}).digest == index["digest"]
    with pytest.raises(ConfigError, match=r"data\.tokenizer = 'hf:x': .* was prepared with 'sentencepiece:"):
        opened(spec, tmp_path, **{"data.tokenizer": "hf:x"})


# Interrupted, continued, extended.


def test_finished_shards_are_not_written_again_and_damaged_ones_are(source, tmp_path):
    out = tmp_path / "out"
    index = prepare(source, out)
    expected = (out / "index.json").read_bytes()
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*-00*")}
    (out / index["shards"][1]["files"]["train"]).write_bytes(b"cut")
    (out / index["shards"][2]["files"]["starts"]).unlink()
    (out / "index.json").unlink()
    prepare(source, out)
    assert (out / "index.json").read_bytes() == expected
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*-00*")}
    assert {name.split("-")[1] for name in after if after[name] != before[name]} == {"00001", "00002"}


def test_more_inputs_may_follow(source, tmp_path):
    out = tmp_path / "out"
    first = prepare(source, out, first=2)
    begun = opened(f"tokens:{out}", tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*-0000[01]*")}
    whole = prepare(source, out)
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("*-0000[01]*")} == before
    assert whole["digest"] != first["digest"]
    assert opened(f"tokens:{out}", tmp_path, **{"data.shards": 2}).digest == begun.digest == first["digest"]
    assert opened(f"tokens:{out}", tmp_path).num_train_documents > begun.num_train_documents
    with pytest.raises(ConfigError, match=r"--first = 4: jsonl:.* has 3 inputs"):
        prepare(source, out, first=4)


def test_another_corpus_is_not_mixed_in(source, tmp_path):
    out = tmp_path / "out"
    prepare(source, out)
    with pytest.raises(ConfigError, match=r"--out = .*: holds another corpus: held_out 4; take another folder"):
        preparation.prepare(source, out, one_in=5)
    with pytest.raises(ConfigError, match=r"--tokenizer = 'bpe:300': .* was begun with bytes"):
        prepare(source, out, tokenizer="bpe:300")
    (tmp_path / "source" / "00.jsonl").write_text('{"text": "other"}\n')
    with pytest.raises(ConfigError, match="holds another corpus: other inputs"):
        prepare(source, out)


def test_status_needs_the_folder_alone(source, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"there is no plan\.json"):
        preparation.status(out)
    prepare(source, out, mine=1, hosts=2)
    done, missing = preparation.status(out)
    assert done.startswith("1 of 3 shards done, ")
    assert missing == "missing: 0, 2"
    prepare(source, out)
    done, index = preparation.status(out)
    assert done.startswith("3 of 3 shards done, 100.0%")
    assert index.startswith("index of 3 shards: train ")


def test_a_bad_line_names_its_place_also_from_another_process(source, tmp_path):
    (tmp_path / "source" / "02.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    for processes in (1, 2):
        with pytest.raises(DataError, match=r"02\.jsonl, line 2: no string under data\.text_key = 'text'"):
            prepare(source, tmp_path / f"out{processes}", processes=processes)


@pytest.mark.parametrize(
    ("source", "tokenizer", "message"),
    [
        ("zip:x", "bytes", "--source = 'zip:x': must be jsonl:PATH"),
        ("jsonl:", "bytes", "--source = 'jsonl:': must be jsonl:PATH"),
        ("jsonl:x", "words", "config.data.tokenizer = 'words'"),
    ],
)
def test_what_is_misspelt_is_refused_before_anything_is_written(tmp_path, source, tokenizer, message):
    with pytest.raises(ConfigError, match=message):
        prepare(source, tmp_path / "out", tokenizer=tokenizer)
    assert not (tmp_path / "out").exists()


def test_a_split_without_text_is_refused(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "alone"}\n')
    with pytest.raises(DataError, match="no text in split 'validation'; one document in 1000 is held out"):
        preparation.prepare(f"jsonl:{folder}", tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_any_moment_it_ends_with_the_same_bytes(tmp_path, seed):
    source = f"jsonl:{write_jsonl(tmp_path / 'source', 8)}"
    for path in (tmp_path / "source").iterdir():
        path.write_text(path.read_text() * 300)
    prepare(source, tmp_path / "whole")
    command = [sys.executable, "-m", "mod_jax.prepare", f"--source={source}", f"--out={tmp_path / 'out'}"]
    command += [f"--held_out={ONE_IN}"]
    rng = random.Random(seed)
    for life in itertools.count():
        several = [f"--processes={rng.choice([1, 2])}"]
        with subprocess.Popen([*command, *several], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert "shards," in process.stdout.readline()
            time.sleep(rng.uniform(0, 2.0))
            process.send_signal(signal.SIGKILL if life < 4 else signal.SIGCONT)
            process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
    for path in (tmp_path / "whole").glob("*.*"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


# Read.


def test_windows_across_files_are_those_of_one_file(source, tmp_path, bucket):
    prepare(source, tmp_path / "out")
    prepare(source, bucket)
    local, remote = (opened(f"tokens:{folder}", tmp_path) for folder in (tmp_path / "out", bucket))
    whole = local.train_parts[0].all()
    starts_B = np.arange(0, whole.size - 33, 7)
    expected = whole[starts_B[:, None] + np.arange(33)]
    assert np.array_equal(local.train_parts[0].windows(starts_B, 33), expected)
    assert np.array_equal(remote.train_parts[0].windows(starts_B, 33), expected)
    assert local.digest == remote.digest
    args = dict(seq_len=16, num_windows=20, batch_size=8)
    for mine, theirs in zip(eval_batches(local, **args), eval_batches(remote, **args), strict=True):
        assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


def test_a_prepared_corpus_gives_the_stream_of_the_same_tokens_unprepared(tmp_path):
    """Where the same documents are held out, the two ways differ in nothing."""
    folder = write_jsonl(tmp_path / "source", 1)
    preparation.prepare(f"jsonl:{folder}", tmp_path / "out", one_in=10)
    small, large = opened(f"jsonl:{folder}", tmp_path), opened(f"tokens:{tmp_path / 'out'}", tmp_path)
    args = dict(seq_len=8, batch_size=4, seed=3, start_step=2)
    for mine, theirs in itertools.islice(
        zip(train_batches(small, **args), train_batches(large, **args), strict=False), 9
    ):
        assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
    assert np.array_equal(eval_window_starts(small, 8, 6), eval_window_starts(large, 8, 6))


def test_a_mixture_has_exact_shares_at_any_step_and_repeats_nothing_before_an_epoch(tmp_path):
    for name, files in (("a", 3), ("b", 2)):
        prepare(f"jsonl:{write_jsonl(tmp_path / name, files)}", tmp_path / f"{name}-out")
    spec = f"tokens:{tmp_path / 'a-out'}@3,tokens:{tmp_path / 'b-out'}@1"
    corpus = opened(spec, tmp_path)
    assert corpus.shares == (0.75, 0.25)
    args = dict(seq_len=8, batch_size=4, seed=3)
    first_of_b = (corpus.train_parts[0].size - 1) // 8
    batches = list(itertools.islice(train_batches(corpus, **args), 40))
    ids = np.array([batch["example_ids_B"] for batch in batches])
    for step in range(1, 41):  # one row in four of every batch, at every step
        assert (ids[:step] >= first_of_b).sum() == step
    mine = ids[ids < first_of_b][:first_of_b]
    assert len(set(mine)) == len(mine)
    whole = {0: corpus.train_parts[0].all(), 1: corpus.train_parts[1].all()}
    for batch in batches:
        for tokens_T, i in zip(batch["tokens_BT"], batch["example_ids_B"], strict=True):
            part, chunk = (0, i) if i < first_of_b else (1, i - first_of_b)
            assert tokens_T.tolist() == whole[part][chunk * 8 : chunk * 8 + 8].tolist()
    resumed = next(train_batches(corpus, **args, start_step=30, rows=np.array([3, 1])))
    assert resumed["example_ids_B"].tolist() == ids[30][[3, 1]].tolist()
    assert opened(spec.replace("@3", "@2"), tmp_path).digest != corpus.digest
    prepare(f"jsonl:{tmp_path / 'a'}", tmp_path / "c-out", tokenizer="bpe:300")
    with pytest.raises(ConfigError, match="a mixture needs one"):
        opened(f"tokens:{tmp_path / 'a-out'},tokens:{tmp_path / 'c-out'}", tmp_path)


@pytest.mark.parametrize("text", ["tokens:", "tokens:x@0", "tokens:x@-1", "tokens:x@nan", "tokens:x@inf", "tokens:@1"])
def test_a_source_that_is_misspelt_is_refused(text, tmp_path):
    with pytest.raises(ConfigError, match=r"must be tokens:FOLDER, or tokens:FOLDER@WEIGHT"):
        opened(text, tmp_path)


def test_odd_names_of_folders(source, tmp_path):
    prepare(source, tmp_path / "a@b,c")
    assert opened(f"tokens:{tmp_path / 'a@b,c'}@1", tmp_path).num_train_documents
    parsed = list(prepared._parse("tokens:/a@b/c,tokens:gs://b/x@0.5"))
    assert parsed == [("/a@b/c", 1.0), ("gs://b/x", 0.5)]


def test_what_is_not_there_or_not_whole_is_named(source, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"out: holds no prepared corpus: there is no index\.json"):
        opened(f"tokens:{out}", tmp_path)
    prepare(source, out, mine=1, hosts=2)
    with pytest.raises(DataError, match=r"out: is not finished; see python -m mod_jax\.prepare --status --out=.*out"):
        opened(f"tokens:{out}", tmp_path)
    index = prepare(source, out)
    with pytest.raises(ConfigError, match=r"data\.shards = 4: .*out has 3"):
        opened(f"tokens:{out}", tmp_path, **{"data.shards": 4})
    with pytest.raises(ConfigError, match=r"data\.shards = 4: is for a source tokens:FOLDER, not 'synthetic'"):
        opened("synthetic", tmp_path, **{"data.shards": 4})

    def spoil(change):
        spoilt = json.loads(json.dumps(index))
        change(spoilt)
        (out / "index.json").write_text(json.dumps(spoilt))
        with pytest.raises(DataError) as refused:
            opened(f"tokens:{out}", tmp_path)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    assert "is damaged" in spoil(lambda index: index["shards"].pop())
    assert "is damaged" in spoil(lambda index: index.pop("dtype"))
    assert "is damaged" in spoil(lambda index: index.update(shards=3))
    assert "has format 9" in spoil(lambda index: index.update(format=9))
    assert "is not the tokenizer" in spoil(lambda index: index.update(tokenizer_digest="0"))
    outside = "../../etc/passwd"
    assert outside in spoil(lambda index: index["shards"][0]["files"].update(train=outside))
    (out / "index.json").write_text(json.dumps(index))
    name = index["shards"][0]["files"]["validation"]
    (out / name).write_bytes(b"")
    with pytest.raises(DataError, match=rf"{name} has 0 bytes, and should have"):
        opened(f"tokens:{out}", tmp_path)
    (out / name).unlink()
    with pytest.raises(DataError, match=rf"{name} is missing, and should have"):
        opened(f"tokens:{out}", tmp_path)


def test_a_source_too_large_for_train_is_refused_with_what_to_type(source, tmp_path, monkeypatch):
    small = opened(source, tmp_path)
    monkeypatch.setattr(corpus_lib, "LARGEST", 100)
    assert opened(source, tmp_path).digest == small.digest  # what lies in the cache is used
    with pytest.raises(DataError, match="train prepares no more than") as refused:
        opened(source, tmp_path, **{"data.tokenizer": "bpe:300"})
    command = str(refused.value).split("run: ")[1].split(";")[0]
    assert command == (f"python -m mod_jax.prepare --source={source} --tokenizer=bpe:300 --text_key=text --out=FOLDER")


def test_the_corpora_of_earlier_versions_keep_their_digest(tmp_path):
    assert opened("synthetic", tmp_path).digest[:12] == "768986c1532a"


def test_a_source_in_a_bucket(source, tmp_path, bucket):
    for path in (tmp_path / "source").iterdir():
        (bucket / "text" / path.name).write_bytes(path.read_bytes())
    expected = prepare(source, tmp_path / "out")
    assert prepare(f"jsonl:{bucket}/text", tmp_path / "from")["digest"] == expected["digest"]
    (one,) = find_inputs(f"jsonl:{bucket}/text/01.jsonl", "text")
    assert (one.name, one.size) == ("01.jsonl", buckets.sizes(bucket)["text/01.jsonl"])
    with pytest.raises(DataError, match=r"no \.parquet file below gs://"):
        find_inputs(f"parquet:{bucket}/text", "text")


def test_the_command_line(source, tmp_path):
    def run(*flags):
        command = [sys.executable, "-m", "mod_jax.prepare", f"--out={tmp_path / 'out'}", *flags]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)

    answer = run(f"--source={source}", "--shards=2/2")
    assert answer.returncode == 2
    assert "error: --shards = '2/2': must be I/N with 0 <= I < N" in answer.stderr
    assert not (tmp_path / "out").exists()
    answer = run(f"--source={source}", "--processes=1", f"--held_out={ONE_IN}")
    assert answer.returncode == 0, answer.stderr
    assert "PREPARED train " in answer.stdout
    assert "3 of 3 shards done" in run("--status").stdout


def test_shards_and_paths_are_as_documented():
    for name in ("plan.json", "index.json", "done-00007-KEY.json", "starts-00007-KEY.bin"):
        assert name in shards.__doc__
