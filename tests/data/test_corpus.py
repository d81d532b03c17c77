"""A corpus is what its source says, whoever prepared it first, and a damaged one is made again."""

import io
import json

import numpy as np
import pytest
from texts import make_corpus

from mod_jax.config import DataConfig
from mod_jax.data import corpus as corpus_lib
from mod_jax.data import tokenizers
from mod_jax.data.corpus import describe_corpus, prepare_corpus
from mod_jax.data.shards import token_dtype
from mod_jax.errors import ConfigError, DataError

# Stage 1


def test_tokens_are_flat_with_a_separator_before_each_document(tmp_path):
    corpus = make_corpus(tmp_path, train=[b"ab", b"", b"c"], validation=[b"de", b"\n"])
    assert corpus.train_parts[0].all().tolist() == [0, 98, 99, 0, 100]  # a = 97, + 1; the empty document is left out
    assert corpus.validation_tokens.all().tolist() == [0, 101, 102, 0, 11]
    assert corpus.train_parts[0].all().dtype == np.uint16
    assert isinstance(corpus.train_parts[0].files[0].open(), np.memmap)
    assert corpus.validation_starts.tolist() == [0, 3]
    assert corpus.validation_names == ("validation/000.txt", "validation/001.txt")
    assert (corpus.num_train_documents, corpus.num_train_bytes, corpus.num_validation_bytes) == (2, 3, 3)
    described = describe_corpus(corpus)
    assert "\n" not in described
    assert "train 5 tokens (3 bytes, 2 documents)" in described
    assert corpus.digest[:12] in described


def test_a_big_vocabulary_gets_wider_tokens():
    tokenizer = tokenizers.ByteTokenizer()
    for vocab_size, dtype in ((2**16, np.uint16), (2**16 + 1, np.uint32)):  # the last id is 65535, then 65536
        tokenizer.vocab_size = vocab_size
        assert token_dtype(tokenizer) == dtype


def test_the_second_call_only_maps_the_files(tmp_path, monkeypatch):
    first = make_corpus(tmp_path)
    monkeypatch.setattr(corpus_lib, "_write", None)  # would be a TypeError
    second = make_corpus_again(tmp_path)
    assert (second.digest, second.directory) == (first.digest, first.directory)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.directory.name]  # no scratch left


def make_corpus_again(tmp_path, **keys):
    keys = dict(source=f"text:{tmp_path / 'texts'}", cache_dir=str(tmp_path / "cache")) | keys
    return prepare_corpus(DataConfig(**keys))


def test_any_change_of_input_is_another_corpus(tmp_path):
    pytest.importorskip("tokenizers")
    corpora = [make_corpus(tmp_path)]
    corpora.append(make_corpus(tmp_path, train=[b"Train"]))
    corpora.append(make_corpus(tmp_path, train=[b"Train"], validation=[b"Validation!"]))
    corpora.append(make_corpus_again(tmp_path, tokenizer="bpe:260"))
    corpora.append(make_corpus_again(tmp_path, tokenizer="bpe:261"))
    assert len({corpus.directory for corpus in corpora}) == 5
    assert len({corpus.digest for corpus in corpora[:4]}) == 4
    assert corpora[3].tokenizer.vocab_size == 260


def test_the_digest_is_of_the_tokens_alone(tmp_path):
    first = make_corpus(tmp_path / "one", train=[b"ab", b"c"], validation=[b"d"])
    same = make_corpus(tmp_path / "two", train=[b"ab", b"c"], validation=[b"d"])
    moved = make_corpus(tmp_path / "three", train=[b"ab"], validation=[b"c", b"d"])  # the same stream, cut elsewhere
    assert first.directory != same.directory
    assert first.digest == same.digest != moved.digest
    assert json.loads((first.directory / "meta.json").read_text())["digest"] == first.digest


def truncate(directory):
    path = directory / "train.npy"
    path.write_bytes(path.read_bytes()[:-4])


def shorten(directory):
    np.save(directory / "validation.npy", np.load(directory / "validation.npy")[:-1])


