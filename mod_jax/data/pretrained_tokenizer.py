"""Tokenizers of pretrained models: a `tokenizer.json` of Hugging Face, or what a GGUF file says of its own.

The ids are the model's, so none is ours to choose. Three of them have a part that id 0 plays in our own tokenizers:

- `separator_id` stands before each document of a corpus;
- `start_id` stands before each prompt, and is None where the model was trained without one;
- `stop_ids` end a completion.

Special tokens are never read out of a text: `<|endoftext|>` in it is spelt like any other text.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mod_jax.data.byte_level import byte_alphabet, import_tokenizers
from mod_jax.errors import ConfigError, DataError
from mod_jax.outputs import canonical, to_json

LOWER_ONE_EIGHTH_BLOCK = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>")  # of pretraining, where the start of a document has no token
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL, USER_DEFINED = 3, 4  # kinds of tokens in a GGUF file


class PretrainedTokenizer:
    """The tokenizer of a pretrained model, from the description that `from_folder` or `from_gguf` gives.

    Bytes are counted where tokens stand in the text, so they are exact for any model. Of tokens within one character
    the first counts its bytes.
    """

    def __init__(self, name: str, model: bytes, digest: str):
        self.name, self.model, self.digest = name, model, digest
        try:
            about = json.loads(model)
            inner = about["tokenizer"]
            self._inner = import_tokenizers("hf:...").Tokenizer.from_str(to_json(inner))
            self._inner.encode_special_tokens = True
            self._inner.no_padding()
            self._inner.no_truncation()
            self.separator_id, self.start_id = int(about["separator_id"]), about["start_id"]
            self.stop_ids = tuple(map(int, about["stop_ids"]))
            self._pieces = _pieces(self._inner, inner)
        except ConfigError:
            raise
        except Exception as error:  # the library raises no narrower type
            raise ConfigError(f"config.data.tokenizer = {name!r}: no tokenizer of this kind ({error})") from None
        self.vocab_size = len(self._pieces)
        # What a normaliser makes of a text may be shorter than any bound taken from the pieces.
        self.longest_piece = max(map(len, self._pieces)) if inner.get("normalizer") is None else 2**31

    def encode(self, text: bytes | str) -> np.ndarray:
        text = text if isinstance(text, str) else text.decode()
        return np.array(self._inner.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int]) -> bytes:
        ids = np.asarray(ids, np.int64).ravel()
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if outside.size:
            size = self.vocab_size
            raise ValueError(f"cannot decode with {self.name}: token id {outside[0]} is outside [0, {size})")
        return b"".join([self._pieces[i] for i in ids])

    def count_bytes(self, text: bytes | str, ids: np.ndarray) -> np.ndarray:
        text = text if isinstance(text, str) else text.decode()
        if not len(ids):
            return np.zeros(0, np.int32)
        offsets = self._inner.encode(text, add_special_tokens=False).offsets
        bytes_before = np.cumsum([0, *(len(char.encode()) for char in text)])
        ends = np.maximum.accumulate([bytes_before[end] for _, end in offsets])
        ends[-1] = bytes_before[-1]
        if len(ends) != len(ids):
            raise DataError(f"{self.name}: the library does not say where in the text each token stands")
        return np.diff(ends, prepend=0).astype(np.int32)


def from_folder(folder: pathlib.Path) -> bytes:
    """The description of the tokenizer in a folder as Hugging Face's `save_pretrained` leaves it.

    Raises:
      ConfigError: there is none, or it cannot be used.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder}: has no tokenizer.json, the form of a tokenizer that is read here")
    inner = _read_json(path)
    try:
        library = import_tokenizers("hf:...").Tokenizer.from_str(to_json(inner))
    except ConfigError:
        raise
    except Exception as error:  # the library raises no narrower type
        raise ConfigError(f"{path}: not a tokenizer ({error})") from None
    settings, generation, config = (
        _read_json(folder / name) if (folder / name).is_file() else {}
        for name in ("tokenizer_config.json", "generation_config.json", "config.json")
    )

    def id_of(token: Any) -> int | None:
        text = token.get("content") if isinstance(token, dict) else token
        return library.token_to_id(text) if isinstance(text, str) else None

    start = _leading_id(library)
    if start is None and settings.get("add_bos_token"):
        start = id_of(settings.get("bos_token"))
    if settings.get("add_bos_token") is False:
        start = None
    stops = [id_of(settings.get("eos_token"))]
    for source in (generation, config):
        ends = source.get("eos_token_id")
        stops += ends if isinstance(ends, list) else [ends]
    return _describe(inner, library, start, stops, str(path))


