"""One path: whatever runs a block, and whatever it remembers by, tokens are chosen alike and get the same update.

Every kind of block, whole and routed, under every causal rule: the uncached forward pass against prompts, single
tokens of several rows, one row alone, and a few tokens at a time. And a kind of block that this file adds itself.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mod_jax import config as config_lib
from mod_jax import layout as layout_lib
from mod_jax import sharding
from mod_jax.config import Config
from mod_jax.data.batches import MODEL_INPUTS
from mod_jax.models import mlp
from mod_jax.models.blocks import Choice
from mod_jax.models.decoder import by_depth, from_depth
from mod_jax.models.layers import dense, normal
from mod_jax.models.memory import Slots
from mod_jax.models.model import make_model
from mod_jax.sampling import Sampler
from mod_jax.sampling import cache as cache_lib
from mod_jax.sampling import stack as stack_lib
from mod_jax.sharding import param
from mod_jax.training.language import Language
from mod_jax.training.step import init_state, make_train_step

T = 12


class CausalMean(nnx.Module):
    """A mixer: the mean of what a token and the earlier ones of its document say."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        D = config.model.width
        self.say_DD = param(rngs, (D, D), ("embed", None), normal(D**-0.5))

    def ask(self, x_BTD, tokens):
        return (), dense(x_BTD, self.say_DD[...])

    def answer(self, query, seen, tokens):
        earlier_BTS = seen.is_visible_to(tokens).astype(seen.items.dtype)
        total_BTD = jnp.einsum("BTS,BSD->BTD", earlier_BTS, seen.items)
        return total_BTD / jnp.maximum(jnp.sum(earlier_BTS, axis=-1, keepdims=True), 1)

    @staticmethod
    def flops(config: Config, num_tokens: float, num_pairs: float):
        return 2 * num_tokens * config.model.width**2, 2 * num_pairs * config.model.width

    @staticmethod
    def item_flops(config: Config, num_tokens: float):
        return 2 * num_tokens * config.model.width**2


@pytest.fixture(autouse=True)
def causal_mean(monkeypatch):
    """The line that adds a kind of block: a letter. `C` is whole, `c` routed."""
    monkeypatch.setitem(layout_lib.LETTERS, "C", (f"{__name__}.CausalMean", "mod_jax.models.mlp.MLP"))


# Cached and uncached


KINDS = {
    "full": "F",
    "routed": "FR",
    "by its other letter": "Ff",
    "attention alone": "A",
    "attention routed": "Aa",
    "MLP alone": "FM",
    "MLP routed": "Fm",
    "every kind": "FRAaMmCc",
    "as pretrained families have it": "FR",
    "keys of bypassed tokens kept": "FRamc",
    "a new mixer": "C",
    "a new mixer routed": "Cc",
}
CHANGES = {
    "as pretrained families have it": {
        "model.gated_mlp": True,
        "model.activation": "silu",
        "model.qkv_bias": True,
        "model.norm_eps": 1e-2,
        "model.embed_scale": False,
        "model.rope_factors": (1.0, 3.0),
        "model.tie_embedding": True,
        "routing.gate": "one",
    },
    "keys of bypassed tokens kept": {"routing.skipped_keys": "kept"},
}
RULES = ("router", "predictor", "threshold", "all", "nobody")


def model_of(build, layout, **changes):
    routed = any(layout_lib.is_routed(letter) for letter in layout)
    switches = {} if routed else {"routing.aux_weight": 0.0}
    return build(**{"model.layout": layout, "model.depth": max(2, len(layout)), **switches, **changes})


def rules_of(model):
    """All of them, but of the deepest layout two: what it has in each block, a shallower one has too."""
    if not model.config.num_routed:
        return ("all",)
    return RULES if len(model.config.blocks) < 8 else ("router", "threshold")


def choice_of(model, rule):
    return Choice(rule, model.cutoffs_L)


