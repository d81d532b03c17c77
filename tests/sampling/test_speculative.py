"""Drafts change the speed and nothing else: greedy output token for token, sampled output in distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax.errors import RequestError
from mod_jax.models.blocks import Choice
from mod_jax.models.memory import EMPTY
from mod_jax.sampling import Sampler
from mod_jax.sampling.choice import Options, make_knobs, probabilities, row_keys
from mod_jax.sampling.speculative import accept, draft_and_verify

PROMPTS = ["def f(x):", "x", ""]


def test_greedy_output_is_that_of_decoding_one_by_one(build):
    plain, drafting = (Sampler(build(), "threshold", num_drafts=n, capacity_L=(1.0, 1.0)) for n in (0, 3))
    for expected, actual in zip(
        plain.generate(PROMPTS, temperature=0), drafting.generate(PROMPTS, temperature=0), strict=True
    ):
        assert actual.tokens == expected.tokens
        assert actual.finish_reason == expected.finish_reason
        assert expected.steps == len(expected.tokens) - 1  # the first comes with the prompt
        assert actual.steps <= expected.steps


def test_a_cache_without_room_for_all_drafts_grows_first(build):
    model = build(**{"model.depth": 2})
    everything = dict(selection="threshold", cutoffs_L=[-100.0])
    small, roomy = (Sampler(model, **everything, num_drafts=3, capacity_L=(capacity,)) for capacity in (0.5, 1.0))
    text = "eighteen letters.."
    assert small.generate(text, temperature=0) == roomy.generate(text, temperature=0)
    assert small._grow._cache_size() == 1


def test_drafts_are_all_accepted_where_the_routed_blocks_do_nothing(build, tools):
    model = build(**{"model.depth": 2})
    sampler = Sampler(model, "threshold", cutoffs_L=[1e9], num_drafts=3)
    whole = sampler.generate("x", temperature=0, max_new_tokens=13)[0]
    assert (len(whole.tokens), whole.steps) == (13, 3)  # one with the prompt, then four a step
    stop = whole.tokens[6]
    stopped = sampler.generate("x", temperature=0, max_new_tokens=13, stop_tokens=[stop])[0]
    assert stopped.tokens == whole.tokens[: whole.tokens.index(stop)]
    assert "".join(sampler.stream("x", temperature=0, max_new_tokens=13)) == whole.text
    for max_new_tokens in (1, 2, 4, 5, 6, 30):
        limited = sampler.generate("x", temperature=0, max_new_tokens=max_new_tokens)[0]
        assert len(limited.tokens) == max_new_tokens


def test_what_was_refused_leaves_no_trace_in_the_cache(build, tools):
    """After a round, the cache decodes the next token exactly as the uncached model does."""
    model = build()
    T, num_drafts = 16, 3
    tokens_BT = tools.random_tokens(3, T)
    lengths_B = np.array([7, 1, 10], np.int32)
    stack = tools.stack_of(model.config, model.params)
    _, _, cache = tools.prefill(model, "threshold", tokens_BT, np.arange(T)[None] < lengths_B[:, None])
    last_B = jnp.asarray(tokens_BT[np.arange(3), lengths_B])

    @jax.jit
    def round_of(last_B, positions_B, cache):
        given = (last_B, positions_B, jnp.ones(3, bool), cache, Choice("threshold", model.cutoffs_L))
        sizes = dict(num_ids=257, num_positions=T, num_drafts=num_drafts, kept_L=(1, 2))
        return draft_and_verify(
            stack, *given, make_knobs([Options(temperature=0)] * 3), row_keys(range(3), [np.zeros(0)] * 3), **sizes
        )

    verified = round_of(last_B, lengths_B, cache)
    assert verified.emitted_B.min() < num_drafts + 1  # something was refused
    rows = [[*tokens_BT[b, : lengths_B[b] + 1], *verified.tokens_BG1[b, : verified.emitted_B[b]]] for b in range(3)]
    known_B = np.array([len(row) for row in rows])
    padded_BT = np.stack([np.pad(row, (0, T - len(row))) for row in rows]).astype(np.int32)
    logits_BTV, selected_LBT = tools.uncached(model, "threshold", padded_BT)
    for b in range(3):
        start = lengths_B[b]
        expected = np.argmax(logits_BTV[b, start : known_B[b] - 1], axis=-1)
        assert rows[b][start + 1 :] == expected.tolist()
        for depth, index in ((1, 0), (3, 1)):
            stored = np.asarray(verified.cache[depth].positions_BS[b])
            selected = np.flatnonzero(selected_LBT[index, b, : known_B[b] - 1])  # the last token was not run
            assert stored[: selected.size].tolist() == selected.tolist()
            assert (stored[selected.size :] == EMPTY).all()
            assert verified.cache[depth].lengths_B[b] == selected.size


P = np.array([[0.6, 0.3, 0.1, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]], np.float32)
Q = np.array([[0.2, 0.3, 0.4, 0.1], [0.4, 0.3, 0.2, 0.1]], np.float32)


def emitted(p, q, num_draws: int, seed: int = 0):
    """(drafted tokens, the own token, how many were accepted) of many independent rounds."""
    keys_3 = jax.random.split(jax.random.key(seed), 3)
    drafted_BG = jax.random.categorical(keys_3[0], jnp.log(jnp.asarray(q))[None], axis=-1, shape=(num_draws, len(q)))
    p_BGV, q_BGV = (jnp.broadcast_to(jnp.asarray(x)[None], (num_draws, *x.shape)) for x in (p, q))
    keys = (jax.random.split(key, num_draws) for key in keys_3[1:])
    own_B, accepted_B = jax.jit(accept)(p_BGV, q_BGV, drafted_BG, *keys)
    return np.asarray(drafted_BG), np.asarray(own_B), np.asarray(accepted_B)


def chi_square(tokens, p) -> float:
    counts, expected = np.bincount(tokens, minlength=len(p)), p * len(tokens)
    assert counts[p == 0].sum() == 0
    return float(np.sum((counts - expected)[p > 0] ** 2 / expected[p > 0]))


def test_every_emitted_token_follows_the_whole_models_distribution():
    num_draws = 20_000
    drafted_BG, own_B, accepted_B = emitted(P, Q, num_draws)
    # Three degrees of freedom: 16.3 is exceeded by chance once in a thousand, and the seed is fixed.
    first_B = np.where(accepted_B >= 1, drafted_BG[:, 0], own_B)
    assert chi_square(first_B, P[0]) < 16.3
    second_B = np.where(accepted_B >= 2, drafted_BG[:, 1], own_B)[accepted_B >= 1]
    assert chi_square(second_B, P[1]) < 16.3
    assert chi_square(own_B[accepted_B == 2], P[2]) < 16.3
    # A draft is accepted with probability sum(min(p, q)): 0.2 + 0.3 + 0.1 = 0.6, then 0.1 + 0.2 + 0.2 + 0.1 = 0.6.
    assert np.mean(accepted_B >= 1) == pytest.approx(0.6, abs=0.02)
    assert np.mean(accepted_B == 2) == pytest.approx(0.36, abs=0.02)
    # The test can fail: the drafts themselves follow another distribution, and so do tokens drawn from p when refused.
    assert chi_square(drafted_BG[:, 0][drafted_BG[:, 0] < 3], P[0]) > 100


def test_equal_distributions_accept_everything_and_disjoint_ones_nothing():
    assert (emitted(P, P[:2], 500)[2] == 2).all()
    greedy = np.eye(4, dtype=np.float32)
    _, own_B, accepted_B = emitted(greedy[[0, 1, 2]], greedy[[0, 2]], 50)
    assert (accepted_B == 1).all()
    assert (own_B == 1).all()


def test_sampled_text_has_the_distribution_of_the_model(build):
    """The second token after a prompt, over many rows, with drafts and without."""
    model = build(**{"model.depth": 2})
    options = dict(temperature=0.3, top_k=4, max_new_tokens=3)
    pairs = []
    for num_drafts, seed in ((0, 1), (2, 2), (0, 3)):
        sampler = Sampler(model, "threshold", num_drafts=num_drafts, capacity_L=(1.0,))
        completions = sampler.generate(["x"] * 400, [Options(seed=1000 * seed + i, **options) for i in range(400)])
        pairs.append([tuple(c.tokens[:2]) for c in completions])

    def distance(first, second):
        kinds = sorted({*first, *second})
        return 0.5 * sum(abs(first.count(k) - second.count(k)) for k in kinds) / len(first)

    same, drafted = distance(pairs[0], pairs[2]), distance(pairs[0], pairs[1])
    assert drafted < same + 0.08  # total variation between two samples of 400: as between two without drafts


def test_probabilities_are_those_that_choose_draws_from():
    logits_BTV = jnp.log(jnp.asarray([[[0.5, 0.25, 0.15, 0.1]]]))
    for options, expected in ((dict(top_k=2), [2 / 3, 1 / 3, 0, 0]), (dict(temperature=0), [1, 0, 0, 0])):
        actual = probabilities(logits_BTV, make_knobs([Options(**options)]))
        np.testing.assert_allclose(actual, [[expected]], atol=1e-6)


def test_what_cannot_draft_is_refused(build):
    for bad in (-1, 1.5, True, 32):
        with pytest.raises(RequestError, match="num_drafts"):
            Sampler(build(), num_drafts=bad)
    for layout in ("F", "E"):
        with pytest.raises(RequestError, match="no routed blocks to leave out"):
            Sampler(build(**{"model.layout": layout, "routing.aux_weight": 0.0}), num_drafts=2)


@pytest.mark.parametrize(
    "experts",
    [
        {"experts.noop": 2, "experts.chosen": 2},
        pytest.param({"experts.choice": "expert", "experts.capacity": 0.5}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_greedy_output_with_experts_is_that_of_decoding_one_by_one(build, experts):
    model = build(**{"model.layout": "Ee", "model.depth": 2, "experts.count": 4, **experts})
    plain, drafting = (Sampler(model, "threshold", num_drafts=n, capacity_L=(1.0,)) for n in (0, 3))
    expected, actual = (sampler.generate(PROMPTS, temperature=0) for sampler in (plain, drafting))
    assert [row.tokens for row in actual] == [row.tokens for row in expected]
    assert sum(row.steps for row in actual) < sum(row.steps for row in expected)
