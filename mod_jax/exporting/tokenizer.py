"""The tokenizer of a run as `tokenizer.json`, with the same ids for every text.

The separator of our own tokenizers, id 0, has no text in mod_jax. There it is the special token SEPARATOR, which starts
every text and ends a completion; written out in a text it is spelt like any other. The tokenizer of a pretrained model
goes out as it came in. There, special tokens written out in a text are read as such, as its users expect.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from mod_jax import outputs
from mod_jax.data.byte_level import byte_alphabet, import_tokenizers
from mod_jax.data.pretrained_tokenizer import PretrainedTokenizer
from mod_jax.data.tokenizers import BPETokenizer, ByteTokenizer, Tokenizer
from mod_jax.errors import ConfigError

SEPARATOR = "<|endoftext|>"


def refuse(tokenizer: Tokenizer) -> None:
    """Raises a ConfigError that names a tokenizer that has no form as `tokenizer.json`, or its missing library."""
    if not isinstance(tokenizer, ByteTokenizer | BPETokenizer | PretrainedTokenizer):
        raise ConfigError(
            f"data.tokenizer = {tokenizer.name!r}: has no exact form as tokenizer.json; --notokenizer leaves it out"
        )
    import_tokenizers(tokenizer.name)


def save(tokenizer: Tokenizer, folder: pathlib.Path, context: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`."""
    library = import_tokenizers(tokenizer.name)
    is_ours = not isinstance(tokenizer, PretrainedTokenizer)
    made = _ours(tokenizer, library) if is_ours else _pretrained(tokenizer, library)
    (folder / "tokenizer.json").write_text(made.to_str(), encoding="utf-8")
    ids = special_ids(tokenizer)
    ends = {"eos_token_id": tokenizer.stop_ids[0]}  # the others stand in generation_config.json
    texts = {name.removesuffix("_id"): made.id_to_token(i) for name, i in (ids | ends).items()}
    about = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=context,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        split_special_tokens=is_ours,
        **texts,
    )
    outputs.write_json(folder / "tokenizer_config.json", about)


def special_ids(tokenizer: Tokenizer) -> dict[str, int | list[int]]:
    """Ids of special tokens, by the names that they have in a config of Hugging Face."""
    start, stops = tokenizer.start_id, list(tokenizer.stop_ids)
    return {
        "bos_token_id": tokenizer.separator_id if start is None else start,
        "eos_token_id": stops[0] if len(stops) == 1 else stops,
        "pad_token_id": tokenizer.separator_id,
    }


def _ours(tokenizer: Tokenizer, library: Any) -> Any:
    if isinstance(tokenizer, BPETokenizer):
        model = json.loads(tokenizer.model)["model"]
        words = sorted(model["vocab"], key=model["vocab"].get)
        merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    else:
        words, merges = byte_alphabet(), []
    # Ours are one higher, since the separator comes first.
    vocab = {SEPARATOR: tokenizer.separator_id, **{word: 1 + i for i, word in enumerate(words)}}
    made = library.Tokenizer(library.models.BPE(vocab, merges))
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(merges))
    made.decoder = library.decoders.ByteLevel()
    made.add_special_tokens([SEPARATOR])
    made.post_processor = _behind(SEPARATOR, tokenizer.start_id, library)
    return made


def _pretrained(tokenizer: PretrainedTokenizer, library: Any) -> Any:
    made = library.Tokenizer.from_str(outputs.to_json(json.loads(tokenizer.model)["tokenizer"]))
    if tokenizer.start_id is not None and made.encode("a").ids == made.encode("a", add_special_tokens=False).ids:
        made.post_processor = _behind(made.id_to_token(tokenizer.start_id), tokenizer.start_id, library)
    return made


def _behind(word: str, start_id: int, library: Any) -> Any:
    """What puts this token before every text."""
    return library.processors.TemplateProcessing(
        single=f"{word} $A", pair=f"{word} $A $B", special_tokens=[(word, start_id)]
    )