@functools.cache
def uncached_program(config):
    run = make_model(config, 257).run
    return jax.jit(lambda params, tokens_BT, choice: run(params, tokens_BT, choice=choice))


@functools.cache
def cached_programs(config):
    """(prefill, decode, extend) of pure parameters."""

    def stack(params):
        return stack_lib.split(make_model(config, 257).merge(params), "cpu")

    def prefill(params, tokens_BT, valid_BT, choice):
        apart, (B, length) = stack(params), tokens_BT.shape
        cache = cache_lib.init_cache(config, B, (length,) * len(config.blocks))
        output = stack_lib.prefill(apart, tokens_BT, valid_BT, cache, choice, (2,) * config.num_routed)
        return apart.logits(output.x_BTD), output

    def decode(params, tokens_B, positions_B, cache, choice):
        apart, B = stack(params), len(tokens_B)
        rows_L = (min(2, B),) * config.num_routed
        output = stack_lib.decode(apart, tokens_B, positions_B, jnp.ones(B, bool), cache, choice, rows_L)
        return apart.logits(output.x_BTD), output

    def extend(params, tokens_BT, positions_BT, cache, choice):
        apart, there_BT = stack(params), jnp.ones(tokens_BT.shape, bool)
        output = stack_lib.extend(apart, tokens_BT, positions_BT, there_BT, cache, choice, (1,) * config.num_routed)
        return apart.logits(output.x_BTD), output

    return jax.jit(prefill), jax.jit(decode), jax.jit(extend)


def pieces(model, tokens_BT, choice, start, step):
    """(logits, selected) of a prompt of `start` tokens, then `step` tokens at a time: 1 decodes, more extend."""
    prefill, decode, extend = cached_programs(model.config)
    B, length = tokens_BT.shape
    valid_BT = np.broadcast_to(np.arange(length)[None] < start, tokens_BT.shape)
    logits, output = prefill(model.params, tokens_BT, valid_BT, choice)
    found = [(logits[:, :start], output.selected_LBT[..., :start])]
    for t in range(start, length, step):
        now_BT = np.broadcast_to(np.arange(t, t + step, dtype=np.int32)[None], (B, step))
        if step == 1:
            logits, output = decode(model.params, tokens_BT[:, t], now_BT[:, 0], output.cache, choice)
        else:
            logits, output = extend(model.params, tokens_BT[:, t : t + step], now_BT, output.cache, choice)
        found.append((logits, output.selected_LBT))
    return np.concatenate([x for x, _ in found], axis=1), np.concatenate([x for _, x in found], axis=2), output.cache


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_run_a_block_gives_the_same(build, tools, kind):
    model = model_of(build, KINDS[kind], **CHANGES.get(kind, {}))
    tokens_BT = tools.random_tokens(3, T)
    fractions = []
    for rule in rules_of(model):
        choice = choice_of(model, rule)
        output = uncached_program(model.config)(model.params, tokens_BT, choice)
        selected_LBT = np.zeros((0, 3, T), bool) if output.routing is None else np.asarray(output.routing.selected_BT)
        fractions.append(selected_LBT.mean() if model.config.num_routed else 1.0)
        for rows, start, step in ((slice(None), T, 1), (slice(None), 4, 1), (slice(1, 2), 4, 1), (slice(None), 6, 3)):
            logits_BTV, chosen_LBT, cache = pieces(model, tokens_BT[rows], choice, start, step)
            np.testing.assert_array_equal(chosen_LBT, selected_LBT[:, rows], err_msg=rule)
            np.testing.assert_allclose(logits_BTV, output.logits_BTV[rows], atol=2e-5, err_msg=rule)
            stored = [memory.lengths_B for memory in cache if isinstance(memory, Slots)]
            counts_L, everything = iter(chosen_LBT.sum(axis=2)), np.full(len(logits_BTV), T)
            kept = model.config.routing.skipped_keys == "kept"
            expected = [next(counts_L) if spec.routed and not kept else everything for spec in model.config.blocks]
            with_mixer = [count for count, spec in zip(expected, model.config.blocks, strict=True) if spec.mixer]
            np.testing.assert_array_equal(stored, with_mixer, err_msg=rule)
    assert not model.config.num_routed or sum(0 < fraction < 1 for fraction in fractions) >= 2  # some are bypassed


