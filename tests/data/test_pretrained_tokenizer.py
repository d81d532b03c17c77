"""Tokenizers of pretrained models: a folder's and a file's are one, special tokens are text, bytes are exact."""

import json
import pathlib
import sys

import numpy as np
import pytest

from mod_jax.data import tokenizers
from mod_jax.errors import ConfigError, RequestError
from mod_jax.sampling.text import encode_prompt

sys.path.append(str(pathlib.Path(__file__).parents[1] / "pretrained"))

import sources

TEXTS = ["the cat sat", "naïve 2024 ½ 漢字 \N{ROCKET}\r\n\t<|endoftext|> the", "", " <|im_end|>"]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(the tokenizer of a folder, that of a GGUF file) of one model."""
    tmp_path, tiny = tmp_path_factory.mktemp("both"), sources.make("llama")
    folder = sources.write_folder(tiny, tmp_path / "folder")
    file = sources.write_gguf(tiny, tmp_path / "model.gguf", **{"tokenizer.ggml.pre": "gpt-2"})
    return tokenizers.pretrained(f"hf:{folder}"), tokenizers.pretrained(f"gguf:{file}")


def described(tmp_path, settings, words=("<|endoftext|>", "<|im_end|>"), generation=None, **changes):
    """The tokenizer of a folder with these settings."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(sources.tokenizer_json(words) | changes))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tokenizers.pretrained(f"hf:{tmp_path}")


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_and_exact_bytes(both, text):
    for tokenizer in both:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text.encode()
        assert tokenizer.encode(text.encode()).tolist() == ids.tolist()
        counts = tokenizer.count_bytes(text, ids)
        assert counts.sum() == len(text.encode())
        assert len(counts) == len(ids)


def test_a_file_and_a_folder_give_the_same_ids(both):
    folder, file = both
    for text in TEXTS:
        np.testing.assert_array_equal(folder.encode(text), file.encode(text))
    assert (folder.separator_id, folder.start_id, folder.stop_ids) == (file.separator_id, file.start_id, file.stop_ids)


def test_special_tokens_are_not_read_out_of_a_text(both):
    for tokenizer in both:
        assert not {tokenizer.separator_id, *tokenizer.stop_ids} & set(
            tokenizer.encode("<|endoftext|><|im_end|>").tolist()
        )
        assert tokenizer.decode(tokenizer.stop_ids) == b""


def test_what_begins_and_ends_a_text(tmp_path):
    def ids(tokenizer):
        word = {name: tokenizer._inner.token_to_id(name) for name in ("<|endoftext|>", "<|im_end|>")}
        return {i: name for name, i in word.items()} | {None: None}

    plain = described(tmp_path, {"eos_token": {"content": "<|im_end|>"}})
    names = ids(plain)
    assert (names[plain.start_id], names[plain.separator_id]) == (None, "<|endoftext|>")
    assert {names[i] for i in plain.stop_ids} == {"<|endoftext|>", "<|im_end|>"}
    begins = described(tmp_path, {"bos_token": "<|im_end|>", "add_bos_token": True, "eos_token": "<|endoftext|>"})
    assert (names[begins.start_id], names[begins.separator_id]) == ("<|im_end|>", "<|im_end|>")
    several = described(tmp_path, {}, generation={"eos_token_id": sorted(i for i in names if i is not None)})
    assert set(several.stop_ids) == set(plain.stop_ids)
    assert len({plain.digest, begins.digest}) == 2


def test_prompts_begin_as_the_model_was_trained(both, tmp_path):
    none, _ = both
    ids = none.encode("the cat")
    np.testing.assert_array_equal(encode_prompt(none, "the cat", 64, False), ids)
    assert encode_prompt(none, "", 64, False).tolist() == [none.separator_id]
    assert encode_prompt(none, [none.separator_id, *ids], 64, False).tolist() == [none.separator_id, *ids]
    with pytest.raises(RequestError, match="may stand only at its start"):
        encode_prompt(none, [*ids, none.separator_id], 64, False)
    begins = described(tmp_path, {"bos_token": "<|im_end|>", "add_bos_token": True})
    np.testing.assert_array_equal(encode_prompt(begins, "the cat", 64, False), [begins.start_id, *ids])
    assert encode_prompt(begins, "", 64, False).tolist() == [begins.start_id]


def test_it_is_kept_with_a_run_and_comes_back(both, tmp_path):
    for index, tokenizer in enumerate(both):
        tokenizers.save(tokenizer, tmp_path / str(index))
        again = tokenizers.load(tmp_path / str(index))
        assert (again.name, again.digest, again.stop_ids) == (tokenizer.name, tokenizer.digest, tokenizer.stop_ids)
        np.testing.assert_array_equal(again.encode(TEXTS[1]), tokenizer.encode(TEXTS[1]))


def test_what_cannot_be_used_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        tokenizers.pretrained(f"hf:{tmp_path}")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        tokenizers.pretrained(f"hf:{tmp_path}")
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ConfigError, match="not a tokenizer"):
        tokenizers.pretrained(f"hf:{tmp_path}")
    with pytest.raises(ConfigError, match="names token id 9999"):
        described(tmp_path, {}, generation={"eos_token_id": 9999})
    tiny = sources.make("llama")
    for fields, fragment in (
        ({"tokenizer.ggml.model": "llama"}, r"'llama' \(SentencePiece\): only gpt2"),
        ({"tokenizer.ggml.pre": "refact"}, r"tokenizer\.ggml\.pre = 'refact'"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "names token id 9999"),
    ):
        path = sources.write_gguf(tiny, tmp_path / "model.gguf", **fields)
        with pytest.raises(ConfigError, match=fragment):
            tokenizers.pretrained(f"gguf:{path}")


def like_sentencepiece():
    """A tokenizer.json as those of Llama 2 are: spaces written as blocks, unknown characters as bytes, <s> in front."""
    library = pytest.importorskip("tokenizers")
    block = "\N{LOWER ONE EIGHTH BLOCK}"
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), block, "t", "h", "e", "c", "a", "\n"]
    pairs = [("t", "h"), ("th", "e"), (block, "the"), ("c", "a")]
    words += ["".join(pair) for pair in pairs]
    vocab = {word: i for i, word in enumerate(words)}
    inner = library.Tokenizer(library.models.BPE(vocab, pairs, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.normalizer = library.normalizers.Sequence(
        [library.normalizers.Prepend(block), library.normalizers.Replace(" ", block)]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.post_processor = library.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return json.loads(inner.to_str())


def test_a_tokenizer_like_llama_2_s(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(like_sentencepiece()))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    tokenizer = tokenizers.pretrained(f"hf:{tmp_path}")
    assert (tokenizer.start_id, tokenizer.separator_id, tokenizer.stop_ids) == (1, 1, (1, 2))
    for text in ("the ca the", "é\n the </s>", "the"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == b" " + text.encode()  # it puts a space in front
        counts = tokenizer.count_bytes(text, ids)
        assert counts.sum() == len(text.encode())
    np.testing.assert_array_equal(encode_prompt(tokenizer, "the", 8, False), [1, *tokenizer.encode("the")])
