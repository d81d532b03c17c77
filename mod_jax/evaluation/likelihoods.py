"""How likely a text is as the continuation of another one: what multiple-choice tests and perplexities are made of.

Only causal selections have an answer: top-k would choose the tokens of the context by looking at the continuation.
Vocabulary: a *pair* is the ids of a context and of its continuation. Its *row* is both in one, of which the model reads
all but the last. A row that is longer than the model's context loses its beginning.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mod_jax.errors import RequestError
from mod_jax.sampling.choice import check_integer, shown
from mod_jax.sampling.generate import Sampler, batch_bucket, bucket
from mod_jax.sampling.text import Prompt, check_ids, encode_prompt, encode_text
from mod_jax.trained import TrainedModel

BATCH_TOKENS = 2**13  # of one forward pass; the caches of all blocks are as long
ANY_LENGTH = 2**31

Pair = tuple[Sequence[int], Sequence[int]]


class LogLikelihood(NamedTuple):
    """What a model says of one continuation.

    Attributes:
      log_p: the sum over its tokens of log p(token | all before it), in nats.
      is_greedy: whether greedy decoding would have written it.
      num_tokens: of the continuation.
      num_cut: tokens that the context lost at its beginning.
    """

    log_p: float
    is_greedy: bool
    num_tokens: int
    num_cut: int


def log_likelihoods(
    model: Sampler | TrainedModel | str | os.PathLike,
    contexts: Sequence[Prompt],
    continuations: Sequence[Prompt],
    *,
    batch_tokens: int = BATCH_TOKENS,
) -> list[LogLikelihood]:
    """Scores each continuation behind its context.

    Text is tokenised as a whole, context and continuation together: the continuation's tokens are those that the
    context alone does not account for. Every context begins as a prompt does.

    Args:
      model: a workdir, a restored model, or a `Sampler`, which has its selection and its cut-offs (see
        `budget.budgeted_sampler`).
      contexts, continuations: as many of each; text, or token ids. A context may be empty.
      batch_tokens: tokens of one forward pass at most, or one row. Bounds memory; changes no result.

    Raises:
      RequestError: naming the text that cannot be scored.
    """
    for name, texts in (("contexts", contexts), ("continuations", continuations)):
        if isinstance(texts, str | bytes) or not isinstance(texts, Sequence):
            raise RequestError(f"{name} = {shown(texts)}: must be a list of texts")
    if len(contexts) != len(continuations):
        raise RequestError(f"continuations: {len(continuations)} for {len(contexts)} contexts; there must be as many")
    sampler = model if isinstance(model, Sampler) else Sampler(model)
    pairs = [
        _encode_pair(sampler, context, continuation, index)
        for index, (context, continuation) in enumerate(zip(contexts, continuations, strict=True))
    ]
    found = dict(score_pairs(sampler, pairs, batch_tokens=batch_tokens))
    return [found[index] for index in range(len(pairs))]


def score_pairs(
    sampler: Sampler, pairs: Sequence[Pair], *, batch_tokens: int = BATCH_TOKENS
) -> Iterator[tuple[int, LogLikelihood]]:
    """Yields (index of a pair, its score), the longest rows first. Ids are taken as they are.

    Raises:
      RequestError: before anything is computed, naming the pair that cannot be scored.
    """
    check_integer("batch_tokens", batch_tokens, "an integer >= 1", lambda x: x >= 1)
    context = sampler.config.model.context
    for index, (given, continuation) in enumerate(pairs):
        if not len(continuation) or not len(given):
            what = "continuations" if len(given) else "contexts"
            raise RequestError(f"{what}[{index}]: has no tokens, so there is nothing to score")
        if len(continuation) > context:
            raise RequestError(
                f"continuations[{index}]: {len(continuation)} tokens, more than the context of {context}; "
                "raise the context, or score it in parts"
            )
    return _scored(sampler, pairs, batch_tokens)


def _scored(sampler: Sampler, pairs: Sequence[Pair], batch_tokens: int) -> Iterator[tuple[int, LogLikelihood]]:
    context = sampler.config.model.context
    rows = [np.concatenate([given, continuation])[-context - 1 :].astype(np.int32) for given, continuation in pairs]
    lengths = [row.size - 1 for row in rows]
    for indices in batches_of_rows(lengths, context, batch_tokens, sampler.row_groups):
        for index, scores in zip(indices, sampler.score([rows[i] for i in indices]), strict=True):
            given, continuation = pairs[index]
            count = len(continuation)
            log_p, is_greedy = scores.log_p[-count:], scores.is_greedy[-count:]
            cut = len(given) + count - rows[index].size
            yield index, LogLikelihood(float(log_p.sum(dtype=np.float64)), bool(is_greedy.all()), count, cut)


def batches_of_rows(lengths: Sequence[int], context: int, batch_tokens: int, groups: int = 1) -> Iterable[list[int]]:
    """Indices of rows that go together: of one bucket of lengths, and as many as `batch_tokens` has room for.

    What fills a batch up to its own bucket counts too. `groups`: parts that a mesh splits rows into, each with as much
    room.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    batch: list[int] = []
    for index in order:
        width = bucket(lengths[batch[0]], context) if batch else 0
        rows_after = batch_bucket(len(batch) + 1, groups) // groups
        if batch and (bucket(lengths[index], context) != width or rows_after * width > batch_tokens):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _encode_pair(sampler: Sampler, context: Prompt, continuation: Prompt, index: int) -> Pair:
    """The ids of a pair; the context's behind what every prompt starts with."""
    tokenizer = sampler.tokenizer
    names = f"contexts[{index}]", f"continuations[{index}]"
    are_text = [isinstance(text, str | bytes) for text in (context, continuation)]
    if are_text[0] != are_text[1] or (are_text[0] and type(context) is not type(continuation)):
        raise RequestError(f"{names[1]}: must be of the type of its context, text or token ids")
    given = encode_prompt(tokenizer, context, ANY_LENGTH, truncate=False, name=names[0])
    if are_text[0]:
        num_given = encode_text(tokenizer, context, names[0]).size
        return given, encode_text(tokenizer, context + continuation, names[1])[num_given:]
    if not isinstance(continuation, Sequence | np.ndarray):
        raise RequestError(f"{names[1]} = {shown(continuation)}: must be text or a flat list of token ids")
    ids = check_ids(tokenizer, continuation, names[1])
    if ids.size != len(continuation):
        raise RequestError(f"{names[1]}: starts with {tokenizer.start_id}, which only a context starts with")
    return given, ids
