"""FLOPs against sums worked by hand, the paper's ratios, parameter counts and XLA's own count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax.config import make_config
from mod_jax.models import flops
from mod_jax.models.model import make_model
from mod_jax.training.losses import loss_sums, objective

# D = 8, N = 2, K = 1, H = 4, F = 16, T = 10, V = 100; blocks F, R with C = tokens_kept(10, 0.2) = 2
HAND = {
    "model.width": 8,
    "model.depth": 2,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.mlp_dim": 16,
    "data.seq_len": 10,
    "routing.capacity": 0.2,
    "train.batch_size": 4,
    "train.steps": 1,
}


def hand(**changes):
    return make_config(**{**HAND, **changes})


# Per token, 2 * weights: q and o have 8 * 2 * 4 = 64 each, k and v 8 * 1 * 4 = 32 each, the MLP 2 * 8 * 16 = 256.
PER_TOKEN = 2 * (2 * 64 + 2 * 32 + 256)  # 896
# Per query-key pair, logits and values: 2 * 2 * N * H = 32.
PER_PAIR = 32
# Predictor hidden is 32: up 8 * 32 and down 32.
PREDICTOR = 2 * 10 * (8 * 32 + 32)


def test_hand_values():
    forward = flops.forward_flops(hand(), 100)
    assert forward.linear == PER_TOKEN * (10 + 2)
    assert forward.attention == PER_PAIR * (10**2 + 2**2)
    assert forward.router == 2 * 10 * 8  # on every token
    assert forward.predictor == PREDICTOR
    assert forward.unembed == 2 * 10 * 8 * 100
    assert forward.total == 10752 + 3328 + 160 + 5760 + 16000


def test_hand_values_where_bypassed_tokens_keep_their_keys():
    forward = flops.forward_flops(hand(**{"routing.skipped_keys": "kept"}), 100)
    # The eight bypassed tokens leave a key and a value, 2 * 64 each; the two selected see all ten.
    assert forward.linear == PER_TOKEN * (10 + 2) + 2 * 64 * 8
    assert forward.attention == PER_PAIR * (10**2 + 2 * 10)
    half = flops.forward_flops(hand(**{"routing.skipped_keys": "kept"}), 100, causal_half=True)
    assert half.attention == PER_PAIR * (10 * 11 / 2 + 2 * 11 / 2)
    all_selected = hand(**{"routing.skipped_keys": "kept", "routing.capacity": 1.0})
    assert flops.forward_flops(all_selected, 100) == flops.forward_flops(hand(**{"routing.capacity": 1.0}), 100)
    decoded = flops.decode_flops(hand(**{"routing.skipped_keys": "kept"}), 100, (10, 10))
    assert decoded.linear == pytest.approx(PER_TOKEN * 1.2 + 0.8 * 2 * 64)


def test_every_convention_is_a_switch():
    config = hand()
    full = flops.forward_flops(config, 100)
    half = flops.forward_flops(config, 100, causal_half=True)
    assert half.attention == PER_PAIR * (10 * 11 / 2 + 2 * 3 / 2)
    assert half.total == full.total - full.attention + half.attention
    assert flops.forward_flops(config, 100, unembed=False).total == full.total - 16000
    assert flops.forward_flops(config, 100, predictor=False).total == full.total - PREDICTOR
    assert flops.forward_flops(hand(**{"routing.predictor": False}), 100).total == full.total - PREDICTOR
    longer = flops.forward_flops(config, 100, seq_len=20)
    assert longer.linear == PER_TOKEN * (20 + 4)
    assert longer.attention == PER_PAIR * (20**2 + 4**2)


def test_a_control_without_a_router_has_no_router_flops():
    stochastic = hand(**{"routing.score": "stochastic", "routing.predictor": False})
    assert flops.forward_flops(stochastic, 100).router == 0
    assert flops.forward_flops(hand(**{"routing.score": "position"}), 100).router == 160


def test_realised_capacity_replaces_the_static_count():
    two_routed = hand(**{"model.depth": 4})
    forward = flops.forward_flops(two_routed, 100, realised_capacity=(0.5, 0.05))
    assert forward.linear == pytest.approx(PER_TOKEN * (10 + 5 + 10 + 0.5))
    assert forward.attention == pytest.approx(PER_PAIR * (100 + 25 + 100 + 0.25))
    assert forward.router == 2 * 160
    nominal = flops.forward_flops(two_routed, 100)
    assert flops.forward_flops(two_routed, 100, realised_capacity=(0.2, 0.2)).total == pytest.approx(nominal.total)


@pytest.mark.parametrize("realised", [(0.5,), (0.5, 0.5, 0.5)])
def test_realised_capacity_must_name_every_routed_block(realised):
    with pytest.raises(ValueError, match=r"realised_capacity has [13] .* 2 routed"):
        flops.forward_flops(hand(**{"model.depth": 4}), 100, realised_capacity=realised)


def test_the_papers_ratios():
    # Half of the blocks on an eighth of the tokens: (1 + 0.125) / 2 and (1 + 0.125^2) / 2.
    paper = {"train.steps": 1, "data.seq_len": 2048, "model.width": 512, "routing.predictor": False}
    routed = flops.forward_flops(make_config(**paper), 1000)
    dense = flops.forward_flops(make_config(**paper, **{"model.layout": "F"}), 1000)
    assert routed.linear / dense.linear == 0.5625
    assert routed.attention / dense.attention == pytest.approx(0.508, abs=2e-4)
    assert routed.unembed == dense.unembed  # not reduced


def test_a_dense_block_is_the_textbook_count():
    # 24 n D^2 + 4 n^2 D with F = 4 D
    config = make_config(**{"train.steps": 1, "model.width": 64})
    assert flops.block_flops(config, config.blocks[0], 100) == (24 * 100 * 64**2, 4 * 100**2 * 64)


@pytest.mark.parametrize("gated", [False, True])
def test_linear_flops_are_two_per_weight_and_token(gated):
    config = hand(**{"routing.capacity": 1.0, "model.gated_mlp": gated})
    shapes = jax.tree_util.tree_leaves_with_path(make_model(config, 100).abstract_params)
    matrices = {"q_DNH", "k_DKH", "v_DKH", "o_NHD", "up_DF", "down_FD", "unembed_DV", "weight_D", "up_DP", "down_P"}
    matrices |= {"gate_DF"}
    weights = sum(leaf.size for path, leaf in shapes if path[-1].key in matrices)
    forward = flops.forward_flops(config, 100)
    assert forward.total - forward.attention == 2 * 10 * weights


def test_training_is_three_forward_passes_and_two_for_the_predictor():
    forward = flops.forward_flops(hand(), 100)
    assert flops.train_flops(hand(), 100) == 3 * (forward.total - PREDICTOR) + 2 * PREDICTOR
    dense = hand(**{"model.layout": "F"})
    assert flops.train_flops(dense, 100) == 3 * flops.forward_flops(dense, 100).total
    without = flops.train_flops(hand(), 100, predictor=False, unembed=False)
    assert without == 3 * (forward.total - PREDICTOR - 16000)


def test_run_length_from_steps_tokens_or_flops():
    per_step = 4 * flops.train_flops(hand(), 100)
    assert flops.train_steps(hand(**{"train.steps": 7}), 100) == 7
    # 4 rows of 10 tokens: 40 tokens per step
    for tokens, steps in ((40, 1), (99, 2), (100, 3), (101, 3), (1, 1), (4000, 100)):
        assert flops.train_steps(hand(**{"train.steps": 0, "train.tokens": tokens}), 100) == steps
    for budget, steps in ((per_step * 5, 5), (per_step * 5.6, 6), (1.0, 1)):
        assert flops.train_steps(hand(**{"train.steps": 0, "train.flops": budget}), 100) == steps


# XLA's count


BIG_ENOUGH = {
    "model.width": 128,
    "model.depth": 4,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.qk_norm": False,
    "model.scan": False,  # XLA counts the body of a loop once
    "data.seq_len": 128,
    "train.steps": 1,
}


def xla_flops(config, vocab_size):
    """(forward, gradient) FLOPs of one row, from the lowered program, uncompiled."""
    model = make_model(config, vocab_size)
    tokens_BT = jax.ShapeDtypeStruct((1, config.data.seq_len), jnp.int32)

    def loss(params, tokens_BT):
        decoder = model.merge(params)
        x_BTD, record = decoder.features(tokens_BT)
        weight_DV = decoder.embedder.output_weight()
        sums = loss_sums(x_BTD, weight_DV, record, tokens_BT, jnp.ones_like(tokens_BT))
        return objective(sums, jnp.float32(tokens_BT.size), config)

    def forward(params, tokens_BT):
        output = model.run(params, tokens_BT)
        return output.logits_BTV, output.routing and output.routing.predictor_logits_BT

    def count(function):
        return jax.jit(function).lower(model.abstract_params, tokens_BT).cost_analysis()["flops"]

    return count(forward), count(jax.grad(loss))


@pytest.mark.parametrize("layout", ["F", "FR"])
def test_within_three_percent_of_xla(layout):
    config = make_config(**BIG_ENOUGH, **{"model.layout": layout})
    forward, gradient = xla_flops(config, 256)
    assert flops.forward_flops(config, 256).total == pytest.approx(forward, rel=0.03)
    assert flops.train_flops(config, 256) == pytest.approx(gradient, rel=0.03)
    # Each convention that is easily got wrong would be seen.
    other = make_config(**BIG_ENOUGH, **{"model.layout": "FR" if layout == "F" else "F"})
    wrong = [
        flops.forward_flops(config, 256, causal_half=True).total,
        flops.forward_flops(config, 256, unembed=False).total,
        flops.forward_flops(other, 256).total,
    ]
    assert min(np.abs(np.array(wrong) / forward - 1)) > 0.03


def test_one_decoded_token_by_hand(tiny_config):
    """D 16, 2 heads of 8, F 64, FRFR at capacity 0.25, caches of 16 and 8 slots, P 32, V 64."""
    found = flops.decode_flops(tiny_config(), 64, (16, 8, 16, 8))
    block = 2 * (4 * 16 * 16 + 2 * 16 * 64)
    assert found.linear == (2 + 2 * 0.25) * block
    assert found.attention == 2 * 4 * 16 * 16 + 2 * 0.25 * 4 * 8 * 16
    assert found.router == 2 * 2 * 16
    assert found.predictor == 2 * 2 * 32 * 17
    assert found.unembed == 2 * 16 * 64


def test_decoding_a_row_costs_what_its_prefill_does(tiny_config):
    """Summed over a row of a dense model, each token attending to those before it and to itself."""
    config = tiny_config(**{"model.layout": "F"})
    decoded = sum(flops.decode_flops(config, 64, (t,) * 4).total for t in range(1, 17))
    assert decoded == flops.forward_flops(config, 64, causal_half=True).total


def test_active_parameters_by_hand():
    """Of experts of 2 * 8 * 16 = 256 weights, two blocks; the rest is active whatever the capacity of its block."""

    def count(**experts):
        config = hand(**{"model.layout": "Ee", "experts.count": 4, **experts})
        return flops.count_parameters(config, make_model(config, 100))

    found = count()
    model = make_model(hand(**{"model.layout": "Ee", "experts.count": 4}), 100)
    assert found.total == sum(leaf.size for leaf in jax.tree.leaves(model.abstract_params))
    assert found.active == found.total - 2 * 3 * 256
    assert str(found) == f"{found.total:,} parameters, {found.active:,} active"
    assert count(**{"experts.chosen": 2}).active == found.total - 2 * 2 * 256
    integrated = count(**{"experts.noop": 4})  # half of the tokens pass one; its router has 8 more columns of 8
    assert integrated.total == found.total + 2 * 4 * 8
    assert integrated.active == integrated.total - 2 * 3.5 * 256
    assert count(**{"experts.choice": "expert", "experts.capacity": 0.5}).active == found.total - 2 * 3.5 * 256
    dense = flops.count_parameters(hand(), make_model(hand(), 100))
    assert dense.total == dense.active
    assert str(dense) == f"{dense.total:,} parameters"