def from_gguf(fields: dict[str, Any], place: str) -> bytes:
    """The description of the tokenizer in the metadata of a GGUF file.

    Args:
      fields: its key-value pairs.
      place: names the file in messages.

    Raises:
      ConfigError: it is of a kind that is not known here, or says too little.
    """
    library = import_tokenizers("hf:...")
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ConfigError(
            f"{place}: tokenizer.ggml.model = {kind!r}{' (SentencePiece)' if kind == 'llama' else ''}: only gpt2 "
            "(byte-level BPE) is read from a GGUF file; give the folder of a tokenizer.json with --tokenizer"
        )
    words, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
    kinds = fields.get("tokenizer.ggml.token_type") or [1] * len(words)
    splits = _pre_tokenizers(library)
    if pre not in splits:
        raise ConfigError(
            f"{place}: tokenizer.ggml.pre = {pre!r}: how it splits text is not known here, only {', '.join(splits)}; "
            "give the folder of a tokenizer.json with --tokenizer"
        )
    pairs = [tuple(merge.split(" ")) for merge in merges]
    bpe = library.models.BPE(dict(zip(words, range(len(words)), strict=True)), pairs, ignore_merges=pre == "llama-bpe")
    inner = library.Tokenizer(bpe)
    inner.pre_tokenizer = splits[pre]
    inner.decoder = library.decoders.ByteLevel()
    if pre == "qwen2":
        inner.normalizer = library.normalizers.NFC()
    inner.add_special_tokens([word for word, k in zip(words, kinds, strict=True) if k == CONTROL])
    users = [word for word, k in zip(words, kinds, strict=True) if k == USER_DEFINED]
    inner.add_tokens([library.AddedToken(word, normalized=False) for word in users])
    begins = fields.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
    start = fields.get("tokenizer.ggml.bos_token_id") if begins else None
    stops = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return _describe(json.loads(inner.to_str()), inner, start, stops, place)


def _describe(inner: dict, library, start: int | None, stops: list[int | None], place: str) -> bytes:
    ends = [int(i) for i in stops if i is not None]
    found = [library.token_to_id(word) for word in SEPARATORS]
    candidates = [i for i in (start, *found, *ends) if i is not None]
    if not candidates:
        raise ConfigError(f"{place}: has neither a token that begins a text nor one that ends it")
    size = 1 + max(library.get_vocab(with_added_tokens=True).values())
    if outside := [i for i in candidates if not 0 <= i < size]:
        raise ConfigError(f"{place}: names token id {outside[0]}, but its tokenizer has ids in [0, {size})")
    separator = candidates[0]
    about = dict(tokenizer=inner, separator_id=separator, start_id=start, stop_ids=sorted({separator, *ends}))
    return canonical(about).encode()


def _leading_id(library) -> int | None:
    """What the tokenizer itself puts before a text."""
    plain, whole = (library.encode("a", add_special_tokens=special).ids for special in (False, True))
    before = whole[: whole.index(plain[0])] if plain and plain[0] in whole else []
    return before[0] if len(before) == 1 else None


def _pre_tokenizers(library) -> dict[str, Any]:
    """How text is split before BPE, by the name that a GGUF file gives it."""
    pre = library.pre_tokenizers
    by_bytes = pre.ByteLevel(add_prefix_space=False, use_regex=False)

    def split(pattern):
        return pre.Sequence([pre.Split(library.Regex(pattern), "isolated"), by_bytes])

    return {
        "gpt-2": pre.ByteLevel(add_prefix_space=False),
        "smollm": pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]),
        "llama-bpe": split(LLAMA_3),
        "qwen2": split(LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")),
    }


def _pieces(library, inner: dict) -> list[bytes]:
    """What each id stands for; nothing for special tokens and for ids that are not used."""
    added = {int(i): token for i, token in library.get_added_tokens_decoder().items()}
    size = 1 + max(library.get_vocab(with_added_tokens=True).values())
    byte_of = {char: byte for byte, char in enumerate(byte_alphabet())}
    by_bytes, by_blocks = _uses(inner, "ByteLevel"), inner["model"].get("byte_fallback") or _uses(inner, "Metaspace")
    if not by_bytes and not by_blocks:
        raise ConfigError("tokenizer.json is neither byte-level nor like SentencePiece")

    def piece(i: int) -> bytes:
        word = library.id_to_token(i)
        if i in added:
            return b"" if added[i].special else added[i].content.encode()
        if word is None:
            return b""
        if by_bytes:
            return bytes(byte_of[char] for char in word)
        if len(word) == 6 and word.startswith("<0x"):
            return bytes([int(word[3:5], 16)])
        return word.replace(LOWER_ONE_EIGHTH_BLOCK, " ").encode()

    return [piece(i) for i in range(size)]


def _uses(inner: dict, kind: str) -> bool:
    """Whether the decoder, or the splitting of text, is of this kind, alone or in a sequence."""
    parts = [inner.get("decoder"), inner.get("pre_tokenizer")]
    for part in [part for part in parts if part]:
        inside = [part, *part.get("decoders", []), *part.get("pretokenizers", [])]
        if any(p.get("type") == kind for p in inside):
            return True
    return False


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return found
