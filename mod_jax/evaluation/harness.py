"""Our models as the lm-evaluation-harness sees them: `lm_eval.simple_evaluate(model="mod_jax", ...)`.

Importing this module registers the model; `python -m mod_jax.lm_eval` does so and starts the harness's own command.
What a request means is the harness's convention throughout, so that numbers compare with those of its other models: a
text begins as a prompt does, spaces at the end of a context belong to the continuation, a row that is too long
loses its beginning, and a long text is scored in windows that overlap by one token.
"""

from __future__ import annotations

import collections
import difflib
import inspect
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import lm_eval.models  # noqa: F401  the harness registers its own only as long as there are no others
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from mod_jax.errors import RequestError
from mod_jax.evaluation.budget import budgeted_sampler, check_selection
from mod_jax.evaluation.likelihoods import BATCH_TOKENS, Pair, batches_of_rows, score_pairs
from mod_jax.sampling.choice import Options, shown
from mod_jax.sampling.text import encode_text
from mod_jax.trained import restore

MAX_NEW_TOKENS = 256  # of a task that does not say; the harness's other models have the same
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names of it, the first one given


@register_model("mod_jax")
class HarnessModel(TemplateLM):
    """A run's checkpoint under one causal selection, at one capacity."""

    def __init__(
        self,
        workdir: str,
        step: int | None = None,
        selection: str | None = None,
        capacity: float | None = None,
        context: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
        data: int = 1,
        fsdp: int = 1,
        tensor: int = 1,
        expert: int = 1,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
        **unknown: Any,
    ):
        """Restores the checkpoint.

        Args:
          workdir, step, context: as for `restore`.
          selection, capacity: as for `budgeted_sampler`.
          batch_tokens: tokens of one forward pass at most.
          data, fsdp, tensor, expert: the mesh to lay the model out over, as for `restore`.
          batch_size, max_batch_size, device: given by the harness, and not read. Rows are put together by
            `batch_tokens`; JAX chooses the device (JAX_PLATFORMS).

        Raises:
          ConfigError: an argument cannot be used. StorageError: there is no checkpoint.
        """
        super().__init__()
        for name in unknown:
            known = [name for name in inspect.signature(HarnessModel).parameters if name != "unknown"]
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise RequestError(f"model_args: {name}: no such argument; {hint}")
        check_selection(selection, capacity)
        mesh = dict(data=data, fsdp=fsdp, tensor=tensor, expert=expert)
        model = restore(str(workdir), step, context=context, mesh=mesh)
        self._sampler, self._batch_tokens = budgeted_sampler(model, selection, capacity), batch_tokens
        self._context, self._tokenizer = self._sampler.config.model.context, self._sampler.tokenizer
        budget = "" if capacity is None else f", at capacity {capacity:g}"
        print(f"step {model.step} of {workdir}: {self._sampler.describe(1)}{budget}", file=sys.stderr, flush=True)

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.separator_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        start = self._tokenizer.start_id
        return self._tokenizer.separator_id if start is None else start

    @property
    def tokenizer_name(self) -> str:
        return f"mod_jax:{self._tokenizer.digest}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text, behind what a prompt starts with unless `add_special_tokens` is False."""
        ids, start = encode_text(self._tokenizer, string, "text of a task").tolist(), self._tokenizer.start_id
        return ids if add_special_tokens is False or start is None else [start, *ids]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        found = {}
        for index, score in self._score([pair for _, *pair in requests], disable_tqdm):
            found[index] = score.log_p, score.is_greedy
            if requests[index][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[index][0], found[index])
        return [found[index] for index in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """log p of each whole text, in windows: the first behind the prefix, others behind the text's own tokens."""
        texts = [request.args[0] for request in requests]
        windows = [
            (index, make_disjoint_window(window))
            for index, text in enumerate(texts)
            for window in get_rolling_token_windows(
                self.tok_encode(text, add_special_tokens=False), self.prefix_token_id, self._context, context_len=1
            )
        ]
        log_p = [0.0] * len(texts)
        for place, score in self._score([pair for _, pair in windows], disable_tqdm):
            log_p[windows[place][0]] += score.log_p
        for text, total in zip(texts, log_p, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return log_p

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Completes each context until one of its stop strings; greedily, unless a task asks for another way."""
        seen: collections.Counter = collections.Counter()
        prompts, options = [], []
        for context, asked in (request.args for request in requests):
            prompts.append(context)
            options.append(make_options(asked, seed=seen[context]))  # samples of one context must differ
            seen[context] += 1
        self._sampler.check(prompts, options)  # whatever is wrong is said before anything is computed
        lengths = [
            min(self._context, len(self.tok_encode(prompt)) + option.max_new_tokens)
            for prompt, option in zip(prompts, options, strict=True)
        ]
        texts = [""] * len(prompts)
        with tqdm(total=len(prompts), disable=disable_tqdm, desc="generate_until") as bar:
            for batch in batches_of_rows(lengths, self._context, self._batch_tokens, self._sampler.row_groups):
                completions = self._sampler.generate([prompts[i] for i in batch], [options[i] for i in batch])
                for index, completion in zip(batch, completions, strict=True):
                    texts[index] = completion.text
                    self.cache_hook.add_partial("generate_until", requests[index].args, completion.text)
                bar.update(len(batch))
        return texts

    def _score(self, pairs: Sequence[Pair], disable_tqdm: bool) -> Iterable:
        scores = score_pairs(self._sampler, pairs, batch_tokens=self._batch_tokens)
        return tqdm(scores, total=len(pairs), disable=disable_tqdm, desc="loglikelihood")


def make_options(asked: dict[str, Any], seed: int) -> Options:
    """What a task asks of a generation, in our words.

    Raises:
      RequestError: it asks for something that we do not have.
    """
    asked = dict(asked)
    limits = [asked.pop(name) for name in LIMITS if name in asked]
    until = asked.pop("until", None) or []
    temperature = asked.pop("temperature", None)
    do_sample = asked.pop("do_sample", None)
    if do_sample is None:
        do_sample = bool(temperature)
    rest = {name: asked.pop(name) for name in ("top_k", "top_p") if asked.get(name) is not None}
    if asked := {name: value for name, value in asked.items() if value is not None}:
        name, value = next(iter(asked.items()))
        known = ("until", *LIMITS, "do_sample", "temperature", "top_k", "top_p")
        raise RequestError(f"gen_kwargs: {name} = {shown(value)}: not supported; there are {', '.join(known)}")
    return Options(
        max_new_tokens=int(limits[0]) if limits else MAX_NEW_TOKENS,
        temperature=float(1.0 if temperature is None else temperature) if do_sample else 0.0,
        seed=seed,
        stop_strings=[text for text in ([until] if isinstance(until, str) else until) if text],
        truncate=True,
        **rest,
    )
