"""Who computes on which token, by hand; that slots are causal; and that tokens come back from where they went."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import expert_routing as er

NOWHERE = 99


def slots(choices, num_experts, num_slots, *, valid=None, pace=None):
    """`assign_slots` as lists, 99 where a claim has no slot."""
    choice_TA = jnp.asarray(choices, jnp.int32)
    valid_T = jnp.ones(choice_TA.shape[0], bool) if valid is None else jnp.asarray(valid)
    slot_TA = er.assign_slots(choice_TA, valid_T, num_experts, num_slots, pace)
    return np.where(np.asarray(slot_TA) == num_experts * num_slots, NOWHERE, slot_TA).tolist()


def test_number_of_slots_by_hand():
    assert er.slots_per_expert(256, 1.25, 4, 1) == 80  # 1.25 * 256 / 4
    assert er.slots_per_expert(256, 0.5, 4, 1) == 32
    assert er.slots_per_expert(32, 1.25, 4, 1) == 10
    assert er.slots_per_expert(16, 1.0, 4, 2) == 8  # two claims a token
    assert er.slots_per_expert(16, 2.0, 1, 1) == 16  # never more than there are tokens
    assert er.slots_per_expert(3, 0.1, 4, 1) == 1


def test_choice_and_gate_by_hand():
    # softmax of log(1, 2, 5) is (1, 2, 5) / 8
    logits_TN = jnp.log(jnp.array([[1.0, 2.0, 5.0], [4.0, 2.0, 2.0]]))
    choice_TA, gate_TA = er.choose_experts(logits_TN, 2)
    assert choice_TA.tolist() == [[2, 1], [0, 1]]  # of the equal ones the lower id
    np.testing.assert_allclose(gate_TA, [[5 / 8, 2 / 8], [4 / 8, 2 / 8]], rtol=1e-6)


def test_one_expert_has_gate_one_exactly():
    assert er.choose_experts(jnp.array([[3.7], [-2.0]]), 1).gate_TA.tolist() == [[1.0], [1.0]]


def test_overflow_drops_the_later_token():
    # Two slots each: expert 0 has slots 0, 1 and expert 1 has slots 2, 3. The third claim of expert 0 is dropped.
    assert slots([[0], [1], [0], [0], [1]], 2, 2) == [[0], [2], [1], [NOWHERE], [3]]


def test_no_ops_and_padding_claim_nothing():
    assert slots([[0], [2], [0], [3]], 2, 2) == [[0], [NOWHERE], [1], [NOWHERE]]
    assert slots([[0], [0], [0]], 2, 2, valid=[False, True, True]) == [[NOWHERE], [0], [1]]


def test_two_choices_of_a_token_come_before_the_next_token():
    assert slots([[0, 1], [1, 0], [0, 1]], 2, 2) == [[0, 2], [3, 1], [NOWHERE, NOWHERE]]


def paced_one_by_one(choices, num_experts, num_slots, pace):
    """The rule as a loop: a claim is served if its expert is below its quota, and has a slot."""
    served, out = [0] * num_experts, []
    for t, row in enumerate(choices):
        line = []
        for choice in row:
            allowed = min(num_slots, int(np.floor(pace * (t + 1) + 1e-4)) + er.BURST)
            if choice < num_experts and served[choice] < allowed:
                line.append(choice * num_slots + served[choice])
                served[choice] += 1
            else:
                line.append(NOWHERE)
        out.append(line)
    return out


@pytest.mark.parametrize("seed", range(8))
def test_paced_quota_is_the_rule_applied_one_by_one(seed):
    rng = np.random.default_rng(seed)
    T, A = 48, rng.integers(1, 3)
    choices = np.stack([rng.permutation(5)[:A] for _ in range(T)])  # 3 experts, 2 no-ops
    choices[rng.integers(0, T, 20)] = choices[0]  # crowded
    num_slots = er.paced_slots(er.slots_per_expert(T, 0.5, 3, A), T)
    pace = 0.5 * A / 3
    assert slots(choices, 3, num_slots, pace=pace) == paced_one_by_one(choices.tolist(), 3, num_slots, pace)


def test_paced_quota_serves_the_end_of_a_row_where_the_plain_rule_starves_it():
    choices = np.zeros((64, 1), int)  # everybody wants expert 0 of 2, which at capacity 0.5 has 16 slots
    last_quarter = slice(48, 64)
    plain = np.array(slots(choices, 2, 16))[last_quarter] != NOWHERE
    paced = np.array(slots(choices, 2, er.paced_slots(16, 64), pace=0.25))[last_quarter] != NOWHERE
    assert (plain.sum(), paced.sum()) == (0, 4)  # 0.25 of 16 tokens


@pytest.mark.parametrize("pace", [None, 0.2])
def test_a_later_token_never_changes_an_earlier_slot(pace):
    rng = np.random.default_rng(0)
    first = rng.integers(0, 4, (40, 2))
    second = first.copy()
    second[25:] = rng.integers(0, 4, (15, 2))
    assert slots(first, 3, 6, pace=pace)[:25] == slots(second, 3, 6, pace=pace)[:25]


def test_expert_choice_by_hand_and_that_it_looks_ahead():
    scores_TE = jnp.array([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    everybody = jnp.ones(4, bool)
    slot_TA = er.assign_by_experts(scores_TE, everybody, 2)  # slots 0, 1 and 2, 3; 4 is nowhere
    assert slot_TA.tolist() == [[0, 4], [1, 4], [4, 2], [4, 3]]
    later = scores_TE.at[3, 0].set(5.0)
    assert er.assign_by_experts(later, everybody, 2)[1].tolist() == [4, 4]
    padded = er.assign_by_experts(scores_TE, jnp.array([False, True, True, True]), 2)
    assert padded.tolist() == [[4, 4], [0, 4], [1, 2], [4, 3]]


def random_row(seed, T=12, A=2, E=3, C=4, D=5):
    rng = np.random.default_rng(seed)
    choice_TA = jnp.asarray(np.stack([rng.permutation(E + 1)[:A] for _ in range(T)]), jnp.int32)
    slot_TA = er.assign_slots(choice_TA, jnp.asarray(rng.random(T) < 0.9), E, C)
    x_TD, gate_TA = jnp.asarray(rng.normal(size=(T, D)), jnp.float32), jnp.asarray(rng.random((T, A)), jnp.float32)
    return x_TD, gate_TA, slot_TA, er.claims_of_slots(slot_TA, E * C)


def test_claims_of_slots_is_the_inverse():
    for seed in range(5):
        _, _, slot_TA, claim_S = random_row(seed)
        for claim, slot in enumerate(np.asarray(slot_TA).reshape(-1)):
            assert slot == claim_S.size or claim_S[slot] == claim
        assert np.sum(np.asarray(claim_S) < slot_TA.size) == np.sum(np.asarray(slot_TA) < claim_S.size)


def there_and_back(x_TD, gate_TA, slot_TA, claim_S, scale):
    """Every slot doubles its token; written with loops where `plain`."""
    y_SD = scale * er.to_slots(x_TD, slot_TA, claim_S)
    return er.from_slots(y_SD, gate_TA, slot_TA, claim_S)


def test_tokens_come_back_gated_and_a_token_without_slot_is_zero():
    x_TD, gate_TA, slot_TA, claim_S = random_row(3)
    out_TD = there_and_back(x_TD, gate_TA, slot_TA, claim_S, 2.0)
    served_TA = np.asarray(slot_TA) < claim_S.size
    expected = 2.0 * np.sum(np.asarray(gate_TA) * served_TA, axis=1)[:, None] * np.asarray(x_TD)
    np.testing.assert_allclose(out_TD, expected, rtol=1e-6)
    assert (out_TD[~served_TA.any(axis=1)] == 0).all()
    assert (~served_TA.any(axis=1)).any()


def test_gradients_of_tokens_and_gates_agree_with_the_dense_form():
    x_TD, gate_TA, slot_TA, claim_S = random_row(4)
    served_TA = jnp.asarray(np.asarray(slot_TA) < claim_S.size, jnp.float32)
    weight_SD = jnp.asarray(np.random.default_rng(1).normal(size=(claim_S.size, x_TD.shape[1])), jnp.float32)

    def moved(x_TD, gate_TA, weight_SD):
        y_SD = weight_SD * er.to_slots(x_TD, slot_TA, claim_S)
        return jnp.sum(jnp.sin(er.from_slots(y_SD, gate_TA, slot_TA, claim_S)))

    def dense(x_TD, gate_TA, weight_SD):
        own_TAD = weight_SD.at[slot_TA].get(mode="fill", fill_value=0) * x_TD[:, None]
        return jnp.sum(jnp.sin(jnp.sum((served_TA * gate_TA)[..., None] * own_TAD, axis=1)))

    got, expected = (jax.grad(f, argnums=(0, 1, 2))(x_TD, gate_TA, weight_SD) for f in (moved, dense))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_gradient_scatters_no_rows():
    """A scatter of rows is what the custom gradient is there to avoid."""
    x_TD, gate_TA, slot_TA, claim_S = random_row(0)

    def loss(x_TD, gate_TA):
        return jnp.sum(there_and_back(x_TD, gate_TA, slot_TA, claim_S, 2.0))

    def plain(x_TD):
        return jnp.sum(x_TD.at[claim_S].get(mode="fill", fill_value=0))

    assert "scatter" not in str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x_TD, gate_TA))
    assert "scatter" in str(jax.make_jaxpr(jax.grad(plain))(x_TD))  # what the words above would look like


def sums(logits, choices, valid, num_experts=2, num_slots=1):
    logits_TN, valid_T = jnp.asarray(logits, jnp.float32), jnp.asarray(valid)
    choice_TA = jnp.asarray(choices, jnp.int32)
    slot_TA = er.assign_slots(choice_TA, valid_T, num_experts, num_slots)
    return er.balance_sums(logits_TN, choice_TA, slot_TA < num_experts * num_slots, valid_T, num_experts)


def test_balance_and_z_by_hand():
    # Two experts, three valid tokens, even probabilities: f = (2, 1) / 3, P = (1/2, 1/2), N * sum f P = 1 per token.
    found = sums(np.zeros((4, 2)), [[0], [0], [1], [0]], [True, True, True, False])
    np.testing.assert_allclose(found.balance, 3.0, rtol=1e-6)
    np.testing.assert_allclose(found.z, 3 * np.log(2) ** 2, rtol=1e-6)
    assert found.load_N.tolist() == [2, 1]
    assert (found.dropped, found.computed, found.tokens) == (1, 2, 3)
    # All on expert 0 with probability 3/4 each: N * (1 * 3/4) = 1.5 per token.
    skewed = sums(np.log([[3.0, 1.0]] * 2), [[0], [0]], [True, True])
    np.testing.assert_allclose(skewed.balance, 3.0, rtol=1e-6)


def test_padding_moves_no_sum_and_poisons_no_gradient():
    def total(logits_TN):
        found = sums(logits_TN, [[0], [1], [0]], [True, True, False])
        return found.balance + found.z

    with_nan = jnp.array([[0.1, 0.2], [0.3, -0.4], [jnp.nan, jnp.nan]])
    without = with_nan.at[2].set(7.0)
    assert total(with_nan) == total(without)
    gradient = jax.grad(total)(with_nan)
    assert np.isfinite(gradient).all()
    assert (gradient[2] == 0).all()
