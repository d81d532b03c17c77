"""What experts do, by hand: loads, places in the row, and how far the token alone decides."""

import numpy as np
import pytest

from mod_jax.analysis.expert_stats import ExpertPositions, choices_of_tokens, explained_by_token, load_statistics


def test_loads_by_hand():
    """Two experts and two no-ops; of eight claims 1, 3, 4, 0."""
    found = load_statistics(np.array([1, 3, 4, 0]), 2)
    entropy = -(1 / 8 * np.log(1 / 8) + 3 / 8 * np.log(3 / 8) + 1 / 2 * np.log(1 / 2)) / np.log(4)
    assert found == {"load_entropy": pytest.approx(entropy), "smallest_load": 0.5, "dead": 0}
    assert load_statistics(np.array([1.0, 1.0]), 2) == {"load_entropy": pytest.approx(1), "smallest_load": 1, "dead": 0}
    assert load_statistics(np.array([97, 1, 0, 2]), 3)["dead"] == 2  # 4 % of an even load, and nothing
    assert load_statistics(np.array([5]), 1) == {"load_entropy": 1.0, "smallest_load": 1.0, "dead": 0}
    assert all(np.isnan(value) for value in load_statistics(np.zeros(2), 2).values())


def test_places_by_hand():
    """Rows of 20 tokens, two per tenth; one expert with a slot in the first half of a row, and a no-op (id 1)."""
    choice_BTA = np.zeros((2, 20, 1), int)
    choice_BTA[:, 4:6] = 1  # the third tenth
    has_slot_BTA = (choice_BTA == 0) & (np.arange(20) < 10)[None, :, None]
    valid_BT = np.ones((2, 20), bool)
    valid_BT[1, 18:] = False
    places = ExpertPositions((3,), 1)
    for rows in (slice(0, 1), slice(1, 2)):  # sums, however batched
        places.update(choice_BTA[None, rows], has_slot_BTA[None, rows], valid_BT[rows])
    found = places.metrics()
    assert [found[f"experts/block03/computed_by_position/{i}"] for i in range(10)] == [1, 1, 0, 1, 1] + [0] * 5
    dropped = [found.get(f"experts/block03/dropped_by_position/{i}") for i in range(10)]
    assert dropped == [0, 0, None, 0, 0] + [1] * 5  # where nothing is claimed, nothing is dropped


def test_a_choice_by_the_token_alone_and_one_by_chance():
    rng = np.random.default_rng(0)
    token, chance = rng.integers(0, 16, 4000), rng.integers(0, 4, 4000)
    assert explained_by_token(token % 4, token).share == pytest.approx(1)
    by_chance = explained_by_token(chance, token)
    assert by_chance.share == pytest.approx(by_chance.shuffled, abs=5e-3)
    rare = explained_by_token(chance, np.arange(4000))  # every token once: explained, and so are shuffled choices
    assert rare.share == rare.shuffled == pytest.approx(1)
    assert np.isnan(explained_by_token(np.zeros(9, int), token[:9]).share)


def test_frequent_tokens_stand_with_their_favourite():
    token = np.array([5] * 4 + [7] * 3 + [6] * 2 + [9])
    choice = np.array([1, 1, 1, 0] + [0, 0, 0] + [1, 1] + [2])
    ids, share = choices_of_tokens(choice, token, 3, most=3)
    assert ids.tolist() == [7, 6, 5]  # the favourite of 7 is 0; 6 is surer of 1 than 5 is
    np.testing.assert_allclose(share, [[1, 0, 0], [0, 1, 0], [0.25, 0.75, 0]])
