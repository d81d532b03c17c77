"""The whole model: two ways to run a stack are one, causality, packed rows, gradients, rematerialisation, placement."""

import functools
import json
import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from output_losses import sums_of

from mod_jax import sharding
from mod_jax.config import make_config, to_flat_dict
from mod_jax.models import blocks
from mod_jax.models.blocks import CAUSAL_SELECTIONS, SELECTIONS, Choice
from mod_jax.models.decoder import repeating_unit
from mod_jax.models.model import make_model
from mod_jax.training.losses import objective

VOCAB = 31


def random_params(model, seed=3):
    """Weights of order 1, so that every part of the model matters; routers and predictors choose about half."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(0.3 * rng.normal(size=p.shape), p.dtype), model.abstract_params)


def cutoffs(config):
    """For threshold selection: another one for each block."""
    return np.linspace(0.2, -0.4, config.num_routed, dtype=np.float32)


@functools.cache
def make(config):
    """(forward pass, parameters)."""
    model = make_model(config, VOCAB)
    jitted = jax.jit(model.run)

    def run(params, tokens_BT, positions_BT=None, segments_BT=None, selection="topk"):
        if positions_BT is None:  # passed all the same, so that few programs are compiled
            _, positions_BT, segments_BT = packed(tokens_BT, tokens_BT[:, :0])
        return jitted(params, tokens_BT, positions_BT, segments_BT, Choice(selection, cutoffs(config)))

    return run, random_params(model)


@functools.cache
def loss_and_gradients(config):
    """A function of (params, weight of each part of the loss): ((loss, routing record), gradients)."""
    model = make_model(config, VOCAB)

    def loss(params, tokens_BT, weights):
        output = model.run(params, tokens_BT)
        sums = sums_of(output, jnp.roll(tokens_BT, -1, axis=1), jnp.ones_like(tokens_BT))
        total = weights[0] * sums.next_token + weights[1] * sums.predictor + weights[2] * sums.aux
        return total / tokens_BT.size, output.routing

    jitted = jax.jit(jax.value_and_grad(loss, has_aux=True))

    def run(params, cross_entropy=0.0, predictor=0.0, aux=0.0):
        return jitted(params, tokens(), np.array([cross_entropy, predictor, aux], np.float32))

    return run


jitted_sums = jax.jit(sums_of)


def tokens(batch=4, length=16, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, (batch, length)).astype(np.int32)


def packed(first, second):
    """Two documents in a row, then padding: tokens, positions, segments."""
    length = [first.shape[1], second.shape[1]]
    padding = max(0, 16 - sum(length))
    row = np.concatenate([first, second, np.zeros((len(first), padding), np.int32)], axis=1)
    positions = np.r_[np.arange(length[0]), np.arange(length[1]), np.zeros(padding)].astype(np.int32)
    segments = np.repeat([1, 2, 0], [*length, padding]).astype(np.int32)
    return row, np.tile(positions, (len(first), 1)), np.tile(segments, (len(first), 1))


def by_path(tree, without=()):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {"/".join(str(getattr(k, "key", k)) for k in path): leaf for path, leaf in leaves}
    return {name: leaf for name, leaf in named.items() if not set(name.split("/")) & set(without)}


def strip(params, name):
    """The parameter tree without every subtree of this name."""
    if not isinstance(params, dict):
        return params
    return {key: strip(value, name) for key, value in params.items() if key != name}


def assert_close(left, right, **tolerance):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), left, right)


# Stacks


STACKS = {
    "FR": {"model.depth": 4},
    "FRF, the tail full": {"model.depth": 5},
    "RFR, the tail routed": {"model.layout": "RF", "model.depth": 3},
    "FRR": {"model.layout": "FRR", "model.depth": 6},
    "R": {"model.layout": "R", "model.depth": 2},
    "F": {"model.layout": "F", "model.depth": 2},
    "a capacity per block": {"model.depth": 4, "routing.capacity": (0.25, 0.5)},
}
BY_THRESHOLD = ("RFR, the tail routed", "FRR")  # there the cut-off of a wrong block would be seen


@pytest.mark.parametrize("name", STACKS)
def test_scan_equals_loop_on_the_same_parameters(tiny_config, name):
    config, loop_config = (tiny_config(**STACKS[name], **{"model.scan": scan}) for scan in (True, False))
    (scan, params), (loop, loop_params) = make(config), make(loop_config)
    assert_close(params, loop_params, rtol=0)  # one layout, whatever the flag
    selection = "threshold" if name in BY_THRESHOLD else "topk"
    scanned, looped = (run(params, tokens(), selection=selection) for run in (scan, loop))
    np.testing.assert_allclose(scanned.logits_BTV, looped.logits_BTV, atol=2e-4)
    if not config.num_routed:
        assert scanned.routing is None
        return
    assert_close(scanned.routing, looped.routing, rtol=1e-3, atol=1e-4)
    assert scanned.routing.selected_BT.shape == (config.num_routed, 4, 16)
    if selection == "threshold":  # decided by the block's own cut-off, in order of depth
        cutoffs_L11 = cutoffs(config)[:, None, None]
        np.testing.assert_array_equal(scanned.routing.selected_BT, scanned.routing.router_logits_BT > cutoffs_L11)


def test_records_come_in_order_of_depth(tiny_config):
    run, params = make(tiny_config(**STACKS["a capacity per block"]))
    assert run(params, tokens()).routing.selected_BT.sum(axis=-1).tolist() == [[4] * 4, [8] * 4]  # 0.25 and 0.5 of 16


def test_the_repeating_unit_is_the_shortest_prefix_that_cycles(tiny_config):
    def unit(**changes):
        return repeating_unit(tiny_config(**changes).blocks)

    assert unit(**{"model.depth": 5}) == 2
    assert unit(**{"model.layout": "FRFR", "model.depth": 8}) == 2
    assert unit(**{"model.layout": "F", "model.depth": 3}) == 1
    assert unit(**{"model.layout": "FFR", "model.depth": 2}) == 1  # only F, F
    assert unit(**{"model.depth": 4, "routing.capacity": (0.25, 0.5)}) == 4
    assert unit(**{"model.depth": 4, "routing.capacity": (0.5, 0.5)}) == 2


def test_vanilla_recovery(tiny_config):
    # Gate 1 on every token: a routed stack with the weights of a dense one is the dense one.
    routed = tiny_config(**{"routing.score": "frozen", "routing.capacity": 1.0, "routing.predictor": False})
    dense = tiny_config(**{"model.layout": "F"})
    (run, params), (run_dense, _) = make(routed), make(dense)
    full, mod = params["units"]["blocks"][0], params["units"]["blocks"][1]["block"]
    interleaved = jax.tree.map(lambda f, r: jnp.stack([f, r], 1).reshape(-1, *f.shape[1:]), full, mod)
    dense_params = {**params, "units": {"blocks": {0: interleaved}}}
    out = run(params, tokens())
    assert out.routing.selected_BT.all()
    expected = run_dense(dense_params, tokens()).logits_BTV
    np.testing.assert_allclose(out.logits_BTV, expected, atol=2e-5)
    swapped = {**params, "units": {"blocks": {0: jax.tree.map(lambda p: p[::-1], interleaved)}}}
    assert np.abs(run_dense(swapped, tokens()).logits_BTV - expected).max() > 0.1


def test_threshold_needs_its_cutoffs(tiny_config):
    model = make_model(tiny_config(), VOCAB)
    with pytest.raises(ValueError, match="needs cutoffs_L, one cut-off per routed block"):
        jax.eval_shape(model.run, model.abstract_params, tokens(), choice=Choice("threshold"))


def test_a_routed_first_block_sees_the_token_id_alone(tiny_config):
    def scores(config):
        run, params = make(config)
        return np.asarray(run(params, repeated).routing.router_logits_BT[0])

    repeated = np.tile(tokens(4, 4), (1, 4))
    first = scores(tiny_config(**STACKS["R"])).reshape(4, 4, 4)
    np.testing.assert_allclose(first, first[:, :1].repeat(4, axis=1), atol=1e-5)  # ties, whatever came before
    after_a_full_block = scores(tiny_config()).reshape(4, 4, 4)
    assert np.abs(after_a_full_block - after_a_full_block[:, :1])[:, 1:].max() > 0.1


# Causality and packed rows


@pytest.mark.parametrize("selection", SELECTIONS)
def test_the_suffix_moves_the_prefix_under_topk_only(tiny_config, selection):
    run, params = make(tiny_config())
    before, cut = tokens(), 9
    after = before.copy()
    after[:, cut:] = (before[:, cut:] + 1 + tokens(seed=1)[:, cut:] % (VOCAB - 1)) % VOCAB
    assert (after[:, cut:] != before[:, cut:]).all()
    outputs = [run(params, row, selection=selection) for row in (before, after)]
    selected_LBT = np.asarray(outputs[0].routing.selected_BT)
    assert 0.1 < selected_LBT.mean() < 0.9  # something is chosen, something is not
    moved = np.abs(outputs[0].logits_BTV - outputs[1].logits_BTV).max(axis=(0, 2))
    assert moved[cut:].min() > 1e-2
    if selection == "topk":
        assert moved[:cut].max() > 1e-2
    else:
        assert moved[:cut].max() < 1e-5
        np.testing.assert_array_equal(outputs[1].routing.selected_BT[..., :cut], selected_LBT[..., :cut])


@pytest.mark.parametrize(
    ("selection", "topk_per", "coupled"),
    [*((s, "row", False) for s in CAUSAL_SELECTIONS), ("topk", "document", False), ("topk", "row", True)],
)
def test_documents_of_a_row_do_not_see_each_other(tiny_config, selection, topk_per, coupled):
    run, params = make(tiny_config(**{"routing.topk_per": topk_per}))
    firsts, second = (tokens(4, 6, seed=2), tokens(4, 6, seed=3)), tokens(4, 8, seed=1)
    outputs = [run(params, *packed(first, second), selection=selection) for first in firsts]
    assert 0 < np.asarray(outputs[0].routing.selected_BT)[:, :, 6:14].mean() < 1
    assert not outputs[0].routing.selected_BT[:, :, 14:].any()
    moved = np.abs(outputs[0].logits_BTV - outputs[1].logits_BTV)
    assert moved[:, :6].max() > 0.1
    # Top-k over the packed row ranks the documents against each other: documented, and seen here.
    assert moved[:, 6:14].max() > 1e-2 if coupled else moved[:, 6:14].max() < 1e-5


def test_a_packed_document_equals_itself_alone(tiny_config):
    run, params = make(tiny_config())
    second = tokens(4, 8, seed=1)
    row = run(params, *packed(tokens(4, 6, seed=2), second), selection="router").logits_BTV[:, 6:14]
    alone = packed(second, tokens(4, 0))
    np.testing.assert_allclose(run(params, *alone, selection="router").logits_BTV[:, :8], row, atol=1e-4)


def test_losses_of_a_padded_batch_equal_the_unpadded_ones(tiny_config):
    # C = 4 of 8 slots with 5 real tokens, and C = 4 of 5.
    def sums(capacity, tokens_BT, length):
        run, params = make(tiny_config(**{"model.depth": 2, "routing.capacity": capacity}))
        segments = np.tile((np.arange(tokens_BT.shape[1]) < length).astype(np.int32), (4, 1))
        targets = np.where(segments, np.roll(tokens_BT, -1, axis=1), 0)
        targets[:, length - 1] = 0
        positions = np.tile(np.arange(tokens_BT.shape[1], dtype=np.int32), (4, 1))
        output = run(params, tokens_BT, positions, segments)
        assert output.routing.selected_BT.sum(axis=-1).tolist() == [[4] * 4]
        return jitted_sums(output, targets, segments), jitted_sums(output, targets, np.ones_like(segments))

    (padded, counting_padding), (alone, _) = sums(0.5, tokens(4, 8), 5), sums(0.8, tokens(4, 8)[:, :5], 5)
    assert_close(padded, alone, rtol=1e-5)
    without_experts = slice(0, 4)  # whose two sums are 0 here
    pairs = zip(padded[without_experts], counting_padding[without_experts], strict=True)
    assert all(float(b) - float(a) > 0.1 for a, b in pairs)


# Gradients


def test_the_language_model_loss_alone_trains_every_router(tiny_config):
    config = tiny_config()
    run, (_, params) = loss_and_gradients(config), make(config)
    (_, record), gradients = run(params, cross_entropy=1.0)
    gradient = np.asarray(gradients["units"]["blocks"][1]["router"]["weight_D"])
    assert np.linalg.norm(gradient, axis=1).min() > 1e-3  # of each routed block
    direction, step, values = gradient / np.linalg.norm(gradient), 2e-3, []
    for sign in (1, -1):
        routed = params["units"]["blocks"][1]
        moved = {**routed, "router": {"weight_D": routed["router"]["weight_D"] + sign * step * direction}}
        changed = {**params, "units": {"blocks": {0: params["units"]["blocks"][0], 1: moved}}}
        (value, moved_record), _ = run(changed, cross_entropy=1.0)
        np.testing.assert_array_equal(moved_record.selected_BT, record.selected_BT)  # away from ties
        values.append(float(value))
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(np.linalg.norm(gradient), rel=0.02)


def test_the_predictor_leaves_the_language_model_alone(tiny_config):
    with_predictor, without = tiny_config(), tiny_config(**{"routing.predictor": False})
    _, params = make(with_predictor)
    (_, record), of_both = loss_and_gradients(with_predictor)(params, cross_entropy=1.0, predictor=1.0)
    (_, bare_record), of_model = loss_and_gradients(without)(
        strip(params, "predictor"), cross_entropy=1.0, predictor=1.0
    )
    assert bare_record.predictor_logits_BT is None
    np.testing.assert_array_equal(record.selected_BT, bare_record.selected_BT)
    trunk = by_path(of_both, without=["predictor"])
    assert trunk.keys() == by_path(of_model).keys()
    for name, gradient in by_path(of_model).items():
        np.testing.assert_allclose(trunk[name], gradient, atol=1e-7, err_msg=name)  # of two programs

    _, of_predictor = loss_and_gradients(with_predictor)(params, predictor=1.0)
    reached = {name for name, gradient in by_path(of_predictor).items() if np.any(gradient != 0)}
    assert reached == {name for name in by_path(params) if "/predictor/" in name}
    _, of_aux = loss_and_gradients(with_predictor)(params, aux=1.0)
    assert any(np.any(g != 0) for g in by_path(of_aux, without=["predictor"]).values())  # zeros are no accident


def test_every_parameter_gets_a_gradient_at_step_zero(tiny_config):
    config = tiny_config()
    params = jax.jit(make_model(config, VOCAB).init)()
    (_, record), gradients = loss_and_gradients(config)(params, cross_entropy=1.0, predictor=1.0)
    assert np.std(record.router_logits_BT, axis=(1, 2)).min() > 0.03
    assert [name for name, g in by_path(gradients).items() if not np.abs(g).max() > 0] == []


# Rematerialisation


def test_remat_changes_neither_gradients_nor_choices_nor_counts(tiny_config):
    _, params = make(tiny_config())
    parts = dict(cross_entropy=1.0, predictor=1.0, aux=0.1)
    (value, record), gradients = loss_and_gradients(tiny_config())(params, **parts)
    for variant in ({"model.remat": "dots"}, {"model.remat": "full"}):
        run = loss_and_gradients(tiny_config(**variant))
        (other_value, other_record), other = run(params, **parts)
        assert float(other_value) == pytest.approx(float(value), rel=1e-6)
        np.testing.assert_array_equal(other_record.selected_BT, record.selected_BT)
        assert_close(other_record, record, rtol=1e-4, atol=1e-5)
        assert_close(other, gradients, rtol=1e-3, atol=1e-5)


def count_sorts(config):
    """Sorts in the program of a gradient: choosing takes two, and choosing again in the backward pass two more."""
    model = make_model(config, VOCAB)

    def loss(params, tokens_BT):
        output = model.run(params, tokens_BT)
        return objective(sums_of(output, tokens_BT, jnp.ones_like(tokens_BT)), jnp.float32(1), config)

    rows = jax.ShapeDtypeStruct((4, 16), jnp.int32)
    return len(re.findall(r"= sort\[", str(jax.make_jaxpr(jax.grad(loss))(model.abstract_params, rows))))


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_the_backward_pass_reads_the_saved_indices(tiny_config, monkeypatch, remat):
    config = tiny_config(**{"model.remat": remat})
    assert count_sorts(config) == 2
    monkeypatch.setattr(blocks, "checkpoint_name", lambda value, name: value)  # without their name they are not saved
    assert count_sorts(config) == (2 if remat == "none" else 4)


# Precision


def test_bfloat16_keeps_parameters_scores_and_logits_in_float32(tiny_config):
    config = tiny_config(**{"model.dtype": "bfloat16"})
    run, params = make(config)
    assert {p.dtype for p in jax.tree.leaves(make_model(config, VOCAB).abstract_params)} == {jnp.dtype("float32")}
    output = run(params, tokens())
    assert output.logits_BTV.dtype == jnp.float32
    record = output.routing
    assert record.router_logits_BT.dtype == record.predictor_logits_BT.dtype == record.gate_BT.dtype == jnp.float32
    exact = make(tiny_config())[0](params, tokens())
    gap = np.abs(record.router_logits_BT[0] - exact.routing.router_logits_BT[0]).max()
    assert 0 < gap < 0.1  # it is the trunk that computed in bfloat16


# Parameters: how many, where, and the same on any number of devices


SPECS_OF = {"FRF": {"model.depth": 5, "model.qk_norm": True}, "tied R": {"model.layout": "R", "model.depth": 1}}


@pytest.mark.parametrize("name", SPECS_OF)
def test_every_parameter_names_all_of_its_axes(tiny_config, name):
    model = make_model(tiny_config(**SPECS_OF[name], **{"model.tie_embedding": name == "tied R"}), VOCAB)
    shapes = by_path(model.abstract_params)
    leaves = jax.tree_util.tree_leaves_with_path(model.logical_specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
    specs = {"/".join(str(k.key) for k in path): spec for path, spec in leaves}
    assert specs.keys() == shapes.keys()
    for path, spec in specs.items():
        assert len(spec) == shapes[path].ndim, path
        assert (spec[0] == "layers") == path.startswith("units/"), path
        assert "layers" not in spec[1:], path
    assert specs["units/blocks/0/" + ("attention" if name == "FRF" else "block/attention") + "/q_DNH"] == PartitionSpec(
        "layers", "embed", "heads", None
    )


def test_initial_parameters_do_not_depend_on_the_number_of_devices(tiny_config):
    meshes = [
        ({"mesh.data": 1}, jax.devices()[:1]),
        ({"mesh.data": 1, "mesh.fsdp": 2}, jax.devices()[:2]),
        ({"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}, jax.devices()),
    ]
    results = []
    for changes, devices in meshes:
        config = tiny_config(**changes, **{"model.depth": 2})
        mesh, model = sharding.make_mesh(config, devices), make_model(config, 32)
        with jax.set_mesh(mesh):
            placed = sharding.param_shardings(mesh, model.logical_specs, model.abstract_params)
            results.append(jax.jit(model.init, out_shardings=placed)())
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], other)
    split = {leaf.size // leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(results[2])}
    assert split == {1, 2, 4}  # whole, over one axis, over two
    tables = results[0]["embedder"]
    assert not np.array_equal(tables["table_VD"], tables["unembed_DV"].T)  # each weight has its own draw


def test_three_billion_parameters_are_counted_without_being_made():
    config = make_config(
        **{"model.width": 2560, "model.depth": 32, "model.num_heads": 20, "model.num_kv_heads": 4, "train.steps": 1}
    )
    model = make_model(config, 50_304)
    D, H, N, K, F, V, P = 2560, 128, 20, 4, 10_240, 50_304, 640
    block = D * H * (2 * N + 2 * K) + 2 * D * F + 2 * D + (2 * H if config.model.qk_norm else 0)
    routed = D + (D * P + P + P + 1)  # router; predictor
    total = 2 * V * D + 32 * block + 16 * routed + D
    assert sum(math.prod(p.shape) for p in jax.tree.leaves(model.abstract_params)) == total
    assert 2.4e9 < total < 3e9
    tokens_BT = jax.ShapeDtypeStruct((2, 2048), jnp.int32)
    output = jax.eval_shape(model.run, model.abstract_params, tokens_BT)
    assert output.logits_BTV.shape == (2, 2048, V)
    assert output.routing.selected_BT.shape == (16, 2, 2048)


def test_tied_embeddings_are_one_table(tiny_config):
    untied, tied = (make_model(tiny_config(**{"model.tie_embedding": tie}), VOCAB) for tie in (False, True))
    names = [set(model.abstract_params["embedder"]) for model in (untied, tied)]
    assert names == [{"table_VD", "unembed_DV"}, {"table_VD"}]


# NNX


TREE_MODE = """
import json, sys
import flax, jax, numpy as np
from mod_jax.config import from_flat_dict
from mod_jax.models.model import make_model
flat, seed = json.loads(sys.argv[1])
model = make_model(from_flat_dict(flat), 31)
rng = np.random.default_rng(seed)
params = jax.tree.map(lambda p: (0.3 * rng.normal(size=p.shape)).astype(p.dtype), model.abstract_params)
tokens = np.random.default_rng(0).integers(0, 31, (4, 16)).astype(np.int32)
logits = jax.jit(model.run)(params, tokens).logits_BTV
units = model.logical_specs["units"]["blocks"][1]["block"]["attention"]["q_DNH"]
print(json.dumps([flax.config.nnx_graph_mode, flax.config.nnx_graph_updates, list(units), logits.tolist()]))
"""


def test_nnx_tree_mode_gives_the_same_model(tiny_config):
    config = tiny_config()
    environment = {**os.environ, "NNX_GRAPH_MODE": "false", "NNX_GRAPH_UPDATES": "false"}
    argument = json.dumps([to_flat_dict(config), 3])
    program = [sys.executable, "-c", TREE_MODE, argument]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    graph_mode, graph_updates, q_spec, logits = json.loads(done.stdout.splitlines()[-1])
    assert (graph_mode, graph_updates) == (False, False)
    assert q_spec == ["layers", "embed", "heads", None]
    run, params = make(config)
    np.testing.assert_allclose(run(params, tokens()).logits_BTV, logits, atol=1e-5)
