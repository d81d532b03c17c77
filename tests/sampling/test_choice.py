"""How a token is chosen: by hand-worked distributions, by frequency, and what is refused."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax.errors import RequestError
from mod_jax.sampling.choice import Options, adjust, choose, make_knobs, make_options, probabilities, row_keys

LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
programs = {"adjust": jax.jit(adjust), "choose": jax.jit(choose)}


def keys(seeds):
    """Of rows with one prompt and these seeds."""
    return row_keys(seeds, [np.zeros(3, np.int32)] * len(seeds))


def distribution(**options) -> np.ndarray:
    logits_BV = programs["adjust"](jnp.asarray(LOGITS)[None], make_knobs([Options(**options)]))
    return np.asarray(jax.nn.softmax(logits_BV[0]))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(), [0.5, 0.25, 0.15, 0.1]),
        (dict(temperature=0.5), np.array([25, 6.25, 2.25, 1]) / 34.5),  # squares
        (dict(top_k=1), [1, 0, 0, 0]),
        (dict(top_k=2), [2 / 3, 1 / 3, 0, 0]),
        (dict(top_k=99), [0.5, 0.25, 0.15, 0.1]),
        (dict(top_p=0.49), [1, 0, 0, 0]),
        (dict(top_p=0.6), [2 / 3, 1 / 3, 0, 0]),  # 0.5 is not enough, 0.75 is
        (dict(top_p=0.8), np.array([50, 25, 15, 0]) / 90),
        (dict(top_p=1e-30), [1, 0, 0, 0]),
        (dict(top_k=3, top_p=0.6), [2 / 3, 1 / 3, 0, 0]),
        (dict(temperature=1e-30), [1, 0, 0, 0]),
        (dict(temperature=1e30), [0.25] * 4),
    ],
)
def test_the_distribution_by_hand(options, expected):
    np.testing.assert_allclose(distribution(**options), expected, atol=1e-5)


def test_of_equal_logits_top_k_keeps_the_lower_ids():
    logits_BV = programs["adjust"](jnp.zeros((1, 5)), make_knobs([Options(top_k=2)]))
    assert jnp.isfinite(logits_BV)[0].tolist() == [True, True, False, False, False]


def test_temperature_0_is_greedy_exactly_and_the_first_of_equals():
    logits_BV = jnp.array([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    for seed in range(5):
        chosen_B = programs["choose"](logits_BV, make_knobs([Options(temperature=0)] * 2), keys([seed] * 2))
        assert chosen_B.tolist() == [1, 0]


def test_choices_follow_the_distribution():
    num_draws = 4000
    logits_BV = jnp.broadcast_to(jnp.asarray(LOGITS)[None], (num_draws, 4))
    options = dict(temperature=1.3, top_p=0.95)
    drawn_B = programs["choose"](logits_BV, make_knobs([Options(**options)] * num_draws), keys(range(num_draws)))
    counts = np.bincount(np.asarray(drawn_B), minlength=4)
    expected = distribution(**options) * num_draws
    assert counts[expected == 0].sum() == 0
    chi_square = np.sum((counts - expected)[expected > 0] ** 2 / expected[expected > 0])
    assert chi_square < 16.3  # 3 degrees of freedom: exceeded by chance once in a thousand, and the seed is fixed


def test_the_frequency_test_can_fail():
    drawn_B = programs["choose"](
        jnp.broadcast_to(jnp.asarray(LOGITS)[None], (4000, 4)), make_knobs([Options()] * 4000), keys(range(4000))
    )
    counts, expected = np.bincount(np.asarray(drawn_B), minlength=4), distribution(temperature=1.3) * 4000
    assert np.sum((counts - expected) ** 2 / expected) > 16.3


def test_a_row_draws_by_its_own_seed_and_options_whatever_its_batch_mates_ask():
    mates = [Options(seed=3), Options(seed=4, temperature=0), Options(seed=3, top_k=2), Options(seed=3, top_p=0.1)]
    noisy_V = jnp.asarray(np.random.default_rng(0).normal(size=1000) * 3, jnp.float32)
    for row, alone in enumerate(mates):
        for logits_V in (noisy_V, jnp.zeros(1000)):
            chosen = [
                programs["choose"](
                    jnp.broadcast_to(logits_V[None], (len(rows), 1000)),
                    make_knobs(rows),
                    keys([o.seed for o in rows]),
                )
                for rows in (mates, [alone])
            ]
            assert chosen[0][row] == chosen[1][0]
    p_BV = probabilities(jnp.broadcast_to(noisy_V[None], (4, 1000)), make_knobs(mates))
    kept = np.sum(np.asarray(p_BV) > 0, axis=-1)
    assert kept[0] == 1000  # a float32 sum of its probabilities reaches 1 sooner
    assert kept[1:].tolist() == [1, 2, 1]


def test_numpy_numbers_are_numbers_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = Options(temperature=np.float32(0.5), top_p=np.float16(0.5), top_k=np.int64(3), seed=np.uint8(4))
        knobs = make_knobs([options, Options(temperature=1e300, top_p=1e-300)])
    assert [knob_B[0] for knob_B in knobs] == [0.5, 3, 0.5]
    assert np.isfinite(knobs.temperature_B).all()


def test_one_options_for_all_prompts_or_one_per_prompt():
    assert make_options(None, dict(seed=2), 2) == [Options(seed=2)] * 2
    several = [Options(seed=1), Options(top_k=3)]
    assert make_options(several, {}, 2) == several
    for options, changes, message in (
        (None, dict(temprature=1.0), "temprature: no such option; did you mean temperature"),
        (None, dict(zzz=1.0), "zzz: no such option; there are max_new_tokens, temperature"),
        (several, {}, "options: 2 for 3 prompts"),
        (Options(), dict(seed=1), "seed: give it within options"),
        ({"seed": 1}, {}, "options = .*must be Options, or a list"),
        ([Options(), None, None], {}, "options = .*must be Options, or a list"),
    ):
        with pytest.raises(RequestError, match=message):
            make_options(options, changes, 3)


@pytest.mark.parametrize(
    "bad",
    [
        dict(temperature=-0.1),
        dict(temperature=float("nan")),
        dict(temperature=float("inf")),
        dict(temperature="warm"),
        dict(temperature=10**400),
        dict(top_k=0),
        dict(top_k=-1),
        dict(top_k=1.5),
        dict(top_p=0.0),
        dict(top_p=1.01),
        dict(top_p=float("nan")),
        dict(seed=-1),
        dict(seed=2**31),
        dict(max_new_tokens=0),
        dict(max_new_tokens=True),
        dict(stop_strings="\n"),
        dict(stop_strings=[""]),
        dict(stop_tokens="x"),
        dict(truncate=1),
        dict(seed=10**5000),
        dict(top_k=-(10**5000)),
    ],
)
def test_bad_values_are_refused_by_name(bad):
    with pytest.raises(RequestError, match=next(iter(bad))):
        Options(**bad)
