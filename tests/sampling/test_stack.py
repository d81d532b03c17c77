"""Cached decoding equals the uncached causal forward: logits, routing bits, whatever the prefix, padding or batch."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import routing
from mod_jax.errors import ConfigError
from mod_jax.models.blocks import Choice
from mod_jax.models.memory import EMPTY
from mod_jax.sampling import cache as cache_lib
from mod_jax.sampling import stack as stack_lib

T = 16
CASES = {
    "router": ("router", {}),
    "predictor": ("predictor", {}),
    "threshold": ("threshold", {}),
    "every block routed": ("threshold", {"model.layout": "R", "model.depth": 3, "routing.gate": "tanh"}),
    "a unit and a tail": ("router", {"model.layout": "FRR", "model.depth": 5, "routing.capacity": (0.1, 0.5, 1.0)}),
    "raw input, sigmoid gate": (
        "threshold",
        {"routing.router_input": "raw", "routing.gate": "sigmoid", "model.depth": 2},
    ),
    "position": ("predictor", {"routing.score": "position", "model.tie_embedding": True, "model.depth": 2}),
    "frozen": (
        "threshold",
        {"routing.score": "frozen", "routing.aux_weight": 0.0, "model.scan": False, "model.depth": 3},
    ),
    "dense": ("none", {"model.layout": "F", "model.depth": 2, "routing.aux_weight": 0.0}),
}


def assert_same(actual, expected):
    np.testing.assert_allclose(actual[0], expected[0], atol=1e-5)
    np.testing.assert_array_equal(actual[1], expected[1])


@pytest.mark.parametrize("case", CASES)
def test_cached_decode_equals_the_full_forward_for_every_prefix(build, tools, case):
    selection, changes = CASES[case]
    model = build(**changes)
    tokens_BT = tools.random_tokens(3, T)
    expected = tools.uncached(model, selection if selection != "none" else "topk", tokens_BT)
    if model.config.num_routed:
        counts_LB = expected[1].sum(axis=2)
        assert (counts_LB > 0).any()
        assert (counts_LB < T).any()
        assert (counts_LB != counts_LB[:, :1]).any()  # rows differ
    for length in range(1, T + 1):
        ragged_B = [length, 1 + (length + 4) % T, 1 + (2 * length) % T]
        assert_same(tools.replay(model, selection, tokens_BT, ragged_B), expected)


def test_the_comparison_can_fail(build, tools):
    model = build()
    tokens_BT = tools.random_tokens(3, T)
    expected = tools.uncached(model, "predictor", tokens_BT)
    actual = tools.replay(model, "threshold", tokens_BT, [7, 1, 12])  # another selection: other bits, other logits
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(actual[0], expected[0], atol=1e-5)
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(actual[1], expected[1])


def test_batch_mates_do_not_matter_and_batch_1_is_the_same(build, tools):
    model = build()
    tokens_BT = tools.random_tokens(3, T)
    expected = tools.uncached(model, "threshold", tokens_BT)
    for row in range(3):  # batch 1 takes another path: it skips blocks by `cond`
        actual = tools.replay(model, "threshold", tokens_BT[row : row + 1], [5])
        assert_same(actual, (expected[0][row : row + 1], expected[1][:, row : row + 1]))


@pytest.mark.parametrize("sizes", [dict(kept=1), dict(kept=T, rows=3), dict(rows=2)])
def test_sizes_of_passes_and_caches_do_not_matter(build, tools, sizes):
    model = build()
    tokens_BT = tools.random_tokens(3, T)
    actual = tools.replay(model, "threshold", tokens_BT, [7, 1, 12], **sizes)
    assert_same(actual, tools.uncached(model, "threshold", tokens_BT))


def test_a_cache_of_just_enough_slots_is_exact_and_one_of_fewer_says_so(build, tools):
    model = build()
    tokens_BT = tools.random_tokens(3, T)
    expected = tools.uncached(model, "threshold", tokens_BT)
    needed = int(expected[1].sum(axis=2).max())
    logits_BTV, selected_LBT, cache = tools.replay(model, "threshold", tokens_BT, [7, 1, 12], slots=needed)
    assert_same((logits_BTV, selected_LBT), expected)
    assert not cache_lib.overflowed(cache)
    assert cache_lib.overflowed(tools.prefill(model, "threshold", tokens_BT, slots=needed - 1)[2])


def test_left_or_no_padding_each_row_equals_its_own_unpadded_run(build, tools):
    model = build()
    tokens_BT = tools.random_tokens(3, T)
    lengths = (T, 9, 1)
    left_BT = np.zeros_like(tokens_BT)
    for row, length in enumerate(lengths):
        left_BT[row, T - length :] = tokens_BT[row, :length]
    valid_BT = np.arange(T)[None] >= T - np.array(lengths)[:, None]
    logits_BTV, selected_LBT, _ = tools.prefill(model, "threshold", left_BT, valid_BT)
    expected_logits, expected_selected = tools.uncached(model, "threshold", tokens_BT)  # causal: tails change nothing
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(logits_BTV[row, :length], expected_logits[row, :length], atol=1e-5)
        np.testing.assert_array_equal(selected_LBT[:, row, :length], expected_selected[:, row, :length])
        assert not selected_LBT[:, row, length:].any()


def test_decode_does_not_route_every_token(build, tools):
    model = build()
    tokens_BT = tools.random_tokens(3, T)
    skipping = tools.changed(model, "down_bias_1", -100.0)
    logits_BTV, selected_LBT, _ = tools.replay(skipping, "predictor", tokens_BT, [7, 1, 12])
    assert not selected_LBT.any()

    stack = tools.stack_of(model.config, model.params)
    full_only = dataclasses.replace(stack, blocks=stack.blocks[::2])
    dense = build(**{"model.layout": "F", "model.depth": 2, "routing.aux_weight": 0.0}).config
    cache = cache_lib.init_cache(dense, 3, (T, T))
    valid_BT = jnp.ones((3, T), bool)

    @jax.jit
    def run():
        return full_only.logits(stack_lib.prefill(full_only, tokens_BT, valid_BT, cache, Choice("all"), ()).x_BTD)

    np.testing.assert_allclose(logits_BTV, run(), atol=1e-5)

    running = tools.changed(model, "down_bias_1", 100.0)
    assert tools.replay(running, "predictor", tokens_BT, [7, 1, 12])[1].all()


def test_a_new_token_evicts_no_earlier_one(build, tools):
    model = build()
    tokens_BT = tools.random_tokens(3, T)
    stored = []
    for length in (1, 5, 9, T):
        valid_BT = np.broadcast_to(np.arange(T)[None] < length, tokens_BT.shape)
        _, selected_LBT, cache = tools.prefill(model, "threshold", tokens_BT, valid_BT)
        stored.append((selected_LBT[..., :length], cache))
    for (bits_before, before), (bits_after, after) in itertools.pairwise(stored):
        np.testing.assert_array_equal(bits_after[..., : bits_before.shape[-1]], bits_before)
        for depth in model.config.routed_depths:
            for row, length in enumerate(before[depth].lengths_B):
                old, new = before[depth].positions_BS[row], after[depth].positions_BS[row]
                assert new[:length].tolist() == old[:length].tolist()
                assert (np.diff(old[:length]) > 0).all()
                assert (old[length:] == EMPTY).all()


def test_first_come_first_served_within_a_pass_and_exact_over_all(build, tools):
    decided_T = jnp.array([0, 1, 0, 1, 0, 1, 0, 0], bool)
    assert routing.pack_selected(decided_T, 2).tolist() == [1, 3]
    assert routing.pack_selected(decided_T.at[6].set(True), 2).tolist() == [1, 3]  # a later token displaces none
    assert routing.pack_selected(decided_T, 5).tolist() == [1, 3, 5, 8, 8]  # 8: no token

    model = build()
    tokens_BT = tools.random_tokens(3, T)
    narrow, wide = (tools.prefill(model, "threshold", tokens_BT, kept=kept)[0] for kept in (1, T))
    np.testing.assert_allclose(narrow, wide, atol=1e-5)
    changed_BT = tokens_BT.copy()
    changed_BT[:, 9:] = (changed_BT[:, 9:] + 100) % 257
    moved = np.abs(tools.prefill(model, "threshold", changed_BT, kept=1)[0] - narrow).max(axis=(0, 2))
    assert moved[:9].max() < 1e-5
    assert moved[9:].min() > 1e-3


def test_a_routed_cache_with_three_entries_at_position_20_uses_angle_20(build, tools):
    model = build(**{"model.layout": "R", "model.depth": 1})
    stack = tools.stack_of(model.config, model.params)
    block = stack.blocks[0].block
    tokens_BT = tools.random_tokens(1, 21)
    cache = cache_lib.init_cache(model.config, 1, (8,))
    step = jax.jit(stack_lib.decode)
    for position in (4, 11, 17, 20):
        positions_B, live_B = jnp.array([position], jnp.int32), jnp.ones(1, bool)
        choice = Choice("threshold", jnp.array([-1e9]))
        cache = step(stack, tokens_BT[:, position], positions_B, live_B, cache, choice).cache
    assert cache[0].positions_BS[0].tolist() == [4, 11, 17, 20, -1, -1, -1, -1]
    x_B1D = stack.embedder.embed(tokens_BT[:, 20:], stack.dtype)
    _, (k_at_20, _) = block.ask(x_B1D, stack.tokens(jnp.array([[20]]), live_B[:, None]))
    _, (k_at_3, _) = block.ask(x_B1D, stack.tokens(jnp.array([[3]]), live_B[:, None]))
    k_BKSH, _ = cache[0].items
    np.testing.assert_allclose(k_BKSH[:, :, 3], k_at_20[:, :, 0], atol=1e-6)
    assert np.abs(k_BKSH[:, :, 3] - k_at_3[:, :, 0]).max() > 1e-2


def suffix_movement(logits_of, tokens_BT) -> float:
    """The black-box probe: how far logits of the first half move when the second half is replaced."""
    half = tokens_BT.shape[1] // 2
    changed_BT = tokens_BT.copy()
    changed_BT[:, half:] = 1 + (changed_BT[:, half:] + 57) % 256
    return float(np.abs(logits_of(tokens_BT) - logits_of(changed_BT))[:, :half].max())


@pytest.mark.parametrize("selection", ["router", "predictor", "threshold"])
def test_the_suffix_probe_passes_on_every_causal_path_and_fails_on_topk(build, tools, selection):
    model = build()
    tokens_BT = tools.random_tokens(3, T)
    paths = {
        "uncached": lambda tokens: tools.uncached(model, selection, tokens)[0],
        "prefill": lambda tokens: tools.prefill(model, selection, tokens)[0],
        "decode": lambda tokens: tools.replay(model, selection, tokens, [1, 3, 7])[0],
    }
    moved = {name: suffix_movement(path, tokens_BT) for name, path in paths.items()}
    assert max(moved.values()) < 1e-5, moved
    assert suffix_movement(lambda tokens: tools.uncached(model, "topk", tokens)[0], tokens_BT) > 1e-3


def test_the_predictors_loss_moves_the_predictor_alone(build, tools):
    model = build(**{"model.depth": 2})
    tokens_BT = jnp.asarray(tools.random_tokens(2, T))

    def loss(params):
        run = model.model.run(params, tokens_BT, choice=Choice("predictor"))
        return jnp.sum(jnp.square(run.routing.predictor_logits_BT))

    grads = jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(model.params))
    moved = [jax.tree_util.keystr(path) for path, grad in grads if np.any(np.asarray(grad) != 0)]
    assert moved
    assert all("predictor" in name for name in moved), moved


def test_rows_that_bypass_a_block_are_left_bit_for_bit(build, tools):
    model = build(**{"model.layout": "R", "model.depth": 1})
    stack = tools.stack_of(model.config, model.params)
    tokens_B = tools.random_tokens(6, 1)[:, 0]
    cache = cache_lib.init_cache(model.config, 6, (8,))
    positions_B, live_B = jnp.zeros(6, jnp.int32), jnp.ones(6, bool)
    step = jax.jit(functools.partial(stack_lib.decode, rows_L=(2,)))
    output = step(stack, tokens_B, positions_B, live_B, cache, Choice("threshold", jnp.zeros(1)))
    selected_B = np.asarray(output.selected_LBT[0, :, 0])
    assert 0 < selected_B.sum() < 6
    x_B1D = stack.embedder.embed(tokens_B[:, None], stack.dtype)
    assert np.array_equal(output.x_BTD[~selected_B], x_B1D[~selected_B])
    assert np.all(output.x_BTD[selected_B] != x_B1D[selected_B])
    assert output.cache[0].lengths_B.tolist() == selected_B.astype(int).tolist()
    assert not np.any(output.cache[0].items[0][~selected_B])


def test_batch_1_skips_by_a_conditional_that_returns_no_cache(build, tools):
    """A conditional's results are copied, on the way past the block too: the cache must not be among them."""
    model = build(**{"model.layout": "R", "model.depth": 1})
    stack = tools.stack_of(model.config, model.params)
    cache = cache_lib.init_cache(model.config, 1, (24,))
    one = (jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32), jnp.ones(1, bool))
    choice = Choice("threshold", jnp.zeros(1))
    step = jax.make_jaxpr(lambda cache: stack_lib.decode(stack, *one, cache, choice))(cache)
    shapes = [[v.aval.shape for v in e.outvars] for e in step.jaxpr.eqns if e.primitive.name == "cond"]
    assert len(shapes) == 2
    assert all(24 not in shape for branch in shapes for shape in branch)
    assert not any(e.primitive.name == "while" for e in step.jaxpr.eqns)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_weights_in_one_stack_change_nothing(build, tools, num_rows):
    """As they lie on a TPU: prompts and single tokens, units and a tail, bit for bit."""
    model = build(**{"model.layout": "FRR", "model.depth": 5})
    tokens_BT = jnp.asarray(tools.random_tokens(num_rows, T))

    @functools.partial(jax.jit, static_argnames="platform")
    def run(params, platform):
        stack = tools.stack_of(model.config, params, platform)
        cache = cache_lib.init_cache(model.config, num_rows, (T,) * 5)
        choice = Choice("threshold", model.cutoffs_L)
        valid_BT = jnp.broadcast_to(jnp.arange(T) < T - 1, tokens_BT.shape)
        prompt = stack_lib.prefill(stack, tokens_BT, valid_BT, cache, choice, (3,) * 3)
        positions_B, live_B = jnp.full(num_rows, T - 1, jnp.int32), jnp.ones(num_rows, bool)
        last = stack_lib.decode(stack, tokens_BT[:, -1], positions_B, live_B, prompt.cache, choice, (1,) * 3)
        return prompt, last

    jax.tree.map(np.testing.assert_array_equal, run(model.params, "tpu"), run(model.params, "cpu"))
    stack = tools.stack_of(model.config, model.params, "tpu")
    assert stack.inside["R"].attention.q_DNH.shape[0] == 3
    assert all(block.block is None for block in stack.blocks if block.routed)
    decoder = model.model.merge(model.params)
    stack_lib.split(decoder, "tpu")
    assert all(block.block is not None for block in decoder.tail.blocks if block.routed)


def test_what_cannot_be_sampled_is_refused(build, tools):
    noise = build(**{"routing.score": "stochastic", "routing.predictor": False, "routing.aux_weight": 0.0})
    with pytest.raises(ConfigError, match="stochastic"):
        tools.stack_of(noise.config, noise.params)
    with pytest.raises(ConfigError, match="softmax"):
        tools.prefill(build(**{"routing.gate": "softmax"}), "threshold", tools.random_tokens(1, 4))
