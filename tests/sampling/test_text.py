"""Prompts to ids, ids to text: whole characters only, stop strings never shown."""

import numpy as np
import pytest

from mod_jax.data.tokenizers import ByteTokenizer
from mod_jax.errors import RequestError
from mod_jax.sampling.text import Row, TextStream, encode_prompt

TOKENIZER = ByteTokenizer()


def stream(text: str | bytes, stops=()) -> tuple[list[str], bool]:
    """What each token made certain, and whether a stop string was found."""
    out, pieces = TextStream(TOKENIZER, stops), []
    for token in TOKENIZER.encode(text):
        pieces.append(out.add(int(token)))
        if out.stopped:
            break
    return [*pieces, out.finish()], out.stopped


def test_characters_appear_when_they_are_whole():
    assert stream("aé€") == (["a", "", "é", "", "", "€", ""], False)
    assert "".join(stream("naïve 日本語 🦊")[0]) == "naïve 日本語 🦊"


def test_bytes_that_are_no_character_are_replaced_and_never_lost():
    assert "".join(stream(b"a\xffb\xe2\x82")[0]) == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("text", "stops", "shown", "stopped"),
    [
        ("hello\nworld", ["\n"], "hello", True),
        ("abababc", ["ababc"], "ab", True),  # the first "ababa" was a false start
        ("abc", ["abcd"], "abc", False),  # held back, then released at the end
        ("xyEND", ["END", "yE"], "x", True),  # whichever is complete first
        ("aé", ["é"], "a", True),
    ],
)
def test_stop_strings_end_the_text_and_are_never_shown(text, stops, shown, stopped):
    pieces, found = stream(text, stops)
    assert ("".join(pieces), found) == (shown, stopped)


def test_prompts_begin_with_one_separator():
    assert encode_prompt(TOKENIZER, "", 10, False).tolist() == [0]
    assert encode_prompt(TOKENIZER, "AB", 10, False).tolist() == [0, 66, 67]
    assert encode_prompt(TOKENIZER, b"\xff", 10, False).tolist() == [0, 256]
    for ids in ([66, 67], [0, 66, 67], np.array([66, 67])):
        assert encode_prompt(TOKENIZER, ids, 10, False).tolist() == [0, 66, 67]


def test_a_prompt_that_is_too_long_is_refused_or_its_end_kept():
    assert encode_prompt(TOKENIZER, "ABC", 4, False).tolist() == [0, 66, 67, 68]
    with pytest.raises(RequestError, match=r"4 tokens with the separator, at most 3 fit"):
        encode_prompt(TOKENIZER, "ABC", 3, False)
    assert encode_prompt(TOKENIZER, "ABC", 3, True).tolist() == [0, 67, 68]
    assert encode_prompt(TOKENIZER, "ABC", 1, True).tolist() == [0]


@pytest.mark.parametrize("bad", [[257], [-1], [1, 0, 2], [1.5], [[1, 2]], "\ud800", {"a": 1}, [None], [2**70]])
def test_what_is_no_prompt_is_refused(bad):
    with pytest.raises(RequestError, match="prompt"):
        encode_prompt(TOKENIZER, bad, 10, False)


class Words:
    """A tokenizer whose ids are whole words."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def decode(self, ids):
        return b"".join(self.pieces[i] for i in ids)


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "tokens"),
    [
        ([b"ab", b"c", b"EN", b"D"], "END", "abc", 2),
        ([b"ab", b"cE", b"ND"], "END", "abc", 1),  # the token on its beginning goes, though its first letter is shown
        ([b"a", b"END"], "END", "a", 1),
        ([b"END"], "END", "", 0),
        ([b"a", b"\xc3", b"\xa9"], "\xe9", "a", 1),  # half a character belongs to the one that it begins
        ([b"\xc3", b"\xa9", b"a", b"b"], "ab", "\xe9", 2),
        ([b"x", b"a", b"", b"b"], "ab", "x", 1),
        ([b"aa", b"b", b"aa", b"c"], "bac", "aabaac", 4),  # not found at all
    ],
)
def test_a_completions_tokens_end_before_the_stop_string(pieces, stop, text, tokens):
    row = Row(np.zeros(1, np.int32), len(pieces), frozenset({99}), TextStream(Words(*pieces), [stop]), 0)
    row.take(np.arange(len(pieces)), 0, 0, 0)
    completion = row.completion()
    assert (completion.text, len(completion.tokens)) == (text, tokens)
