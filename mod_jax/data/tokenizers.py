"""Tokenizers: text to ids and back, and the exact number of bytes that each id stands for.

Vocabulary. A *piece* is the byte string that an id stands for. Id 0 is the separator, the first token of every
document; it stands for no text, and encoding never produces it. The three classes share one surface, by duck typing:
`name`, `separator_id`, `vocab_size`, `byte_lengths` (int64, one per id), `encode(text)` and `decode(ids)`.
"""

import hashlib
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

from mod_jax.errors import ConfigError

SEPARATOR = 0
BPE_FILE = "tokenizer.json"
MIN_BPE_SIZE = 257  # the separator and every byte


class ByteTokenizer:
    """One id per byte: byte b is id b + 1. Round-trips any bytes."""

    name = "bytes"
    separator_id = SEPARATOR

    def __init__(self):
        self._pieces = [b"", *(bytes([byte]) for byte in range(256))]
        self.vocab_size = len(self._pieces)
        self.byte_lengths = _byte_lengths(self._pieces)

    def encode(self, text: bytes | str) -> np.ndarray:
        text = text.encode() if isinstance(text, str) else text
        return np.frombuffer(text, np.uint8).astype(np.int32) + 1

    def decode(self, ids: Sequence[int]) -> bytes:
        return _join(self, self._pieces, ids)


class BPETokenizer:
    """Byte-level byte-pair encoding, trained by `train_bpe`. Round-trips any Unicode text."""

    separator_id = SEPARATOR

    def __init__(self, spec: str, path: pathlib.Path):
        self.name = spec
        try:
            self._bpe = _import_tokenizers().Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower type
            raise ConfigError(f"config.data.tokenizer = {spec!r}: cannot read {path} ({error})") from None
        byte_of = {char: byte for byte, char in enumerate(_byte_alphabet())}
        words = [self._bpe.id_to_token(i) for i in range(self._bpe.get_vocab_size())]
        self._pieces = [b"", *(bytes(byte_of[char] for char in word) for word in words)]
        self.vocab_size = len(self._pieces)
        self.byte_lengths = _byte_lengths(self._pieces)

    def encode(self, text: bytes | str) -> np.ndarray:
        text = text if isinstance(text, str) else text.decode()
        return np.array(self._bpe.encode(text).ids, np.int32) + 1

    def decode(self, ids: Sequence[int]) -> bytes:
        return _join(self, self._pieces, ids)


class SentencePieceTokenizer:
    """A given SentencePiece model. Round-trips what its normalisation leaves of the text.

    Its defaults turn line ends into spaces and put a space in front: train a model for code with
    `--normalization_rule_name=identity --remove_extra_whitespaces=false --add_dummy_prefix=false --byte_fallback`.
    An unknown piece stands for no bytes, so that bits per byte can only come out too high.
    """

    separator_id = SEPARATOR

    def __init__(self, spec: str, path: pathlib.Path):
        self.name = spec
        try:
            self._model = _import_sentencepiece().SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"config.data.tokenizer = {spec!r}: {path} is no SentencePiece model ({error})") from None
        self._pieces = [b"", *map(self._piece, range(self._model.get_piece_size()))]
        self.vocab_size = len(self._pieces)
        self.byte_lengths = _byte_lengths(self._pieces)

    def _piece(self, i: int) -> bytes:
        word = self._model.id_to_piece(i)
        if self._model.is_control(i) or self._model.is_unknown(i):
            return b""
        if self._model.is_byte(i):
            return bytes([int(word[1:-1], 16)])  # such as <0x0A>
        return word.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def encode(self, text: bytes | str) -> np.ndarray:
        text = text if isinstance(text, str) else text.decode()
        return np.array(self._model.encode(text), np.int32) + 1

    def decode(self, ids: Sequence[int]) -> bytes:
        return _join(self, self._pieces, ids)


Tokenizer = ByteTokenizer | BPETokenizer | SentencePieceTokenizer


