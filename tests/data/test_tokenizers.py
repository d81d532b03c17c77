"""Round trips, exact byte counts, and refusals."""

import io
import sys

import numpy as np
import pytest

from mod_jax.data import byte_level, tokenizers
from mod_jax.errors import ConfigError, StorageError

EVERY_BYTE = bytes(range(256))
UNICODE = (
    "def f(x):\r\n\treturn 'naïve \N{SNOWMAN} 漢字 \N{ROCKET}'\0\x7f\N{COMBINING ACUTE ACCENT}  \n\n <separator> ▁"
)


@pytest.fixture(scope="module")
def bpe():
    pytest.importorskip("tokenizers")
    return tokenizers.make("bpe:300", [b"the cat sat on the mat; the cat\n" * 20])


def train_sentencepiece(**options) -> bytes:
    library = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "on the mat the cat sat"] * 20),
        model_writer=model,
        vocab_size=300,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def sentencepiece():
    faithful = dict(normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False)
    return tokenizers.SentencePieceTokenizer("sentencepiece:x", train_sentencepiece(byte_fallback=True, **faithful))


@pytest.fixture(scope="module")
def default_sentencepiece():
    """What SentencePiece trains if nobody says otherwise."""
    return tokenizers.SentencePieceTokenizer("sentencepiece:x", train_sentencepiece())


def test_bytes_are_shifted_by_one():
    tokenizer = tokenizers.ByteTokenizer()
    assert tokenizer.encode(b"\x00A\xff").tolist() == [1, 66, 256]  # 0 + 1, 65 + 1, 255 + 1
    assert tokenizer.encode("é").tolist() == [0xC3 + 1, 0xA9 + 1]
    assert (tokenizer.vocab_size, tokenizer.separator_id) == (257, 0)


def test_bytes_round_trip_any_bytes():
    tokenizer = tokenizers.ByteTokenizer()
    text = EVERY_BYTE + np.random.default_rng(0).bytes(1000)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bpe_alphabet_is_the_librarys():
    library = pytest.importorskip("tokenizers")
    assert sorted(byte_level.byte_alphabet()) == sorted(library.pre_tokenizers.ByteLevel.alphabet())


def test_bpe_round_trips_unicode_and_merges(bpe):
    assert bpe.decode(bpe.encode(UNICODE)) == UNICODE.encode()
    assert bpe.decode(bpe.encode(UNICODE.encode())) == UNICODE.encode()
    assert bpe.encode("the cat").size == 2  # "the", " cat": 40 occurrences each
    assert 257 < bpe.vocab_size <= 300
    assert bpe.name == "bpe:300"


def test_bpe_training_is_deterministic(bpe):
    again = tokenizers.make("bpe:300", [b"the cat sat on the mat; the cat\n" * 20])
    assert again.digest == bpe.digest
    assert again.encode(UNICODE).tolist() == bpe.encode(UNICODE).tolist()


def test_sentencepiece_round_trips_what_its_model_keeps(sentencepiece):
    text = "the  cat\n漢"  # two spaces; the last two characters by byte fallback
    assert sentencepiece.decode(sentencepiece.encode(text)) == text.encode()
    assert sentencepiece.encode("the cat").size < 7
    assert sentencepiece.encode(text).max() < sentencepiece.vocab_size


KINDS = ["bytes", "bpe", "sentencepiece", "default_sentencepiece"]


@pytest.fixture(params=KINDS)
def tokenizer(request):
    return tokenizers.ByteTokenizer() if request.param == "bytes" else request.getfixturevalue(request.param)


def test_ids_are_within_the_vocabulary(tokenizer):
    ids = tokenizer.encode("the cat sat, naïve \N{SNOWMAN}\n")
    assert ids.dtype == np.int32
    assert tokenizer.separator_id not in ids
    assert tokenizer.decode([tokenizer.separator_id]) == b""
    tokenizer.decode(range(tokenizer.vocab_size))
    for unknown in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"token id {unknown} is outside"):
            tokenizer.decode([1, unknown])


@pytest.mark.parametrize(
    "text",
    ["the cat sat, naïve \N{SNOWMAN}\n", "  two  spaces,\n\ttab ﬁ Ｔ  \n\n", "", " ", "\0", "the\r\ncat\n\n\n", "é"],
)
def test_the_bytes_of_the_tokens_sum_to_those_of_the_text(tokenizer, text):
    for given in (text, text.encode()):
        ids = tokenizer.encode(given)
        counts = tokenizer.count_bytes(given, ids)
        assert (counts.shape, counts.dtype) == (ids.shape, np.int32)
        assert counts.sum() == (len(text.encode()) if ids.size else 0)
        assert (counts >= 0).all()


