"""From prompts to token ids, and from token ids to text as it can be shown so far."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Sequence

import numpy as np

from mod_jax.data.tokenizers import SentencePieceTokenizer, Tokenizer
from mod_jax.errors import RequestError
from mod_jax.sampling.choice import shown

Prompt = str | bytes | Sequence[int] | np.ndarray


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list of prompts. A list of integers is one prompt.

    Raises:
      RequestError: if it is neither text nor a sequence.
    """
    if not isinstance(prompts, str | bytes | np.ndarray | Sequence):
        raise RequestError(f"prompts = {shown(prompts)}: must be text, token ids, or a list of such")
    if isinstance(prompts, np.ndarray):
        is_one = prompts.ndim == 0 or (prompts.ndim == 1 and prompts.dtype.kind not in "OSU")
    else:
        is_one = isinstance(prompts, str | bytes) or (len(prompts) > 0 and _is_integer(prompts[0]))
    return [prompts] if is_one else list(prompts)


def encode_prompt(
    tokenizer: Tokenizer, prompt: Prompt, max_tokens: int, truncate: bool, name: str = "prompt"
) -> np.ndarray:
    """The ids of a prompt behind the token that starts every one, where there is one; int32, at most `max_tokens`.

    Without such a token an empty prompt is the separator alone.

    A prompt that is too long is refused before it is encoded or copied, so that a huge one costs nothing.

    Args:
      prompt: text, or token ids (with or without the leading separator).
      truncate: keep the end of a longer prompt.
      name: what errors call it, such as "prompts[3]".

    Raises:
      RequestError: if it is too long, not text, or holds ids outside the vocabulary.
    """
    is_text = isinstance(prompt, str | bytes)
    if not is_text and (not isinstance(prompt, Sequence | np.ndarray) or getattr(prompt, "ndim", 1) != 1):
        raise RequestError(f"{name} = {shown(prompt)}: must be text or a flat list of token ids")
    if not truncate:
        least = _least_tokens(tokenizer, prompt) if is_text else len(prompt)
        if least > max_tokens:
            raise _too_long(name, f"at least {least}", max_tokens)
    ids = encode_text(tokenizer, prompt, name) if is_text else check_ids(tokenizer, prompt, name)
    begins = [] if tokenizer.start_id is None else [tokenizer.start_id]
    if not begins and not ids.size:
        begins = [tokenizer.separator_id]
    num_tokens = ids.size + len(begins)
    if num_tokens > max_tokens:
        if not truncate:
            raise _too_long(name, str(num_tokens), max_tokens)
        ids = ids[num_tokens - max_tokens :]
    return np.concatenate([begins, ids]).astype(np.int32)


def _too_long(name: str, count: str, max_tokens: int) -> RequestError:
    return RequestError(
        f"{name}: {count} tokens with the separator, at most {max_tokens} fit (the context minus max_new_tokens): "
        "shorten it, ask for fewer new tokens, raise the context, or truncate"
    )


