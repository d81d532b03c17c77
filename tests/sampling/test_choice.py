"""How a token is chosen: by hand-worked distributions, by frequency, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax.errors import RequestError
from mod_jax.sampling.choice import Options, adjust, choose, row_keys

LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
programs = {"adjust": jax.jit(adjust), "choose": jax.jit(choose)}


def distribution(**options) -> np.ndarray:
    logits_BV = programs["adjust"](jnp.asarray(LOGITS)[None], Options(**options).knobs())
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
    logits_BV = programs["adjust"](jnp.zeros((1, 5)), Options(top_k=2).knobs())
    assert jnp.isfinite(logits_BV)[0].tolist() == [True, True, False, False, False]


def test_s10_temperature_0_is_greedy_exactly_and_the_first_of_equals():
    logits_BV = jnp.array([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    for seed in range(5):
        chosen_B = programs["choose"](logits_BV, Options(temperature=0).knobs(), row_keys(seed, 2))
        assert chosen_B.tolist() == [1, 0]


def test_choices_follow_the_distribution():
    num_draws = 4000
    logits_BV = jnp.broadcast_to(jnp.asarray(LOGITS)[None], (num_draws, 4))
    options = dict(temperature=1.3, top_p=0.95)
    drawn_B = programs["choose"](logits_BV, Options(**options).knobs(), row_keys(1, num_draws))
    counts = np.bincount(np.asarray(drawn_B), minlength=4)
    expected = distribution(**options) * num_draws
    assert counts[expected == 0].sum() == 0
    chi_square = np.sum((counts - expected)[expected > 0] ** 2 / expected[expected > 0])
    assert chi_square < 16.3  # 3 degrees of freedom: exceeded by chance once in a thousand, and the seed is fixed


def test_the_frequency_test_can_fail():
    drawn_B = programs["choose"](
        jnp.broadcast_to(jnp.asarray(LOGITS)[None], (4000, 4)), Options().knobs(), row_keys(1, 4000)
    )
    counts, expected = np.bincount(np.asarray(drawn_B), minlength=4), distribution(temperature=1.3) * 4000
    assert np.sum((counts - expected) ** 2 / expected) > 16.3


def test_a_rows_draws_do_not_depend_on_its_batch_mates():
    assert jnp.array_equal(jax.random.key_data(row_keys(3, 5))[:2], jax.random.key_data(row_keys(3, 2)))


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
    ],
)
def test_s10_bad_values_are_refused_by_name(bad):
    with pytest.raises(RequestError, match=next(iter(bad))):
        Options(**bad)