def test_the_comparison_can_fail(build, tools):
    """A token that everybody sees though it was not selected changes what the selected ones get."""
    model = model_of(build, "FR")
    tokens_BT, choice = tools.random_tokens(3, T), choice_of(build(**{"model.depth": 2}), "threshold")
    honest = uncached_program(model.config)(model.params, tokens_BT, choice)
    logits_BTV, _, _ = pieces(model, tokens_BT, Choice("all"), 4, 1)
    assert np.abs(logits_BTV - honest.logits_BTV).max() > 1e-2


def test_a_budget_per_request_decides_each_row_by_its_own_cutoffs(build, tools):
    model = model_of(build, "FR", **{"model.depth": 4})
    tokens_BT = tools.random_tokens(3, T)
    cutoffs_LB = jnp.asarray(np.array([[0.3, -9.0, 9.0], [-0.2, -9.0, 0.1]], np.float32))
    together = uncached_program(model.config)(model.params, tokens_BT, Choice("threshold", cutoffs_LB))
    logits_BTV, selected_LBT, _ = pieces(model, tokens_BT, Choice("threshold", cutoffs_LB), 4, 1)
    np.testing.assert_array_equal(selected_LBT, together.routing.selected_BT)
    np.testing.assert_allclose(logits_BTV, together.logits_BTV, atol=2e-5)
    for row in range(3):
        choice = Choice("threshold", cutoffs_LB[:, row])
        alone = uncached_program(model.config)(model.params, tokens_BT[row : row + 1], choice)
        np.testing.assert_array_equal(alone.routing.selected_BT[:, 0], selected_LBT[:, row])
    assert selected_LBT[:, 1].all()
    assert not selected_LBT[0, 2].any()


# Parameters by depth, and what channels report


@pytest.mark.parametrize("layout", ["FRR", "CaM"])
def test_parameters_by_depth_are_those_of_the_blocks_and_can_be_put_back(build, layout):
    model = model_of(build, layout, **{"model.depth": 8})  # two units and a tail of two
    found = by_depth(model.params, model.config)
    apart = model.model.merge(model.params).blocks_apart()
    for params, block in zip(found, apart, strict=True):
        jax.tree.map(np.testing.assert_array_equal, params, nnx.to_pure_dict(nnx.state(block, nnx.Param)))
    assert [("router" in params) for params in found] == [spec.routed for spec in model.config.blocks]
    jax.tree.map(np.testing.assert_array_equal, from_depth(found, model.params, model.config), model.params)
    emptied = {**model.params, "units": None, "tail": None}
    again = from_depth([jax.tree.map(lambda w: w + 1, block) for block in found], emptied, model.config)
    assert jax.tree.structure(again) == jax.tree.structure(model.params)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b + 1), again["tail"], model.params["tail"])


class Report(NamedTuple):
    tokens: jax.Array
    square_sum: jax.Array
    of_tokens: tuple = ()


class ReportingMLP(mlp.MLP):
    """A channel that counts the tokens that are there, and sums the squares of what it gives them."""

    def __call__(self, x_BTD, tokens, choice):
        out_BTD, _ = super().__call__(x_BTD, tokens, choice)
        there_BT = (tokens.segments_BT > 0).astype(jnp.float32)
        return out_BTD, Report(jnp.sum(there_BT), jnp.sum(there_BT[..., None] * jnp.square(out_BTD)))


