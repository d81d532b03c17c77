"""Round trips, exact byte counts, and refusals."""

import io
import sys

import numpy as np
import pytest

from mod_jax.data import tokenizers
from mod_jax.errors import ConfigError

EVERY_BYTE = bytes(range(256))
UNICODE = (
    "def f(x):\r\n\treturn 'naïve \N{SNOWMAN} 漢字 \N{ROCKET}'\0\x7f\N{COMBINING ACUTE ACCENT}  \n\n <separator> ▁"
)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    pytest.importorskip("tokenizers")
    directory = tmp_path_factory.mktemp("bpe")
    tokenizers.train_bpe("bpe:300", [b"the cat sat on the mat; the cat\n" * 20], directory)
    return tokenizers.load("bpe:300", directory)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    library = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "on the mat the cat sat"] * 20),
        model_writer=model,
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("sentencepiece") / "cat.model"
    path.write_bytes(model.getvalue())
    return tokenizers.load(f"sentencepiece:{path}", path.parent)


def test_bytes_are_shifted_by_one():
    tokenizer = tokenizers.ByteTokenizer()
    assert tokenizer.encode(b"\x00A\xff").tolist() == [1, 66, 256]  # 0 + 1, 65 + 1, 255 + 1
    assert tokenizer.encode("é").tolist() == [0xC3 + 1, 0xA9 + 1]
    assert (tokenizer.vocab_size, tokenizer.separator_id) == (257, 0)
    assert tokenizer.byte_lengths.tolist() == [0] + [1] * 256


def test_bytes_round_trip_any_bytes():
    tokenizer = tokenizers.ByteTokenizer()
    text = EVERY_BYTE + np.random.default_rng(0).bytes(1000)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bpe_alphabet_is_the_librarys():
    library = pytest.importorskip("tokenizers")
    assert sorted(tokenizers._byte_alphabet()) == sorted(library.pre_tokenizers.ByteLevel.alphabet())


def test_bpe_round_trips_unicode_and_merges(bpe):
    assert bpe.decode(bpe.encode(UNICODE)) == UNICODE.encode()
    assert bpe.decode(bpe.encode(UNICODE.encode())) == UNICODE.encode()
    assert bpe.encode("the cat").size == 2  # "the", " cat": 40 occurrences each
    assert 257 < bpe.vocab_size <= 300
    assert bpe.name == "bpe:300"


def test_bpe_training_is_deterministic(bpe, tmp_path):
    tokenizers.train_bpe("bpe:300", [b"the cat sat on the mat; the cat\n" * 20], tmp_path)
    again = tokenizers.load("bpe:300", tmp_path)
    assert again.encode(UNICODE).tolist() == bpe.encode(UNICODE).tolist()


def test_sentencepiece_round_trips_what_its_model_keeps(sentencepiece):
    text = "the  cat\n漢"  # two spaces; the last two characters by byte fallback
    assert sentencepiece.decode(sentencepiece.encode(text)) == text.encode()
    assert sentencepiece.encode("the cat").size < 7
    assert sentencepiece.encode(text).max() < sentencepiece.vocab_size


@pytest.mark.parametrize("name", ["bytes", "bpe", "sentencepiece"])
def test_byte_lengths_count_the_decoded_bytes(name, request):
    tokenizer = tokenizers.ByteTokenizer() if name == "bytes" else request.getfixturevalue(name)
    ids = tokenizer.encode("the cat sat, naïve \N{SNOWMAN}\n")
    assert ids.dtype == np.int32
    assert tokenizer.separator_id not in ids
    assert tokenizer.byte_lengths[ids].sum() == len("the cat sat, naïve \N{SNOWMAN}\n".encode())
    assert tokenizer.byte_lengths.shape == (tokenizer.vocab_size,)
    everything = range(tokenizer.vocab_size)
    assert tokenizer.byte_lengths.sum() == len(tokenizer.decode(everything))
    assert tokenizer.decode([tokenizer.separator_id]) == b""
    for unknown in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"token id {unknown} is outside"):
            tokenizer.decode([1, unknown])


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "byte",
        "bytes:",
        "bytes:3",
        "bpe",
        "bpe:",
        "bpe:256",
        "bpe:-1",
        "bpe:1e3",
        "bpe:²",
        "sentencepiece",
        "wordpiece:9",
    ],
)
def test_malformed_specs_are_refused(spec, tmp_path):
    with pytest.raises(ConfigError, match=r"config\.data\.tokenizer = .* must be bytes, bpe:VOCAB_SIZE"):
        tokenizers.load(spec, tmp_path)
    with pytest.raises(ConfigError, match=r"config\.data\.tokenizer"):
        tokenizers.identity(spec)


def test_missing_and_damaged_tokenizer_files_are_refused(tmp_path):
    pytest.importorskip("tokenizers")
    pytest.importorskip("sentencepiece")
    with pytest.raises(ConfigError, match="not trained yet"):
        tokenizers.load("bpe:300", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        tokenizers.load("bpe:300", tmp_path)
    with pytest.raises(ConfigError, match="is not a file"):
        tokenizers.load(f"sentencepiece:{tmp_path}/none.model", tmp_path)
    with pytest.raises(ConfigError, match="no SentencePiece model"):
        tokenizers.load(f"sentencepiece:{tmp_path}/tokenizer.json", tmp_path)


@pytest.mark.parametrize("kind", ["bpe:300", "sentencepiece:{tmp}/x.model"])
def test_a_missing_library_is_named_in_one_line(kind, tmp_path, monkeypatch):
    (tmp_path / "x.model").touch()
    library = "tokenizers" if kind.startswith("bpe") else "sentencepiece"
    monkeypatch.setitem(sys.modules, library, None)  # makes its import fail
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[(bpe|sentencepiece)\]'$"):
        tokenizers.identity(kind.format(tmp=tmp_path))