def load(spec: str, directory: pathlib.Path) -> Tokenizer:
    """Returns the tokenizer that `data.tokenizer` names; a trained one is read from `directory`.

    Raises:
      ConfigError: naming the key, if the spec is malformed or the tokenizer is not there.
    """
    kind, argument = _parse(spec)
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "sentencepiece":
        return SentencePieceTokenizer(spec, _model_path(spec, argument))
    path = pathlib.Path(directory) / BPE_FILE
    if not path.is_file():
        raise ConfigError(f"config.data.tokenizer = {spec!r}: not trained yet, {path} does not exist")
    return BPETokenizer(spec, path)


def identity(spec: str) -> str:
    """A string that changes when the tokens of a text may have. Checks spec and library, before any work is done."""
    kind, argument = _parse(spec)
    if kind == "bpe":
        _import_tokenizers()
    if kind == "sentencepiece":
        _import_sentencepiece()
        return f"sentencepiece {hashlib.sha256(_model_path(spec, argument).read_bytes()).hexdigest()}"
    return spec


def needs_training(spec: str) -> bool:
    return _parse(spec)[0] == "bpe"


def train_bpe(spec: str, texts: Iterable[bytes], directory: pathlib.Path) -> None:
    """Trains the tokenizer `bpe:VOCAB_SIZE` on the texts and writes it to `directory`, for `load` to find.

    Texts too small to yield that many pieces give a smaller vocabulary.
    """
    _, argument = _parse(spec)
    library = _import_tokenizers()
    bpe = library.Tokenizer(library.models.BPE())
    bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = library.trainers.BpeTrainer(
        vocab_size=int(argument) - 1, initial_alphabet=_byte_alphabet(), show_progress=False
    )
    bpe.train_from_iterator((text.decode() for text in texts), trainer)
    bpe.save(str(pathlib.Path(directory) / BPE_FILE))


def _parse(spec: str) -> tuple[str, str]:
    """Splits a spec into kind and argument, or raises ConfigError."""
    kind, _, argument = spec.partition(":")
    size_fits = argument.isascii() and argument.isdigit() and int(argument) >= MIN_BPE_SIZE
    if not (spec == "bytes" or (kind == "bpe" and size_fits) or (kind == "sentencepiece" and argument)):
        raise ConfigError(
            f"config.data.tokenizer = {spec!r}: must be bytes, bpe:VOCAB_SIZE with VOCAB_SIZE >= {MIN_BPE_SIZE}, "
            "or sentencepiece:PATH"
        )
    return kind, argument


def _model_path(spec: str, argument: str) -> pathlib.Path:
    path = pathlib.Path(argument).expanduser()
    if not path.is_file():
        raise ConfigError(f"config.data.tokenizer = {spec!r}: {path} is not a file")
    return path


def _byte_alphabet() -> list[str]:
    """The character by which byte-level BPE writes each byte: itself if it shows, else one from U+0100 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte if byte in shown else 256 + hidden.index(byte)) for byte in range(256)]


def _byte_lengths(pieces: list[bytes]) -> np.ndarray:
    return np.array([len(piece) for piece in pieces], np.int64)


def _join(tokenizer: Tokenizer, pieces: list[bytes], ids: Sequence[int]) -> bytes:
    ids = np.asarray(ids, np.int64).ravel()
    refuse_unknown_ids(ids, tokenizer.vocab_size, f"cannot decode with {tokenizer.name}")
    return b"".join([pieces[i] for i in ids])


def refuse_unknown_ids(ids: np.ndarray, vocab_size: int, place: str, error: type[Exception] = ValueError) -> None:
    """Raises an error naming the first id outside [0, vocab_size): a device would read NaN, or the last row, for it."""
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise error(f"{place}: token id {outside.flat[0]} is outside the vocabulary [0, {vocab_size})")


def _import_tokenizers():
    try:
        import tokenizers
    except ImportError:
        raise ConfigError("config.data.tokenizer = 'bpe:...' needs an extra: pip install -e '.[bpe]'") from None
    return tokenizers


def _import_sentencepiece():
    try:
        import sentencepiece
    except ImportError:
        raise ConfigError(
            "config.data.tokenizer = 'sentencepiece:...' needs an extra: pip install -e '.[sentencepiece]'"
        ) from None
    return sentencepiece