def test_what_a_channel_reports_comes_out_of_every_stack_in_order_of_depth(monkeypatch):
    monkeypatch.setattr(mlp, "MLP", ReportingMLP)
    tokens_BT = np.random.default_rng(0).integers(1, 32, (2, 16)).astype(np.int32)

    def run(**changes):
        model = make_model(config_lib.make_config(**{**NEW, "model.layout": "FAR", "model.depth": 5, **changes}), 32)

        def loss(params):
            report = model.run(params, tokens_BT).channel
            return jnp.sum(report.square_sum), report

        (_, report), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(jax.jit(model.init)())
        return report, gradients

    report, gradients = run()
    # F A R, and F A as the tail: three MLPs, of which the routed one sees 4 of each row's 16 tokens.
    assert report.tokens.tolist() == [32, 8, 32]
    assert (report.square_sum > 0).all()
    assert np.abs(gradients["units"]["blocks"][2]["block"]["mlp"]["up_DF"]).max() > 0
    for variant in ({"model.scan": False}, {"model.remat": "full"}):
        again, other_gradients = run(**variant)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), again, report)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), other_gradients, gradients)
    report, _ = run(**{"model.depth": 6, "routing.capacity": (0.25, 0.5)})
    assert report.tokens.tolist() == [32, 8, 32, 16]


# A kind of block that is new


NEW = {
    "model.layout": "Cc",
    "model.depth": 4,
    "model.width": 16,
    "model.num_heads": 2,
    "data.source": "synthetic",
    "data.seq_len": 16,
    "routing.capacity": 0.25,
    "routing.aux_weight": 0.1,
    "train.batch_size": 8,
    "train.steps": 8,
}


def train(config, num_devices):
    """(losses of eight steps on one batch, parameters after them) on so many devices."""
    mesh = sharding.make_mesh(config, jax.devices()[:num_devices])
    model = make_model(config, 32)
    rows = np.random.default_rng(0).integers(1, 32, (8, 17)).astype(np.int32)
    positions = np.tile(np.arange(16, dtype=np.int32), (8, 1))
    batch = dict(zip(MODEL_INPUTS, (rows[:, :-1], rows[:, 1:], positions, np.ones_like(positions)), strict=True))
    with jax.set_mesh(mesh):
        state = jax.jit(lambda: init_state(config, model))()
        step = jax.jit(make_train_step(Language(config, model), 8))
        placed = sharding.param_shardings(mesh, model.logical_specs, model.abstract_params)
        state = state._replace(params=jax.device_put(state.params, placed))
        batch = jax.device_put(batch, sharding.batch_sharding(mesh))
        losses = []
        for _ in range(8):
            state, metrics = step(state, batch)
            losses.append(float(metrics["train/loss"]))
    return np.array(losses), jax.device_get(state.params)


def test_a_new_kind_trains_and_shards():
    alone, params = train(config_lib.make_config(**NEW), 1)
    assert alone[-1] < alone[0] - 0.2
    assert "causalmean" in params["units"]["blocks"][1]["block"]
    meshed = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
    together, _ = train(config_lib.make_config(**NEW, **meshed), 8)
    np.testing.assert_allclose(together, alone, rtol=1e-4)


def test_a_new_kind_samples(build):
    model = model_of(build, "Cc", **{"model.depth": 4})
    sampler = Sampler(model, "threshold")
    (whole,) = sampler.generate("ab", temperature=0, max_new_tokens=8)
    assert len(whole.tokens) == 8
    by_drafts = Sampler(model, "threshold", num_drafts=2).generate("ab", temperature=0, max_new_tokens=8)
    assert by_drafts[0].tokens == whole.tokens
    ids = np.array([0, *model.tokenizer.encode("ab"), *whole.tokens], np.int32)
    logits_BTV = uncached_program(model.config)(model.params, ids[None], choice_of(model, "threshold")).logits_BTV
    assert np.argmax(logits_BTV[0, 2:-1], axis=-1).tolist() == whole.tokens
