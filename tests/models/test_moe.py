"""The channel of experts against loops over tokens, against the dense MLP, and against finite differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mod_jax import expert_routing
from mod_jax.config import make_config
from mod_jax.models.blocks import TOPK, Choice
from mod_jax.models.memory import Tokens, make_tokens
from mod_jax.models.mlp import MLP
from mod_jax.models.moe import BLOCK, Experts

B, T, D = 3, 24, 16
CUTOFFS = np.full(3, 0.3, np.float32)


class Channel:
    """A channel as a function of its parameters, with ten times the initial router: choices differ between tokens."""

    def __init__(self, **experts):
        changes = {"model.width": D, "model.depth": 2, "model.num_heads": 2, "train.steps": 1}
        self.config = make_config(**changes, **{f"experts.{name}": value for name, value in experts.items()})
        self.graphdef, state = nnx.split(Experts(self.config, nnx.Rngs(0)), nnx.Param)
        self.params = nnx.to_pure_dict(state)
        self.params["router_DN"] *= 10

    def merge(self, params) -> Experts:
        return nnx.merge(self.graphdef, nnx.State(params))

    @functools.partial(jax.jit, static_argnames=("self", "causal"))
    def __call__(self, params, x_BTD, valid_BT, *, causal=False, cutoffs_E=CUTOFFS):
        choice = Choice("all", expert_cutoffs_LE=jnp.asarray(cutoffs_E)) if causal else TOPK
        return self.merge(params)(x_BTD, tokens_of(valid_BT), choice)


def tokens_of(valid_BT) -> Tokens:
    positions_BT = jnp.broadcast_to(jnp.arange(valid_BT.shape[1], dtype=jnp.int32)[None], valid_BT.shape)
    return make_tokens(positions_BT, jnp.asarray(valid_BT, jnp.int32), 2, 100.0)


@functools.cache
def channel_of(**experts) -> Channel:
    return Channel(**experts)


def inputs(seed=0, rows=B, length=T):
    rng = np.random.default_rng(seed)
    valid_BT = np.ones((rows, length), bool)
    valid_BT[-1, length // 2 :] = False
    return jnp.asarray(rng.normal(size=(rows, length, D)), jnp.float32), jnp.asarray(valid_BT)


def one_by_one(channel, x_BTD, valid_BT, num_slots=None):
    """Token choice as loops in float64, with a counter per expert and row."""
    e = channel.config.experts
    router, up, down = (np.asarray(channel.params[name], np.float64) for name in ("router_DN", "up_EDF", "down_EFD"))
    x, out = np.asarray(x_BTD, np.float64), np.zeros(x_BTD.shape)
    for b in range(x.shape[0]):
        taken = [0] * e.count
        for t in np.flatnonzero(valid_BT[b]):
            p = np.exp(x[b, t] @ router)
            p /= p.sum()
            for n in np.argsort(-p, kind="stable")[: e.chosen]:
                if n >= e.count or (num_slots is not None and taken[n] >= num_slots):
                    continue
                taken[n] += 1
                out[b, t] += p[n] * (np.square(np.maximum(x[b, t] @ up[n], 0)) @ down[n])
    return out


@pytest.mark.parametrize(
    "experts",
    [
        dict(count=4, capacity=1.0),
        dict(count=4, chosen=2, capacity=1.0),
        dict(count=3, noop=3, capacity=0.375),
        dict(count=4, capacity=0.5),
    ],
    ids=str,
)
def test_both_rules_against_loops(experts):
    channel = channel_of(**experts)
    x_BTD, valid_BT = inputs()
    num_slots = round(experts["capacity"] * T * channel.config.experts.chosen / channel.config.experts.count)
    update_BTD, record = channel(channel.params, x_BTD, valid_BT)
    np.testing.assert_allclose(update_BTD, one_by_one(channel, x_BTD, valid_BT, num_slots), atol=1e-5)
    update_BTD, free = channel(channel.params, x_BTD, valid_BT, causal=True)
    np.testing.assert_allclose(update_BTD, one_by_one(channel, x_BTD, valid_BT), atol=1e-5)
    assert record.sums.dropped > 0  # else the two would be one test
    assert free.sums.dropped == 0
    assert record.sums.tokens == free.sums.tokens == valid_BT.sum()


def test_one_expert_is_the_dense_mlp_bit_for_bit():
    """Output and gradients under the training rule, output under the causal one."""
    channel = channel_of(count=1)
    graphdef, state = nnx.split(MLP(channel.config, nnx.Rngs(1)), nnx.Param)
    mlp = nnx.to_pure_dict(state)
    x_BTD, everybody = inputs()[0], jnp.ones((B, T), bool)

    def dense(x_BTD, up_DF, down_FD):
        return nnx.merge(graphdef, nnx.State(dict(up_DF=up_DF, down_FD=down_FD)))(x_BTD, tokens_of(everybody), TOPK)[0]

    def experts(x_BTD, up_DF, down_FD, causal=False):
        params = dict(channel.params, up_EDF=up_DF[None], down_EFD=down_FD[None])
        return channel.merge(params)(x_BTD, tokens_of(everybody), Choice("all") if causal else TOPK)[0]

    args = x_BTD, mlp["up_DF"], mlp["down_FD"]
    expected = jax.jit(dense)(*args)
    assert (jax.jit(experts)(*args) == expected).all()
    assert (jax.jit(functools.partial(experts, causal=True))(*args) == expected).all()
    gradients = (
        jax.jit(jax.grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), argnums=(0, 1, 2)))(*args) for f in (dense, experts)
    )
    for a, b in zip(*gradients, strict=True):
        assert (a == b).all()


def test_a_token_on_a_no_op_leaves_bit_for_bit():
    channel = channel_of(count=2, noop=2)
    x_BTD, valid_BT = inputs()
    for causal in (False, True):
        update_BTD, record = channel(channel.params, x_BTD, valid_BT, causal=causal)
        idle_BT = np.asarray(record.of_tokens.choice_BTA[..., 0] >= 2)
        assert idle_BT.any()
        assert np.asarray(x_BTD + update_BTD)[idle_BT].tobytes() == np.asarray(x_BTD)[idle_BT].tobytes()


@pytest.mark.parametrize(("count", "chosen"), [(4, 1), (3, 2)])
def test_blocks_without_drops_equal_one_slot_per_token(count, chosen):
    """More claims than one block holds, an expert that nobody wants, and an uneven load."""
    channel = channel_of(count=count, chosen=chosen)
    x_BTD, valid_BT = inputs(1, rows=4, length=BLOCK)
    rng = np.random.default_rng(2)
    odds = np.array([0.7, 0.0, *[0.3 / (count - 1)] * (count - 1)])  # id `count` claims nothing
    choice_BTA = np.stack([rng.choice(count + 1, p=odds, size=(4, BLOCK)) for _ in range(chosen)], axis=-1)
    choice_BTA[..., 1:] = np.where(choice_BTA[..., 1:] == choice_BTA[..., :1], count, choice_BTA[..., 1:])
    choice_BTA = jnp.asarray(np.where(valid_BT[..., None], choice_BTA, count), jnp.int32)
    gate_BTA = jnp.asarray(rng.random((4, BLOCK, chosen)), jnp.float32)

    @jax.jit
    def both(params):
        merged = channel.merge(params)
        slot_BTA = jax.vmap(expert_routing.assign_slots, (0, 0, None, None))(choice_BTA, valid_BT, count, BLOCK)
        slots_BTD = merged.through_slots(x_BTD, gate_BTA, slot_BTA, BLOCK)
        return slots_BTD, merged.without_drops(x_BTD, choice_BTA, gate_BTA)

    slots_BTD, blocks_BTD = both(channel.params)
    np.testing.assert_allclose(blocks_BTD, slots_BTD, atol=2e-6)


@pytest.mark.parametrize(
    ("experts", "causal"),
    [
        (dict(count=4, capacity=0.5), False),
        (dict(count=4, capacity=0.5, overflow="paced"), False),
        (dict(count=4, chosen=2, capacity=1.0), True),
        (dict(count=3, choice="expert", capacity=0.5), True),
    ],
    ids=str,
)
def test_causal_rules_do_not_look_ahead(experts, causal):
    channel = channel_of(**experts)
    x_BTD, everybody = inputs()[0], jnp.ones((B, T), bool)
    changed_BTD = x_BTD.at[:, 15:].set(-x_BTD[:, 15:])
    first, second = (channel(channel.params, x, everybody, causal=causal)[0][:, :15] for x in (x_BTD, changed_BTD))
    np.testing.assert_allclose(first, second, atol=1e-6)


def test_expert_choice_looks_ahead_and_needs_cutoffs_to_be_causal():
    channel = channel_of(count=3, choice="expert", capacity=0.5)
    x_BTD, everybody = inputs()[0], jnp.ones((B, T), bool)
    changed_BTD = x_BTD.at[:, 15:].set(3 * x_BTD[:, 15:])
    first, second = (channel(channel.params, x, everybody)[0][:, :15] for x in (x_BTD, changed_BTD))
    assert jnp.max(jnp.abs(first - second)) > 1e-2
    with pytest.raises(ValueError, match="needs expert_cutoffs_LE"):
        channel.merge(channel.params)(x_BTD, tokens_of(everybody), Choice("all"))


def test_expert_choice_by_the_cutoffs_of_its_own_row_takes_the_same_tokens():
    channel = channel_of(count=3, choice="expert", capacity=0.5)
    x_BTD, everybody = inputs()[0][:1], jnp.ones((1, T), bool)
    trained, record = channel(channel.params, x_BTD, everybody)
    assert record.cutoff_rows_A.tolist() == [1, 1, 1]
    just_below = np.nextafter(record.cutoff_sum_A, np.float32(-1))
    causal, again = channel(channel.params, x_BTD, everybody, causal=True, cutoffs_E=just_below)
    assert (again.of_tokens.has_slot_BTA == record.of_tokens.has_slot_BTA).all()
    np.testing.assert_allclose(causal, trained, atol=1e-6)


@pytest.mark.parametrize(
    "experts",
    [
        dict(count=4, capacity=0.5),
        dict(count=4, chosen=2, capacity=1.0),
        dict(count=2, noop=2),
        dict(count=3, choice="expert", capacity=0.5),
    ],
    ids=str,
)
def test_router_gradient_against_finite_differences(experts):
    """Choices are piecewise constant: a step small enough changes gates and losses only."""
    channel = channel_of(**experts)
    x_BTD, valid_BT = inputs()
    router = channel.params["router_DN"]
    direction = jnp.asarray(np.random.default_rng(5).normal(size=router.shape), jnp.float32)

    @jax.jit
    def loss(router):
        update_BTD, record = channel.merge(dict(channel.params, router_DN=router))(x_BTD, tokens_of(valid_BT), TOPK)
        weights_11D = jnp.cos(jnp.arange(D, dtype=jnp.float32))[None, None]
        return jnp.sum(update_BTD * weights_11D) + 0.1 * record.sums.balance + 1e-2 * record.sums.z

    step = 2e-4
    difference = (loss(router + step * direction) - loss(router - step * direction)) / (2 * step)
    np.testing.assert_allclose(jnp.vdot(jax.grad(loss)(router), direction), difference, rtol=2e-2, atol=2e-2)


def test_sums_add_up_over_a_split_batch():
    channel = channel_of(count=4, capacity=0.5)
    x_BTD, valid_BT = inputs()
    whole = channel(channel.params, x_BTD, valid_BT)[1].sums
    parts = [channel(channel.params, x_BTD[b : b + 1], valid_BT[b : b + 1])[1].sums for b in range(B)]
    for total, *rows in zip(whole, *parts, strict=True):
        np.testing.assert_allclose(total, sum(rows), rtol=1e-5)
