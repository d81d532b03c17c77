"""Tokenizers: text to ids and back, and the exact number of bytes that each token stands for.

Vocabulary. A *piece* is the byte string that an id stands for. Id 0 is the separator, the first token of every
document; it stands for no text, and encoding never produces it. (In the tokenizer of a pretrained model other ids play
its parts, see `pretrained_tokenizer`.) The classes share one surface, by duck typing:
  name, separator_id, vocab_size
  start_id                what a prompt begins with, None for nothing
  stop_ids                what ends a completion
  longest_piece           in bytes
  encode(text)            int32 ids, of text as bytes or str
  decode(ids)             bytes
  count_bytes(text, ids)  int32, the bytes of `text` that each id of its encoding stands for; they sum to the text's
  model, digest           for keeping it: the bytes of its file; equal exactly for one kind with one model
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence

import numpy as np

from mod_jax import buckets, outputs, paths
from mod_jax.data import pretrained_tokenizer
from mod_jax.data.byte_level import byte_alphabet, import_tokenizers
from mod_jax.data.pretrained_tokenizer import PretrainedTokenizer
from mod_jax.errors import ConfigError, DataError, StorageError
from mod_jax.pretrained.gguf_file import open_gguf

SEPARATOR = 0
MIN_BPE_SIZE = 257  # the separator and every byte
DESCRIPTION = "tokenizer.json"  # of a tokenizer that was saved: name, vocab_size, digest


class ByteTokenizer:
    """One id per byte: byte b is id b + 1. Round-trips any bytes."""

    name = "bytes"
    separator_id = start_id = SEPARATOR
    stop_ids = (SEPARATOR,)
    model = b""

    def __init__(self):
        self.digest = _digest("bytes", self.model)
        self._pieces = [b"", *(bytes([byte]) for byte in range(256))]
        self.vocab_size, self.longest_piece = len(self._pieces), max(map(len, self._pieces))

    def encode(self, text: bytes | str) -> np.ndarray:
        text = text.encode() if isinstance(text, str) else text
        return np.frombuffer(text, np.uint8).astype(np.int32) + 1

    def decode(self, ids: Sequence[int]) -> bytes:
        return _join(self, self._pieces, ids)

    def count_bytes(self, text: bytes | str, ids: np.ndarray) -> np.ndarray:
        return np.ones(len(ids), np.int32)


class BPETokenizer:
    """Byte-level byte-pair encoding, trained by `make`. Round-trips any Unicode text."""

    separator_id = start_id = SEPARATOR
    stop_ids = (SEPARATOR,)

    def __init__(self, name: str, model: bytes):
        self.name, self.model, self.digest = name, model, _digest("bpe", model)
        try:
            self._bpe = import_tokenizers("bpe:...").Tokenizer.from_str(model.decode())
            byte_of = {char: byte for byte, char in enumerate(byte_alphabet())}
            words = [self._bpe.id_to_token(i) for i in range(self._bpe.get_vocab_size())]
            self._pieces = [b"", *(bytes(byte_of[char] for char in word) for word in words)]
        except ConfigError:
            raise
        except Exception as error:  # the library raises no narrower type
            raise ConfigError(f"config.data.tokenizer = {name!r}: not a model of byte-level BPE ({error})") from None
        self.vocab_size, self.longest_piece = len(self._pieces), max(map(len, self._pieces))
        self._byte_lengths = np.array([len(piece) for piece in self._pieces], np.int32)

    def encode(self, text: bytes | str) -> np.ndarray:
        text = text if isinstance(text, str) else text.decode()
        return np.array(self._bpe.encode(text).ids, np.int32) + 1

    def decode(self, ids: Sequence[int]) -> bytes:
        return _join(self, self._pieces, ids)

    def count_bytes(self, text: bytes | str, ids: np.ndarray) -> np.ndarray:
        return self._byte_lengths[ids]


class SentencePieceTokenizer:
    """A given SentencePiece model. Round-trips what its normalisation leaves of the text.

    Its defaults turn line ends into spaces and put a space in front: train a model for code with
    `--normalization_rule_name=identity --remove_extra_whitespaces=false --add_dummy_prefix=false --byte_fallback`.
    An unknown piece is decoded as nothing. Bytes are counted where they stand in the text, so they are exact for any
    model.
    """

    separator_id = start_id = SEPARATOR
    stop_ids = (SEPARATOR,)

    def __init__(self, name: str, model: bytes):
        self.name, self.model, self.digest = name, model, _digest("sentencepiece", model)
        try:
            # Not given to the constructor: an empty model would load as one without pieces.
            self._processor = _import_sentencepiece().SentencePieceProcessor()
            self._processor.LoadFromSerializedProto(model)
            size = self._processor.get_piece_size()
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"config.data.tokenizer = {name!r}: no SentencePiece model ({error})") from None
        if not size:
            raise ConfigError(f"config.data.tokenizer = {name!r}: no SentencePiece model (it has no pieces)")
        self._pieces = [b"", *map(self._piece, range(size))]
        self.vocab_size, self.longest_piece = len(self._pieces), max(map(len, self._pieces))

    def _piece(self, i: int) -> bytes:
        word = self._processor.id_to_piece(i)
        if self._processor.is_control(i) or self._processor.is_unknown(i):
            return b""
        if self._processor.is_byte(i):
            return bytes([int(word[1:-1], 16)])  # such as <0x0A>
        return word.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def encode(self, text: bytes | str) -> np.ndarray:
        text = text if isinstance(text, str) else text.decode()
        return np.array(self._processor.encode(text), np.int32) + 1

    def decode(self, ids: Sequence[int]) -> bytes:
        return _join(self, self._pieces, ids)

    def count_bytes(self, text: bytes | str, ids: np.ndarray) -> np.ndarray:
        """What normalisation removed counts for the piece that follows it or, at the end of the text, the last one."""
        text = text.encode() if isinstance(text, str) else text
        if not len(ids):
            return np.zeros(0, np.int32)
        offsets = self._processor.encode(text, return_type="offset_mapping", return_bytes=True)["offsets"]
        ends = np.array([end for _, end in offsets], np.int64)
        ends[-1] = len(text)
        counts = np.diff(ends, prepend=0)
        if len(counts) != len(ids) or np.any(counts < 0):
            raise DataError(f"{self.name}: the library does not say where in the text each piece stands")
        return counts.astype(np.int32)


Tokenizer = ByteTokenizer | BPETokenizer | SentencePieceTokenizer | PretrainedTokenizer


def make(spec: str, texts: Iterable[bytes]) -> Tokenizer:
    """Returns the tokenizer that `data.tokenizer` names: reads its model or, for `bpe:VOCAB_SIZE`, trains it on texts.

    Texts too small to yield that many pieces give a smaller vocabulary.

    Raises:
      ConfigError: naming the key, if the spec is malformed or names no model.
    """
    kind, argument = _parse(spec)
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "sentencepiece":
        return SentencePieceTokenizer(spec, _read_model(spec, argument))
    if kind in PRETRAINED:
        return pretrained(spec)
    library = import_tokenizers("bpe:...")
    bpe = library.Tokenizer(library.models.BPE())
    bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = library.trainers.BpeTrainer(
        vocab_size=int(argument) - 1, initial_alphabet=byte_alphabet(), show_progress=False
    )
    bpe.train_from_iterator((text.decode() for text in texts), trainer)
    return BPETokenizer(spec, bpe.to_str().encode())


def identity(spec: str) -> str:
    """A string that changes when the tokens of a text may have. Checks spec and library, before any work is done."""
    kind, argument = _parse(spec)
    if kind == "bpe":
        import_tokenizers("bpe:...")
    if kind == "sentencepiece":
        _import_sentencepiece()
        return _digest(kind, _read_model(spec, argument))
    return pretrained(spec).digest if kind in PRETRAINED else spec


def known_vocab_size(spec: str) -> int | None:
    """Number of ids, as far as the spec alone tells; a trained tokenizer may have fewer. None: its model must be read.

    Raises:
      ConfigError: the spec is malformed.
    """
    kind, argument = _parse(spec)
    if kind == "sentencepiece" or kind in PRETRAINED:
        return None
    return int(argument) if kind == "bpe" else ByteTokenizer().vocab_size


def needs_training(spec: str) -> bool:
    return _parse(spec)[0] == "bpe"


def encode_document(tokenizer: Tokenizer, text: bytes, place: str) -> np.ndarray:
    """The ids of a document of a corpus.

    Raises:
      DataError: it is not text that the tokenizer takes; the message begins with `place`.
    """
    try:
        ids = tokenizer.encode(text)
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: {tokenizer.name} needs UTF-8 text: {error}") from None
    refuse_unknown_ids(ids, tokenizer.vocab_size, place, DataError)
    return ids


PRETRAINED = ("hf", "gguf")


def pretrained(spec: str) -> PretrainedTokenizer:
    """The tokenizer of a pretrained model: hf:FOLDER, that of its tokenizer.json, or gguf:FILE.

    Raises:
      ConfigError, StorageError: it is not there, damaged, or of a kind that is not known here.
    """
    kind, argument = _parse(spec)
    if kind == "hf":
        model = pretrained_tokenizer.from_folder(paths.local_folder("config.data.tokenizer", argument))
    else:
        path = paths.local_folder("config.data.tokenizer", argument)
        model = pretrained_tokenizer.from_gguf(open_gguf(path).fields, str(path))
    return _kept(spec, kind, model, _digest(kind, model))


def _kept(name: str, kind: str, model: bytes, digest: str) -> Tokenizer:
    """The tokenizer of this kind, from the bytes of its model."""
    if kind == "bytes":
        return ByteTokenizer()
    if kind in PRETRAINED:
        return PretrainedTokenizer(name, model, digest)
    return BPETokenizer(name, model) if kind == "bpe" else SentencePieceTokenizer(name, model)


# A tokenizer on disk: with every corpus that was made with it, and in the workdir of every run.


def save(tokenizer: Tokenizer, directory: paths.Folder) -> None:
    """Writes the tokenizer into `directory`, which then holds it alone. Killed at any moment, it leaves a whole one.

    Raises:
      OSError, or what a bucket raises: if it cannot be written.
    """
    paths.make_folder(directory)
    if tokenizer.model:
        _write(_model_file(directory, tokenizer.digest), tokenizer.model)
    about = dict(name=tokenizer.name, vocab_size=tokenizer.vocab_size, digest=tokenizer.digest)
    _write(directory / DESCRIPTION, outputs.to_json(about, indent=2).encode() + b"\n")
    for path in directory.glob("*.model"):
        if path != _model_file(directory, tokenizer.digest):
            path.unlink(missing_ok=True)


def load(directory: paths.Folder) -> Tokenizer | None:
    """Returns the tokenizer that was saved in `directory`; None if none was.

    Raises:
      StorageError: if it is damaged.
      ConfigError: if its library is not installed.
    """
    try:
        about = json.loads((directory / DESCRIPTION).read_bytes())
        name, digest = str(about["name"]), str(about["digest"])
        kind, _ = _parse(name)
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError(f"{DESCRIPTION} has no digest")
        model = b"" if kind == "bytes" else _model_file(directory, digest).read_bytes()
        if _digest(kind, model) != digest:
            raise ValueError("its file has changed")
    except FileNotFoundError as error:
        if not (directory / DESCRIPTION).exists():
            return None
        raise StorageError(
            f"{directory}: the tokenizer kept here cannot be used: {error.filename or error} is gone"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(f"{directory}: the tokenizer kept here cannot be used: {error}") from None
    return _kept(name, kind, model, digest)


def _model_file(directory: paths.Folder, digest: str) -> paths.Folder:
    """Named by its content, so that replacing the description replaces the tokenizer in one go."""
    return directory / f"{digest[:16]}.model"


def _write(path: paths.Folder, content: bytes) -> None:
    if buckets.is_bucket(path):
        path.write_bytes(content)
        return
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()


def _digest(kind: str, model: bytes) -> str:
    return hashlib.sha256(kind.encode() + b"\n" + model).hexdigest()


def _parse(spec: str) -> tuple[str, str]:
    """Splits a spec into kind and argument, or raises ConfigError."""
    kind, _, argument = spec.partition(":")
    size_fits = argument.isascii() and argument.isdigit() and int(argument) >= MIN_BPE_SIZE
    has_path = kind in ("sentencepiece", *PRETRAINED) and argument
    if not (spec == "bytes" or (kind == "bpe" and size_fits) or has_path):
        raise ConfigError(
            f"config.data.tokenizer = {spec!r}: must be bytes, bpe:VOCAB_SIZE with VOCAB_SIZE >= {MIN_BPE_SIZE}, "
            "sentencepiece:PATH, hf:FOLDER or gguf:FILE"
        )
    return kind, argument


def _read_model(spec: str, argument: str) -> bytes:
    if buckets.is_bucket(argument):
        path = paths.folder_to_read("config.data.tokenizer", argument)
    else:
        path = paths.local_folder("config.data.tokenizer", argument)
        if not path.is_file():
            raise ConfigError(f"config.data.tokenizer = {spec!r}: {path} is not a file")
    try:
        return path.read_bytes()
    except OSError as error:
        cause = error.strerror or buckets.cause(error)
        raise ConfigError(f"config.data.tokenizer = {spec!r}: cannot read {path} ({cause})") from None


def _join(tokenizer: Tokenizer, pieces: list[bytes], ids: Sequence[int]) -> bytes:
    ids = np.asarray(ids, np.int64).ravel()
    refuse_unknown_ids(ids, tokenizer.vocab_size, f"cannot decode with {tokenizer.name}")
    return b"".join([pieces[i] for i in ids])


def refuse_unknown_ids(ids: np.ndarray, vocab_size: int, place: str, error: type[Exception] = ValueError) -> None:
    """Raises an error naming the first id outside [0, vocab_size): a device would read NaN, or the last row, for it."""
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise error(f"{place}: token id {outside.flat[0]} is outside the vocabulary [0, {vocab_size})")


def _import_sentencepiece():
    try:
        import sentencepiece
    except ImportError:
        raise ConfigError(
            "config.data.tokenizer = 'sentencepiece:...' needs an extra: pip install -e '.[sentencepiece]'"
        ) from None
    return sentencepiece