def widen(directory):
    np.save(directory / "train.npy", np.load(directory / "train.npy").astype(np.uint32))


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        shorten,
        widen,
        lambda directory: (directory / "meta.json").write_text("{"),
        lambda directory: (directory / "meta.json").write_text("[]"),
        lambda directory: (directory / "meta.json").unlink(),
        lambda directory: (directory / "validation.npy").unlink(),
        lambda directory: (directory / "validation_bytes.npy").unlink(),
        lambda directory: (directory / "tokenizer" / "tokenizer.json").write_text("{}"),
        lambda directory: (directory / "tokenizer" / "tokenizer.json").unlink(),
    ],
)
def test_a_damaged_cache_is_rebuilt(tmp_path, damage):
    pytest.importorskip("tokenizers")
    good = make_corpus(tmp_path, tokenizer="bpe:260")
    tokens = good.train_parts[0].all().tolist()
    damage(good.directory)
    assert corpus_lib._open(DataConfig(tokenizer="bpe:260"), good.directory) is None
    rebuilt = make_corpus_again(tmp_path, tokenizer="bpe:260")
    assert (rebuilt.directory, rebuilt.digest) == (good.directory, good.digest)
    assert rebuilt.train_parts[0].all().tolist() == tokens


def test_the_loser_of_a_race_takes_the_winners_corpus(tmp_path, monkeypatch):
    corpus = make_corpus(tmp_path)
    inode = (corpus.directory / "train.npy").stat().st_ino
    opened = []

    def blind_at_first(data, directory, real=corpus_lib._open):
        opened.append(directory)
        return None if len(opened) == 1 else real(data, directory)

    monkeypatch.setattr(corpus_lib, "_open", blind_at_first)
    assert make_corpus_again(tmp_path).digest == corpus.digest
    assert (corpus.directory / "train.npy").stat().st_ino == inode
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_cache_root_is_the_key_then_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("MOD_JAX_CACHE", str(tmp_path / "variable"))
    assert prepare_corpus(DataConfig(source="synthetic")).directory.parent == tmp_path / "variable"
    in_key = prepare_corpus(DataConfig(source="synthetic", cache_dir=str(tmp_path / "key")))
    assert in_key.directory.parent == tmp_path / "key"
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot write to the cache .*; set MOD_JAX_CACHE"):
        prepare_corpus(DataConfig(source="synthetic", cache_dir=str(tmp_path / "file" / "below")))


@pytest.mark.parametrize("bad_id", [-1, 257, 300])
def test_a_token_id_outside_the_vocabulary_never_enters_a_corpus(tmp_path, monkeypatch, bad_id):
    monkeypatch.setattr(tokenizers.ByteTokenizer, "encode", lambda self, text: np.array([5, bad_id], np.int32))
    message = rf"text:.*texts, split validation, document validation/000.txt: token id {bad_id} is outside .*\[0, 257\)"
    with pytest.raises(DataError, match=message):
        make_corpus(tmp_path)
    assert list((tmp_path / "cache").iterdir()) == []


def test_undecodable_text_is_named_by_a_tokenizer_that_needs_unicode(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(corpus_lib.sources, "why_not_text", lambda text: None)
    with pytest.raises(DataError, match=r"split validation, document validation/000.txt: bpe:260 needs UTF-8 text"):
        make_corpus(tmp_path, validation=[b"\xff"], tokenizer="bpe:260")


def test_misspelt_tokenizer_is_refused_before_the_source_is_read(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.data\.tokenizer"):
        prepare_corpus(DataConfig(source="text:/nowhere", tokenizer="word", cache_dir=str(tmp_path)))


def test_held_out_documents_that_stand_in_train_too_are_counted(tmp_path):
    validation = [b"one", b"one", b"two", b"three"]
    corpus = make_corpus(tmp_path, train=[b"one", b"one", b"two", b"four"], validation=validation)
    assert corpus.num_also_in_train == 3
    assert "4 documents, 3 of them also in train)" in describe_corpus(corpus)
    assert "also" not in describe_corpus(make_corpus(tmp_path / "apart"))


def test_a_tokenizer_that_alters_the_text_is_said_and_its_bytes_are_the_texts(tmp_path):
    library = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat"] * 20),
        model_writer=model,
        vocab_size=300,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "default.model").write_bytes(model.getvalue())
    validation = [b"the cat sat on the mat the cat sat on the mat", b"the cat\n sat", "on ﬁ".encode()]
    corpus = make_corpus(tmp_path, validation=validation, tokenizer=f"sentencepiece:{tmp_path}/default.model")
    assert np.add.reduceat(corpus.validation_bytes.all(), corpus.validation_starts).tolist() == list(
        map(len, validation)
    )
    assert (corpus.num_altered, corpus.num_checked) == (2, 3)  # not the first, though a space was put in front of it
    assert "the tokenizer alters 2 of 3 documents (normalisation)" in describe_corpus(corpus)
