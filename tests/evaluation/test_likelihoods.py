"""Scores of continuations: the uncached model's own numbers, whatever the batch, the length and the chunk of logits."""

import jax
import numpy as np
import pytest

from mod_jax import tuning
from mod_jax.errors import RequestError
from mod_jax.evaluation.likelihoods import batches_of_rows, log_likelihoods, score_pairs
from mod_jax.sampling import Sampler
from mod_jax.sampling.stack import Stack

SHALLOW = {"model.depth": 2}
CONTEXTS = ["def f(x):\n", "", "a" * 40, "x"]
CONTINUATIONS = ["    return x", "import os", "bc", "yz"]


@pytest.fixture(scope="module")
def shared():
    return {}


@pytest.fixture
def sampler(build, shared):
    if "sampler" not in shared:
        shared["sampler"] = Sampler(build(**SHALLOW), "threshold")
    return shared["sampler"]


def expected(build, tools, ids, count):
    """(sum of log p of the last `count` ids, whether each is the likeliest) by the uncached forward."""
    row_1T = np.zeros((1, 32), np.int32)
    row_1T[0, : len(ids) - 1] = ids[:-1]
    logits_TV = tools.uncached(build(**SHALLOW), "threshold", row_1T)[0][0, : len(ids) - 1]
    log_p_TV = np.asarray(jax.nn.log_softmax(logits_TV))
    targets = np.array(ids[1:])
    chosen_T, greedy_T = log_p_TV[np.arange(len(targets)), targets], logits_TV.argmax(axis=1) == targets
    return chosen_T[-count:].sum(), bool(greedy_T[-count:].all())


def test_scores_are_those_of_the_uncached_model_and_a_long_context_loses_its_beginning(build, tools, sampler):
    found = log_likelihoods(sampler, CONTEXTS, CONTINUATIONS)
    for context, continuation, score in zip(CONTEXTS, CONTINUATIONS, found, strict=True):
        ids = [0, *sampler.tokenizer.encode(context + continuation)]
        kept = ids[-33:]  # the context of 32, and the last target
        assert (score.num_tokens, score.num_cut) == (len(continuation), len(ids) - len(kept))
        log_p, is_greedy = expected(build, tools, kept, len(continuation))
        assert score.log_p == pytest.approx(log_p, abs=1e-4)
        assert score.is_greedy == is_greedy
    assert found[2].num_cut == 1 + 40 + 2 - 33


def test_what_greedy_decoding_writes_is_greedy_and_nothing_else(sampler):
    prompt = "def f(x):"
    tokens = sampler.generate(prompt, temperature=0, max_new_tokens=8)[0].tokens
    given = sampler.tokenizer.encode(prompt).tolist()
    other = [*tokens[:-1], 1 + tokens[-1] % 256]
    scores = log_likelihoods(sampler, [given, given, given], [tokens, other, tokens[:1]])
    assert [score.is_greedy for score in scores] == [True, False, True]


def test_batches_and_chunks_of_logits_change_no_score(build, sampler, monkeypatch):
    at_once = log_likelihoods(sampler, CONTEXTS, CONTINUATIONS)
    for alone, together in zip(log_likelihoods(sampler, CONTEXTS, CONTINUATIONS, batch_tokens=1), at_once, strict=True):
        assert alone.log_p == pytest.approx(together.log_p, abs=1e-4)
    whole, sizes = Stack.logits, []

    def watched(stack, x_BTD):
        sizes.append(x_BTD.shape[0] * x_BTD.shape[1])
        return whole(stack, x_BTD)

    monkeypatch.setattr(Stack, "logits", watched)
    monkeypatch.setattr(tuning, "default_loss_chunk", lambda: 7)  # does not divide a batch of 32 positions
    chunked = log_likelihoods(Sampler(build(**SHALLOW), "threshold"), CONTEXTS, CONTINUATIONS)
    for score, together in zip(chunked, at_once, strict=True):
        assert score.log_p == pytest.approx(together.log_p, abs=1e-4)
        assert score[1:] == together[1:]
    assert set(sizes) == {7}  # the logits of no more tokens ever exist


def test_rows_of_one_bucket_go_together_as_far_as_there_is_room():
    lengths = [5, 100, 33, 60, 7, 128]  # buckets 32, 128, 64, 64, 32, 128
    assert list(batches_of_rows(lengths, context=512, batch_tokens=256)) == [[5, 1], [3, 2], [4, 0]]
    assert list(batches_of_rows(lengths, context=512, batch_tokens=64)) == [[5], [1], [3], [2], [4, 0]]
    assert [len(batch) for batch in batches_of_rows([50] * 7, context=50, batch_tokens=299)] == [4, 3]  # 5 take 6
    assert list(batches_of_rows([], context=512, batch_tokens=64)) == []


def test_what_cannot_be_scored_is_refused_before_anything_is_computed(sampler, monkeypatch):
    monkeypatch.setattr(sampler, "score", None)
    for contexts, continuations, message in (
        (["a"], ["b", "c"], "continuations: 2 for 1 contexts"),
        ("a", "b", "contexts = 'a': must be a list"),
        (["a"], [""], r"continuations\[0\]: has no tokens"),
        (["a", "b"], ["c", "d" * 33], r"continuations\[1\]: 33 tokens, more than the context of 32"),
        (["a"], [[5]], r"continuations\[0\]: must be of the type of its context"),
        (["a"], [3.5], r"continuations\[0\]: must be of the type of its context"),
        ([[1]], [[300]], r"continuations\[0\]: token id 300 is outside"),
        ([[1]], [[0, 5]], r"continuations\[0\]: starts with 0, which only a context"),
        (["a"], ["\ud800"], r"continuations\[0\]: bytes needs UTF-8 text"),
    ):
        with pytest.raises(RequestError, match=message):
            log_likelihoods(sampler, contexts, continuations)
    with pytest.raises(RequestError, match="batch_tokens = 0"):
        log_likelihoods(sampler, ["a"], ["b"], batch_tokens=0)
    with pytest.raises(RequestError, match=r"contexts\[0\]: has no tokens"):
        score_pairs(sampler, [([], [5])])


def test_top_k_has_no_likelihood(build):
    with pytest.raises(RequestError.__base__, match=r"topk.*looks at the future"):
        log_likelihoods(Sampler(build(**SHALLOW), "topk"), ["a"], ["b"])
