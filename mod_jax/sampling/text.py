"""From prompts to token ids, and from token ids to text as it can be shown so far."""

import codecs
import dataclasses
from collections.abc import Sequence

import numpy as np

from mod_jax.data.tokenizers import Tokenizer
from mod_jax.errors import RequestError

Prompt = str | bytes | Sequence[int]


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt, max_tokens: int, truncate: bool) -> np.ndarray:
    """The ids of a prompt behind the separator that starts every document; int32, at most `max_tokens`.

    Args:
      prompt: text, or token ids (with or without the leading separator).
      truncate: keep the end of a longer prompt.

    Raises:
      RequestError: if it is too long, not text, or holds ids outside the vocabulary.
    """
    if isinstance(prompt, str | bytes):
        try:
            ids = tokenizer.encode(prompt)
        except UnicodeError as error:
            raise RequestError(f"prompt: {tokenizer.name} needs UTF-8 text: {error}") from None
    else:
        try:
            ids = np.asarray(prompt)
            if ids.size and not np.issubdtype(ids.dtype, np.integer):
                raise TypeError
        except (TypeError, ValueError):
            raise RequestError(f"prompt = {prompt!r}: must be text or a list of token ids") from None
        if ids.ndim != 1:
            raise RequestError(f"prompt: token ids must be a flat list, found shape {ids.shape}")
        outside = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
        if outside.size:
            raise RequestError(f"prompt: token id {outside[0]} is outside the vocabulary [0, {tokenizer.vocab_size})")
        ids = ids[1:] if ids.size and ids[0] == tokenizer.separator_id else ids
        if np.any(ids == tokenizer.separator_id):
            raise RequestError(f"prompt: the separator, {tokenizer.separator_id}, may stand only at its start")
    num_tokens = ids.size + 1
    if num_tokens > max_tokens:
        if not truncate:
            raise RequestError(
                f"prompt: {num_tokens} tokens with the separator, at most {max_tokens} fit (model.context minus "
                "max_new_tokens): shorten it, ask for fewer new tokens, or truncate"
            )
        ids = ids[num_tokens - max_tokens :]
    return np.concatenate([[tokenizer.separator_id], ids]).astype(np.int32)


class TextStream:
    """The text of a growing list of tokens, as far as it is certain: whole characters, and nothing of a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()):
        self._tokenizer, self._stops = tokenizer, tuple(stop_strings)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Returns the text that this token makes certain; sets `stopped` if it completes a stop string."""
        self._held += self._decoder.decode(self._tokenizer.decode([token]))
        found = [i for i in (self._held.find(stop) for stop in self._stops) if i >= 0]
        if found:
            self.stopped = True
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
    """One prompt on its way to a completion of at most `limit` tokens."""

    ids: np.ndarray
    limit: int
    stream: TextStream
    num_routed: int
    finish_reason: str = ""
    new_text: str = ""
    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    fed: int = 0
    selected: int = 0
    steps: int = 0

    def take(self, produced: np.ndarray, stop_V: np.ndarray, fed: int, selected: int, steps: int) -> None:
        """Takes in all tokens produced so far; `new_text` is then what this call added."""
        self.new_text = ""
        if self.finish_reason:
            return
        self.fed, self.selected, self.steps = fed, selected, steps
        for token in map(int, produced[len(self.tokens) :]):
            if stop_V[token]:
                self.finish_reason = "end" if token == self.ids[0] else "stop"
                break
            self.tokens.append(token)
            self.new_text += self.stream.add(token)
            if self.stream.stopped:
                self.finish_reason = "stop"
                break
        if not self.finish_reason and len(self.tokens) >= self.limit:
            self.finish_reason = "length"
        if self.finish_reason:
            self.new_text += self.stream.finish()
        self.text += self.new_text

    def completion(self) -> Completion:
        fraction = self.selected / (self.num_routed * self.fed) if self.num_routed else 1.0
        return Completion(self.text, self.tokens, self.finish_reason, self.ids.size, fraction, self.steps)
