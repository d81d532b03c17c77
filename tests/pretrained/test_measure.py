"""What a model can leave out is found where it was planted, and cut-offs select what they are asked to."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY

from mod_jax.config import make_config
from mod_jax.models.decoder import by_depth, from_depth
from mod_jax.models.model import make_model
from mod_jax.pretrained import measure
from mod_jax.pretrained.measure import Moments, Probe
from mod_jax.training.losses import token_cross_entropy

VOCAB, DEPTH, T = 64, 5, 32
MARKED = 16  # ids below it
CONFIG = make_config(
    **TINY
    | {"model.layout": "F", "model.depth": DEPTH, "model.gated_mlp": True, "model.activation": "silu"}
    | {"routing.skipped_keys": "kept", "data.seq_len": T}
)


def batch_of(rows=8, seed=0):
    rng = np.random.default_rng(seed)
    tokens_BT = rng.integers(0, VOCAB, (rows, T)).astype(np.int32)
    positions_BT = np.tile(np.arange(T, dtype=np.int32), (rows, 1))
    shape = dict(positions_BT=positions_BT, segment_ids_BT=np.ones_like(tokens_BT))
    return dict(tokens_BT=tokens_BT, targets_BT=np.roll(tokens_BT, -1, axis=1), **shape)


@pytest.fixture(scope="module")
def probe():
    return Probe(CONFIG, VOCAB)


def planted(change, seed=0):
    """Dense parameters of order 1, with blocks as `change(blocks)` leaves them."""
    model = make_model(CONFIG, VOCAB)
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda p: jnp.asarray(0.3 * rng.normal(size=p.shape), p.dtype), model.abstract_params)
    blocks = by_depth(params, CONFIG)
    change(blocks, params)
    return from_depth(blocks, params, CONFIG)


def silence(block):
    """A block that adds nothing."""
    block["attention"]["o_NHD"] = 0 * block["attention"]["o_NHD"]
    block["mlp"]["down_FD"] = 0 * block["mlp"]["down_FD"]


def test_a_block_that_does_nothing_is_the_cheapest(probe):
    dense = planted(lambda blocks, _: silence(blocks[3]))
    params = probe.make_params(dense, np.zeros((DEPTH, 16)))
    batch = batch_of()
    worth_L = probe.leave_one_out(params, batch)
    assert abs(worth_L[3]) < 1e-6
    assert np.abs(np.delete(worth_L, 3)).min() > 1e-3
    assert measure.cheapest(np.abs(worth_L), 3)[0] == 3
    whole = probe.leave_out(params, [], [batch]).per_token
    apart_L = [probe.leave_out(params, [depth], [batch]).per_token - whole for depth in range(DEPTH)]
    np.testing.assert_allclose(worth_L, apart_L, atol=1e-5)


def test_the_first_and_the_last_block_are_never_chosen():
    assert measure.cheapest(np.array([0.0, 3.0, 1.0, 2.0, 0.0]), 5) == [2, 3, 1]


def test_a_ridge_router_finds_the_tokens_that_its_block_moves(probe):
    def only_marked(blocks, params):
        table_VD = params["embedder"]["table_VD"]
        sign_V = jnp.where(jnp.arange(VOCAB) < MARKED, 1.0, -1.0)
        params["embedder"]["table_VD"] = table_VD.at[:, 0].set(sign_V)
        for block in blocks:
            silence(block)
        mlp = blocks[2]["mlp"]
        # The gate reads the mark alone: silu is large for marked tokens and 0 for the others.
        mlp["gate_DF"] = jnp.zeros_like(mlp["gate_DF"]).at[0].set(20.0)
        mlp["down_FD"] = jnp.asarray(np.random.default_rng(1).normal(size=mlp["down_FD"].shape), jnp.float32)
        blocks[2]["mlp_norm"]["scale_D"] = jnp.ones(16)

    params = probe.make_params(planted(only_marked), np.zeros((DEPTH, 16)))
    batch = batch_of()
    routers_LD, fit_L = measure.fit_routers(probe.moments(params, batch))
    assert fit_L[2] > 0.5
    assert not routers_LD[[0, 1, 3, 4]].any()  # there is nothing to predict
    params = probe.make_params(planted(only_marked), routers_LD)
    share = np.mean(batch["tokens_BT"] < MARKED)
    cutoffs_L = probe.cutoffs(params, measure.capacity_of(DEPTH, [2], share), batch)
    run = jax.jit(make_model(probe.config, VOCAB).run)
    choice = measure.Choice("threshold", jnp.asarray(cutoffs_L))
    selected_LBT = np.asarray(run(params, batch["tokens_BT"], choice=choice).routing.selected_BT)
    np.testing.assert_array_equal(selected_LBT[2], batch["tokens_BT"] < MARKED)
    assert selected_LBT[[0, 1, 3, 4]].all()


def test_the_regression_by_hand():
    """y = 2 a - b + 5 of independent unit a, b: the router is (2, -1) / sqrt(5), shrunk evenly, without the 5."""
    rng = np.random.default_rng(0)
    x_MD = rng.normal(size=(200_000, 2)) + [3.0, -1.0]
    y_M = 2 * x_MD[:, 0] - x_MD[:, 1] + 5
    sums = x_MD.T @ x_MD, x_MD.T @ y_M, x_MD.sum(0), y_M.sum(), np.square(y_M).sum(), float(len(y_M))
    routers_LD, fit_L = measure.fit_routers(Moments(*(np.asarray(a)[None] for a in sums)))
    np.testing.assert_allclose(routers_LD[0], np.array([2, -1]) / 5**0.5, atol=1e-2)
    assert np.std(x_MD @ routers_LD[0]) == pytest.approx(1, abs=1e-3)
    assert fit_L[0] == pytest.approx(1 - (0.03 / 1.03) ** 2, abs=1e-3)


def test_cutoffs_select_the_capacity_block_after_block(probe):
    rng = np.random.default_rng(2)
    params = probe.make_params(planted(lambda *_: None), rng.normal(size=(DEPTH, 16)))
    batch = batch_of()
    capacity_L = np.array([1.0, 0.5, 0.25, 1.0, 0.75])
    cutoffs_L = probe.cutoffs(params, capacity_L, batch)
    assert np.isneginf(cutoffs_L[[0, 3]]).all()
    np.testing.assert_allclose(
        probe.loss(params, cutoffs_L, [batch]).capacity_L, capacity_L, atol=1 / batch["tokens_BT"].size
    )
    by_rows = probe.topk_loss(params, capacity_L, [batch])
    np.testing.assert_allclose(by_rows.capacity_L, capacity_L)
    topk = dataclasses.replace(
        probe.config, routing=dataclasses.replace(probe.config.routing, capacity=tuple(capacity_L))
    )
    model = make_model(topk, VOCAB)
    apart = [jax.tree.map(lambda w, d=d: w[d], params["units"]["blocks"][0]) for d in range(DEPTH)]
    own = from_depth(apart, {name: params[name] for name in ("embedder", "final_norm")}, topk)
    record = jax.jit(model.run)(own, batch["tokens_BT"]).routing
    np.testing.assert_allclose(np.sum(record.selected_BT, axis=(1, 2)), by_rows.selected_L)


def test_a_probe_that_selects_all_is_the_dense_model(probe):
    dense = planted(lambda *_: None)
    batch = batch_of()
    params = probe.make_params(dense, np.random.default_rng(3).normal(size=(DEPTH, 16)))
    choice = measure.Choice("threshold", jnp.full(DEPTH, -jnp.inf))
    whole = jax.jit(make_model(CONFIG, VOCAB).run)(dense, batch["tokens_BT"]).logits_BTV
    routed = jax.jit(make_model(probe.config, VOCAB).run)(params, batch["tokens_BT"], choice=choice).logits_BTV
    np.testing.assert_array_equal(routed, whole)


def test_a_tied_table_gives_the_same_loss(probe):
    """The probe has its transpose beside it."""
    tied = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, tie_embedding=True))
    dense, batch = planted(lambda *_: None), batch_of()
    table_VD = dense["embedder"]["table_VD"]
    routers_LD = np.zeros((DEPTH, 16))
    apart = probe.make_params({**dense, "embedder": {"table_VD": table_VD, "unembed_DV": table_VD.T}}, routers_LD)
    together = Probe(tied, VOCAB).make_params({**dense, "embedder": {"table_VD": table_VD}}, routers_LD)
    losses = [probe.leave_out(params, [], [batch]).per_token for params in (apart, together)]
    assert losses[0] == losses[1]
    logits_BTV = jax.jit(make_model(tied, VOCAB).run)({**dense, "embedder": {"table_VD": table_VD}}, batch["tokens_BT"])
    nats_BT, _ = token_cross_entropy(logits_BTV.logits_BTV, jnp.asarray(batch["targets_BT"]))
    assert losses[0] == pytest.approx(float(nats_BT.mean()), rel=1e-5)