def _least_tokens(tokenizer: Tokenizer, text: str | bytes) -> int:
    """A lower bound of the number of tokens with what prompts start with, from the length alone."""
    if isinstance(tokenizer, SentencePieceTokenizer):  # drops characters: any length may give few tokens
        return 1
    begins = int(tokenizer.start_id is not None)
    return begins + -(-len(text) // tokenizer.longest_piece)  # a character has at least one byte


def encode_text(tokenizer: Tokenizer, text: str | bytes, name: str) -> np.ndarray:
    """The ids of a text, int32; a RequestError that calls it `name` if this tokenizer cannot read it."""
    try:
        return tokenizer.encode(text)
    except UnicodeError as error:
        raise RequestError(f"{name}: {tokenizer.name} needs UTF-8 text: {error}") from None


def check_ids(tokenizer: Tokenizer, prompt: Sequence[int] | np.ndarray, name: str) -> np.ndarray:
    """Token ids without what every prompt starts with, each in the vocabulary."""
    refused = RequestError(f"{name} = {shown(prompt)}: must be text or a flat list of token ids")
    if isinstance(prompt, np.ndarray):
        if prompt.size and not np.issubdtype(prompt.dtype, np.integer):
            raise refused
    elif not all(map(_is_integer, prompt)):
        raise refused
    ids = np.asarray(prompt, None if isinstance(prompt, np.ndarray) else object)  # object: an id of any size
    outside = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
    if outside.size:
        raise RequestError(
            f"{name}: token id {shown(int(outside[0]))} is outside the vocabulary [0, {tokenizer.vocab_size})"
        )
    ids = ids.astype(np.int32)
    ids = ids[1:] if ids.size and ids[0] == tokenizer.start_id else ids
    inside = ids if tokenizer.start_id == tokenizer.separator_id else ids[1:]
    if np.any(inside == tokenizer.separator_id):
        raise RequestError(f"{name}: the separator, {tokenizer.separator_id}, may stand only at its start")
    return ids


def _is_integer(value) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


class TextStream:
    """The text of a growing list of tokens, as far as it is certain: whole characters, and nothing of a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()):
        self._tokenizer, self._stops = tokenizer, tuple(stop_strings)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._released = 0  # characters
        self._ends: list[tuple[int, bool]] = []  # per token: whole characters so far, and whether one has only begun
        self.stopped = False
        self.tokens_before_stop = 0

    def add(self, token: int) -> str:
        """Returns the text that this token makes certain.

        If it completes a stop string, sets `stopped`, and `tokens_before_stop`: how many tokens end before that string.
        """
        self._held += self._decoder.decode(self._tokenizer.decode([token]))
        self._ends.append((self._released + len(self._held), bool(self._decoder.getstate()[0])))
        found = [i for i in (self._held.find(stop) for stop in self._stops) if i >= 0]
        if found:
            self.stopped = True
            stop = (self._released + min(found), False)
            self.tokens_before_stop = sum(end <= stop for end in self._ends)
            text, self._held = self._held[: min(found)], ""
            return text
        return self._release(len(self._held) - self._pending())

    def finish(self) -> str:
        """Returns what was held back, once no token follows."""
        if self.stopped:
            return ""
        self._held += self._decoder.decode(b"", final=True)
        return self._release(len(self._held))

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._released += length
        return text

    def _pending(self) -> int:
        """Length of the longest end of the text that may be the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        lengths = range(min(longest, len(self._held)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(self._held[-n:]) for stop in self._stops)), 0)


@dataclasses.dataclass(frozen=True)
class Completion:
    """What came after one prompt, without what ended it.

    Attributes:
      tokens: without the one that ended it. Of a stop string none is kept, nor one that lies on its beginning, of which
        `text` has the first part.
      finish_reason: "end" (the model ended the document), "stop" (a stop token or string), or "length".
      routed_fraction: share of the routed blocks that its tokens, the prompt's and refused drafts with them, entered.
      steps: passes through the whole model after the prompt; fewer than tokens where drafts were accepted.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    num_prompt_tokens: int
    routed_fraction: float
    steps: int


@dataclasses.dataclass
class Row:
    """One prompt on its way to a completion of at most `limit` tokens, or until one of the ids `stops`.

    `ends` are those of them by which the model itself ends a text.
    """

    ids: np.ndarray
    limit: int
    stops: frozenset[int]
    stream: TextStream
    num_routed: int
    ends: frozenset[int] = frozenset()
    finish_reason: str = ""
    new_text: str = ""
    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    fed: int = 0
    selected: int = 0
    steps: int = 0

    def take(self, produced: np.ndarray, fed: int, selected: int, steps: int) -> None:
        """Takes in all tokens produced so far; `new_text` is then what this call added."""
        self.new_text = ""
        if self.finish_reason:
            return
        self.fed, self.selected, self.steps = fed, selected, steps
        for token in map(int, produced[len(self.tokens) :]):
            if token in self.stops:
                self.finish_reason = "end" if token in self.ends else "stop"
                break
            self.tokens.append(token)
            self.new_text += self.stream.add(token)
            if self.stream.stopped:
                self.finish_reason = "stop"
                del self.tokens[self.stream.tokens_before_stop :]
                break
        if not self.finish_reason and len(self.tokens) >= self.limit:
            self.finish_reason = "length"
        if self.finish_reason:
            self.new_text += self.stream.finish()
        self.text += self.new_text

    def completion(self) -> Completion:
        fraction = self.selected / (self.num_routed * self.fed) if self.num_routed else 1.0
        return Completion(self.text, self.tokens, self.finish_reason, self.ids.size, fraction, self.steps)
