"""A sampler over several devices says what it says on one, and moves neither caches nor, over tensor, weights."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from mod_jax import sharding, trained
from mod_jax.errors import ConfigError, RequestError
from mod_jax.planning.collectives import find_collectives, token_movers
from mod_jax.sampling import Options, Sampler
from mod_jax.sampling.generate import batch_bucket

PROMPTS = ["def f(x):", "x", "", "import os, sys", "return"]
SHALLOW = {"model.depth": 2}
EXPERTS = {**SHALLOW, "model.layout": "Ee", "experts.count": 4}
CHOOSING = {**EXPERTS, "experts.choice": "expert", "experts.capacity": 0.5}
slow = pytest.mark.slow


def laid_out(model, **sizes):
    """The model over a mesh of these sizes, as `restore` gives it."""
    mesh = trained.serving_mesh(model.config, trained.as_mesh_config(sizes))
    names = ["params", "cutoffs_L"] + ["expert_cutoffs_LE"] * (model.expert_cutoffs_LE is not None)
    arrays = {name: getattr(model, name) for name in names}
    lies = trained.weight_shardings(model.model, arrays, mesh)
    return dataclasses.replace(model, mesh=mesh, **jax.device_put(arrays, lies))


@pytest.mark.parametrize(
    ("changes", "selection", "num_drafts", "sizes"),
    [
        ({**SHALLOW, "model.width": 64}, "threshold", 0, dict(data=2, fsdp=2, tensor=2)),  # tokens are sent
        pytest.param(SHALLOW, "predictor", 3, dict(data=4, tensor=2), marks=slow),
        pytest.param({**SHALLOW, "routing.skipped_keys": "kept"}, "router", 0, dict(data=2, fsdp=4), marks=slow),
        pytest.param(EXPERTS, "threshold", 0, dict(data=2, tensor=2, expert=2), marks=slow),
        pytest.param(CHOOSING, "threshold", 0, dict(fsdp=2), marks=slow),
    ],
)
def test_as_on_one_device(build, changes, selection, num_drafts, sizes):
    """Greedy and sampled tokens are the same, log-likelihoods within rounding; five rows of five lengths."""
    model, found = build(**changes), []
    options = [
        Options(temperature=t, top_k=50, seed=3, max_new_tokens=n)
        for t, n in zip((0, 0.9, 0, 0.9, 0.9), (8, 8, 3, 12, 1), strict=True)
    ]
    for one in (model, laid_out(model, **sizes)):
        sampler = Sampler(one, selection, num_drafts=num_drafts, capacity_L=(0.1,) * model.config.num_routed)
        completions = sampler.generate(PROMPTS, options)
        found.append(([(c.tokens, c.routed_fraction, c.steps) for c in completions], sampler.log_likelihoods(PROMPTS)))
    (tokens, log_p), (tokens_of_mesh, log_p_of_mesh) = found
    assert tokens_of_mesh == tokens
    for expected, actual in zip(log_p, log_p_of_mesh, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert f"over {math.prod(sizes.values())} devices" in sampler.describe(5)


@pytest.fixture(scope="module")
def in_use():
    return {}


@pytest.fixture
def decoding(build, in_use):
    """A sampler over data, fsdp and tensor, wide enough for tokens to be less than weights; and the decoding loop that
    it compiles for 8 rows."""
    if not in_use:
        model = laid_out(build(**SHALLOW, **{"model.width": 64}), data=2, fsdp=2, tensor=2)
        sampler = Sampler(model, "threshold")
        rows, options = sampler._rows(["x"] * 8, None, dict(max_new_tokens=8))
        request, state, _ = sampler._start(rows, options)
        with sharding.within(sampler._mesh):
            compiled = sampler._advance.lower(sampler._weights, request, state=state, target=np.int32(8)).compile()
        in_use.update(sampler=sampler, state=state, text=compiled.as_text())
    return in_use


def test_rows_and_heads_of_a_cache_lie_apart(decoding):
    for slots in decoding["state"].cache:
        keys, values = slots.items
        B, K, S, H = keys.shape
        parts = {array.addressable_shards[0].data.shape for array in (keys, values)}
        assert parts == {(B // 4, K // 2, S, H)}
        assert slots.positions_BS.addressable_shards[0].data.shape == (B // 4, S)


def test_decoding_moves_flags_over_data_and_single_tokens_over_fsdp_and_tensor(decoding):
    """Of the 4 rows that devices along fsdp have together: up to 257 logits each. A cache or a weight is more."""
    moved = find_collectives(decoding["text"], dict(decoding["sampler"]._mesh.shape))
    assert {collective.axes for collective in moved} == {("data", "fsdp"), ("fsdp",), ("tensor",)}
    for collective in moved:
        assert math.prod(collective.shape) <= (1 if "data" in collective.axes else 4 * 257), collective


def test_where_tokens_are_more_than_a_weight_it_is_the_weight_that_moves(build):
    sampler = Sampler(laid_out(build(**SHALLOW), fsdp=2), "threshold")
    tokens_BT = np.zeros((4, 32), np.int32)
    with sharding.within(sampler._mesh):
        given = sampler._by_rows((tokens_BT, tokens_BT, np.full(4, 32, np.int32)))
        text = sampler._score.lower(sampler._weights, sampler._choice, *given).compile().as_text()
    moved = find_collectives(text, dict(sampler._mesh.shape))
    assert ("all-gather", (16, 64)) in {(collective.kind, collective.shape) for collective in moved}
    weights = [(leaf.shape, leaf.sharding.shard_shape(leaf.shape)) for leaf in sampler._weights]
    assert not token_movers(moved, weights, ("data", "fsdp", "expert"))


def test_groups_of_rows_are_filled_up_alike():
    assert [batch_bucket(rows, 3) for rows in (1, 3, 4, 7, 13)] == [3, 3, 6, 9, 18]
    assert batch_bucket(5) == batch_bucket(5, 1) == 6


def test_each_device_restores_its_own_part(build, tools, tmp_path):
    """Of 8 devices none holds more than an eighth of the matrices, and none of them ever lies whole on one."""
    workdir = tools.save_run(build(), tmp_path)
    whole = trained.restore(workdir)
    model = trained.restore(workdir, mesh=dict(fsdp=4, tensor=2))
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        split = [a for a in leaf.sharding.spec if a is not None]
        part = leaf.size // 4 ** ("fsdp" in split) // 2 ** ("tensor" in split)
        assert {shard.data.size for shard in leaf.addressable_shards} == {part}
        assert split or leaf.size < 300, path  # 257 ids, an odd number, stay together
    jax.tree.map(np.testing.assert_array_equal, model.params, whole.params)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(model.params))
    assert held < 0.3 * sum(leaf.nbytes for leaf in jax.tree.leaves(whole.params))
    assert model.mesh.size == 8
    assert whole.mesh is None
    assert {type(leaf.sharding) for leaf in jax.tree.leaves(whole.params)} == {SingleDeviceSharding}


@pytest.mark.parametrize(
    ("mesh", "error", "message"),
    [
        (dict(tensor=16), ConfigError, r"mesh.tensor = 16 \* .*: needs 16 devices, there are 8"),
        (dict(tensor=4), ConfigError, r"model.num_kv_heads = 2: must be divisible by mesh.tensor = 4"),
        (dict(data=-1, fsdp=3), ConfigError, r"^mesh.data = -1: 8 devices do not divide by the others, 3"),
        (dict(data=-1, fsdp=-1), RequestError, r"mesh: data and fsdp are -1; only one may be"),
        (dict(tensor=0), RequestError, r"mesh.tensor = 0: must be an integer >= 1, or -1"),
        (dict(tensors=2), RequestError, r"mesh.tensors: no such axis; there are data, fsdp, tensor, expert"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_before_weights_are_read(build, tools, tmp_path, mesh, error, message):
    workdir = tools.save_run(build(), tmp_path)
    for file in (workdir / "checkpoints" / "4" / "params").rglob("*"):
        if file.is_file() and "d/" in str(file.relative_to(workdir)):
            file.unlink()
    with pytest.raises(error, match=message):
        trained.restore(workdir, mesh=mesh)


def test_several_processes_are_refused(build, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="by one process, and there are 2"):
        trained.serving_mesh(build(**SHALLOW).config, trained.as_mesh_config(dict(tensor=2)))