def test_bytes_are_counted_where_they_stand_in_the_text(bpe, sentencepiece, default_sentencepiece):
    text = "the cat ﬁ"
    assert bpe.count_bytes(text, bpe.encode(text)).tolist() == [3, 4, 1, 1, 1, 1]  # the | cat| | ﬁ, three bytes
    for tokenizer in (sentencepiece, default_sentencepiece):
        counts = tokenizer.count_bytes(text, ids := tokenizer.encode(text))
        pieces = [tokenizer.decode([i]) for i in ids]
        assert counts.tolist()[-2:] in ([1, 3], [0, 3])  # the space, and a ligature that one model takes for an unknown
        assert default_sentencepiece is not tokenizer or (pieces[0], counts[0]) == (b" ", 0)  # a space of its own


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
def test_malformed_specs_are_refused(spec):
    with pytest.raises(ConfigError, match=r"config\.data\.tokenizer = .* must be bytes, bpe:VOCAB_SIZE"):
        tokenizers.make(spec, [])
    with pytest.raises(ConfigError, match=r"config\.data\.tokenizer"):
        tokenizers.identity(spec)


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 1000, b"\x7fELF" + bytes(range(256)) * 9, "cut"])
def test_what_is_no_sentencepiece_model_is_refused(content, tmp_path):
    pytest.importorskip("sentencepiece")
    with pytest.raises(ConfigError, match=r"none\.model is not a file"):
        tokenizers.make(f"sentencepiece:{tmp_path}/none.model", [])
    path = tmp_path / "x.model"
    path.write_bytes(train_sentencepiece()[:-10] if content == "cut" else content)
    with pytest.raises(ConfigError, match=r"data\.tokenizer = 'sentencepiece:.*x.model': no SentencePiece model"):
        tokenizers.make(f"sentencepiece:{path}", [])


# On disk


def test_a_saved_tokenizer_comes_back(tokenizer, tmp_path):
    assert tokenizers.load(tmp_path / "none") is None
    tokenizers.save(tokenizer, tmp_path / "kept")
    again = tokenizers.load(tmp_path / "kept")
    assert type(again) is type(tokenizer)
    assert (again.name, again.digest, again.vocab_size) == (tokenizer.name, tokenizer.digest, tokenizer.vocab_size)
    assert again.encode("the cat\n").tolist() == tokenizer.encode("the cat\n").tolist()
    tokenizers.save(tokenizer, tmp_path / "kept")
    assert len(list((tmp_path / "kept").iterdir())) == (2 if tokenizer.model else 1)


def test_one_tokenizer_replaces_another_in_one_go(bpe, sentencepiece, tmp_path, monkeypatch):
    tokenizers.save(bpe, tmp_path)

    def killed(path, content, write=tokenizers._write):
        if path.name == tokenizers.DESCRIPTION:
            raise KeyboardInterrupt
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(tokenizers, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            tokenizers.save(sentencepiece, tmp_path)
    assert tokenizers.load(tmp_path).digest == bpe.digest
    tokenizers.save(sentencepiece, tmp_path)
    assert tokenizers.load(tmp_path).digest == sentencepiece.digest
    assert len(list(tmp_path.iterdir())) == 2


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: flip_a_bit(next(folder.glob("*.model"))),
        lambda folder: next(folder.glob("*.model")).unlink(),
        lambda folder: (folder / "tokenizer.json").write_text("{"),
        lambda folder: (folder / "tokenizer.json").write_text("[" * 100_000),
        lambda folder: (folder / "tokenizer.json").write_text("[]"),
        lambda folder: (folder / "tokenizer.json").write_text('{"name": "bpe:300", "digest": "../../../etc/passwd"}'),
        lambda folder: (folder / "tokenizer.json").write_text('{"name": "word", "digest": ""}'),
    ],
)
def test_a_damaged_tokenizer_is_refused(bpe, tmp_path, damage):
    tokenizers.save(bpe, tmp_path)
    damage(tmp_path)
    with pytest.raises(StorageError, match="the tokenizer kept here cannot be used: "):
        tokenizers.load(tmp_path)


@pytest.mark.parametrize("kind", ["bpe:300", "sentencepiece:{tmp}/x.model"])
def test_a_missing_library_is_named_in_one_line(kind, tmp_path, monkeypatch):
    (tmp_path / "x.model").touch()
    library = "tokenizers" if kind.startswith("bpe") else "sentencepiece"
    monkeypatch.setitem(sys.modules, library, None)  # makes its import fail
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[(bpe|sentencepiece)\]'$"):
        tokenizers.identity(kind.format(tmp=tmp_path))
