"""The mesh, where arrays live on it, and that eight devices train like one without moving an activation."""

import collections
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny import TINY

from mod_jax import sharding
from mod_jax.config import make_config
from mod_jax.data.batches import train_batches
from mod_jax.data.corpus import prepare_corpus
from mod_jax.errors import ConfigError
from mod_jax.models.model import make_model
from mod_jax.planning import topology
from mod_jax.planning.collectives import find_collectives
from mod_jax.training import loop, prepare

# T = 22 and C = 11, and no other size of the model is a multiple of 11: so is an axis of positions recognised.
CHANGES = {
    "model.num_heads": 8,
    "data.seq_len": 22,
    "routing.capacity": 0.5,
    "train.loss_chunk": 22,  # on a mesh of (2, 2, 2), two chunks of 11 positions
    "routing.aux_weight": 0.1,
    "optimizer.eps": 1e-3,  # so that a rounding error in a small gradient stays one in the update
    "seed": 1,  # seed 0 has, at step 2, two scores that tie at the cut but for rounding
}
NUM_STEPS = 4
OTHER_MESHES = [
    *((8, 1, 1), (4, 2, 1), (2, 4, 1), (1, 8, 1)),
    *((4, 1, 2), (1, 4, 2), (2, 1, 4), (1, 2, 4), (1, 1, 8)),
    (1, 1, 2),
]
MESHES = [(2, 2, 2), *(pytest.param(shape, marks=pytest.mark.slow) for shape in OTHER_MESHES)]


def config_on(shape, **changes):
    mesh = {f"mesh.{name}": size for name, size in zip(sharding.AXES, shape, strict=False)}
    return make_config(**{**TINY, **CHANGES, **mesh, **changes})


@functools.cache
def trained(shape):
    """(run, compiled step, initial parameters, metrics of each step) on a mesh of this shape."""
    run = prepare.prepare_run(config_on(shape), "unused")
    with jax.set_mesh(run.mesh):
        state = loop.fresh_state(run)
        params = jax.device_get(state.params)
        step, batches, history = loop.compile_step(run), loop.open_batches(run, 0), []
        for _ in range(NUM_STEPS):
            state, metrics = step(state, loop.put_batch(run, next(batches)))
            history.append(jax.device_get(metrics))
    return run, step, params, history


@pytest.mark.parametrize(
    ("changes", "devices", "shape"),
    [
        ({}, 8, (8, 1, 1, 1)),
        ({"mesh.data": 1, "mesh.fsdp": -1}, 8, (1, 8, 1, 1)),
        ({"mesh.data": -1, "mesh.fsdp": 2, "mesh.tensor": 2}, 8, (2, 2, 2, 1)),
        ({"mesh.data": 2, "mesh.expert": -1}, 8, (2, 1, 1, 4)),
        ({"mesh.data": 1, "mesh.expert": 8, "experts.count": 3}, 8, (1, 1, 1, 8)),  # rows alone: no block has experts
        ({"mesh.data": 2}, 8, (2, 1, 1, 1)),  # fewer than there are
        ({}, 1, (1, 1, 1, 1)),
    ],
)
def test_mesh_shape(tiny_config, changes, devices, shape):
    assert sharding.mesh_shape(tiny_config(**changes), devices) == shape


@pytest.mark.parametrize(
    ("changes", "devices", "message"),
    [
        ({"mesh.fsdp": 3}, 8, r"config.mesh.data = -1: 8 devices do not divide by the others, 3"),
        (
            {"mesh.data": 16},
            8,
            r"mesh.data = 16 \* mesh.fsdp = 1 \* .*: needs 16 devices, there are 8",
        ),
        ({"train.batch_size": 12}, 8, r"config.train.batch_size = 12: .* 12 rows, .* \* mesh.expert = 8 must"),
        ({"train.accumulation": 2}, 8, r"config.train.batch_size = 8: each of 2 micro-batches has 4 rows, which"),
        ({"mesh.data": 1, "mesh.fsdp": -1, "train.batch_size": 24}, 24, r"config.model.width = 16: .* mesh.fsdp = 24"),
        (
            {"model.head_dim": 8, "model.num_heads": 3, "mesh.tensor": -1, "mesh.data": 1},
            2,
            r"config.model.num_heads = 3",
        ),
        (
            {"model.num_kv_heads": 1, "mesh.tensor": -1, "mesh.data": 1},
            2,
            r"config.model.num_kv_heads = 1: .* mesh.tensor",
        ),
        ({"model.mlp_dim": 33, "mesh.tensor": -1, "mesh.data": 1}, 2, r"config.model.mlp_dim = 33: .* mesh.tensor = 2"),
    ],
)
def test_mesh_shape_refuses_what_does_not_divide(tiny_config, changes, devices, message):
    with pytest.raises(ConfigError, match=message):
        sharding.mesh_shape(tiny_config(**changes), devices)


def test_a_mesh_of_several_processes_uses_every_device(tiny_config, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="needs 4 devices, there are 8"):
        sharding.mesh_shape(tiny_config(**{"mesh.data": 4}), 8)


def test_make_mesh_takes_the_first_devices(tiny_config):
    mesh = sharding.make_mesh(tiny_config(**{"mesh.data": 2}))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 1, "tensor": 1, "expert": 1}
    assert list(mesh.devices.flat) == jax.devices()[:2]


@pytest.mark.parametrize(("devices", "cached"), [(1, True), (2, False)])
def test_several_cpu_devices_load_no_cached_programs(tmp_path, devices, cached):
    """A loaded program may wait forever: each of its devices may start the collectives in another order."""
    code = """
import jax
from mod_jax import sharding
from mod_jax.config import make_config

jax.jit(lambda x: x + 1)(1.0)  # JAX has asked for its settings by now
sharding.make_mesh(make_config(**{"train.steps": 1}))
jax.jit(lambda x: x * 2)(1.0)
"""
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
    }
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert len(list(tmp_path.glob("*-cache"))) == (2 if cached else 1)


def test_where_parameters_and_moments_live():
    run = prepare.prepare_run(config_on((2, 2, 2)), "unused")
    state = run.abstract_state

    def spec(leaf):
        return tuple(leaf.sharding.spec)

    full, routed = state.params["units"]["blocks"][0], state.params["units"]["blocks"][1]["block"]
    heads = state.params["units"]["blocks"][1]
    assert spec(full["attention"]["q_DNH"]) == (None, "fsdp", "tensor", None)  # the first axis stacks the units
    assert spec(full["mlp"]["down_FD"]) == spec(routed["mlp"]["down_FD"]) == (None, "tensor", "fsdp")
    assert spec(heads["router"]["weight_D"]) == (None, None)
    assert spec(heads["predictor"]["up_DP"]) == (None, "fsdp", None)
    assert spec(state.params["embedder"]["unembed_DV"]) == ("fsdp", None)  # 257 ids do not divide by 2
    even = make_model(run.config, 256)
    placed = sharding.param_shardings(run.mesh, even.logical_specs, even.abstract_params)
    assert tuple(placed["embedder"]["unembed_DV"].spec) == ("fsdp", "tensor")

    shardings = jax.tree.map(lambda leaf: leaf.sharding, state.params)
    moments = [
        part for part in jax.tree.leaves(state.opt_state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(part, "mu")
    ]
    assert len(moments) == 1
    for moment in (moments[0].mu, moments[0].nu):
        assert jax.tree.map(lambda leaf: leaf.sharding, moment) == shardings
    scalars = (state.step, state.bad_steps, state.cutoffs_L, moments[0].count)
    assert all(leaf.sharding.is_fully_replicated for leaf in scalars)


def test_a_batch_is_split_by_rows_only(tiny_config):
    mesh = sharding.make_mesh(tiny_config(**{"mesh.fsdp": 2, "mesh.tensor": 2}))
    assert sharding.local_rows(mesh, 8).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    rows_BT = np.random.default_rng(0).integers(0, 9, (8, 16))
    batch = sharding.put_batch(mesh, {"tokens_BT": rows_BT}, 8)["tokens_BT"]
    np.testing.assert_array_equal(batch, rows_BT)
    assert {shard.data.shape for shard in batch.addressable_shards} == {(2, 16)}
    assert sharding.batch_sharding(mesh).spec == PartitionSpec(("data", "fsdp", "expert"))


def rows_that_jax_asks_for(mesh, batch_size):
    """Rows by process, as the sharding gives them device by device."""
    rows = collections.defaultdict(set)
    for device, (index,) in sharding.batch_sharding(mesh).devices_indices_map((batch_size,)).items():
        rows[device.process_index].update(range(index.start or 0, batch_size if index.stop is None else index.stop))
    return {process: sorted(held) for process, held in rows.items()}


@pytest.mark.parametrize("product", [p for p in topology.PRODUCTS if p.num_chips > 1], ids=lambda p: p.name)
def test_every_host_of_a_tpu_slice_holds_the_rows_of_its_chips(tiny_config, product):
    pytest.importorskip("libtpu")
    devices = topology.devices(product)
    chips = len(devices)
    for mesh_changes in ({}, {"mesh.data": 1, "mesh.fsdp": -1}, {"mesh.tensor": 2}, {"mesh.data": 2, "mesh.fsdp": -1}):
        changes = {"train.batch_size": 2 * chips, "model.width": 512, **mesh_changes}
        mesh = sharding.make_mesh(tiny_config(**changes), devices)
        wanted = rows_that_jax_asks_for(mesh, 2 * chips)
        assert len(wanted) == max(1, product.num_chips // 4)
        for process, rows in wanted.items():
            assert sharding.local_rows(mesh, 2 * chips, process).tolist() == rows
        assert set().union(*wanted.values()) == set(range(2 * chips))


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("v5e:4x4", [0, 1, 6, 15]),
        ("v5e:4x8", [0, 1, 8, 9]),
        ("v5e:16x16", [0, 1, 16, 17]),
        ("v5p:2x4x4", [0, 4, 16, 20]),
    ],
)
def test_the_rows_of_a_pod_s_first_host_do_not_stand_together(tiny_config, name, rows):
    """By hand: its four chips are a square, and the mesh numbers chips line by line (on 4x4, around a ring)."""
    pytest.importorskip("libtpu")
    devices = topology.devices(topology.find_product(name)[0])
    mesh = sharding.make_mesh(tiny_config(**{"train.batch_size": len(devices)}), devices)
    assert sharding.local_rows(mesh, len(devices), 0).tolist() == rows


@pytest.mark.parametrize("shape", MESHES)
def test_initial_parameters_do_not_depend_on_the_devices(shape):
    _, _, one, _ = trained((1, 1, 1))
    _, _, many, _ = trained(shape)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True))


@pytest.mark.parametrize("shape", MESHES)
def test_many_devices_train_like_one(shape):
    """Losses, auxiliary losses, gradient norm and the statistics of each block, over four steps."""
    _, _, _, one = trained((1, 1, 1))
    _, _, _, many = trained(shape)
    assert one[0]["train/aux_loss"] > 0.1
    assert one[0]["train/predictor_loss"] > 0.1
    assert one[-1]["train/loss"] != one[0]["train/loss"]
    for metrics, expected in zip(many, one, strict=True):
        assert metrics.keys() == expected.keys()
        for name in expected:
            np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)


def moved_activations(compiled, mesh):
    """Collectives over the batch axes of arrays with an axis of positions, alone or flattened with rows."""
    return [
        c
        for c in find_collectives(compiled.as_text(), dict(mesh.shape))
        if {"data", "fsdp"} & set(c.axes) and any(size % 11 == 0 for size in c.shape)
    ]


@pytest.mark.parametrize("shape", MESHES[:2])
def test_no_activation_moves_over_the_batch_axes(shape):
    run, step, _, _ = trained(shape)
    sizes = {size for leaf in jax.tree.leaves(run.abstract_state) for size in leaf.shape}
    assert not any(size % 11 == 0 for size in sizes)
    assert moved_activations(step, run.mesh) == []
    # Gradients do move over the batch axes: the parser saw the program.
    moved = find_collectives(step.as_text(), dict(run.mesh.shape))
    assert any(c.kind == "all-reduce" and "data" in c.axes and len(c.shape) >= 2 for c in moved)
    if shape == (2, 2, 2):
        assert any(c.kind == "all-gather" and c.axes == ("fsdp",) for c in moved)
        assert any(c.axes == ("tensor",) and any(size % 11 == 0 for size in c.shape) for c in moved)


def compiled_on_batch(mesh, function, *shapes):
    over_rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=over_rows) for shape, dtype in shapes]
    with jax.set_mesh(mesh):
        return jax.jit(function, out_shardings=over_rows).lower(*arguments).compile()


def flattened_gather(x_BTD, idx_BC):
    B, T, D = x_BTD.shape
    flat_M = (idx_BC + T * jnp.arange(B)[:, None]).reshape(-1)
    return x_BTD.reshape(B * T, D)[flat_M].reshape(B, -1, D)


def test_the_check_fails_where_activations_move(tiny_config):
    mesh = sharding.make_mesh(tiny_config(**{"mesh.fsdp": 2, "mesh.tensor": 2}))
    x_BTD, idx_BC, scores_BT = ((8, 22, 16), "float32"), ((8, 11), "int32"), ((8, 22), "float32")
    # A gather by index into all rows at once: the activation, or every device's share of the result, goes around.
    moved = moved_activations(compiled_on_batch(mesh, flattened_gather, x_BTD, idx_BC), mesh)
    assert any(c.shape[-1] == 16 for c in moved)
    # lax.top_k of the whole batch gathers the scores.
    moved = moved_activations(compiled_on_batch(mesh, lambda r: jax.lax.top_k(r, 11)[1], scores_BT), mesh)
    assert any(c.kind == "all-gather" and c.shape == (8, 22) for c in moved)
    # The same two, row by row and as a sort, are clean.
    gather = jax.vmap(lambda x_TD, idx_C: x_TD.at[idx_C].get(mode="promise_in_bounds"))
    assert moved_activations(compiled_on_batch(mesh, gather, x_BTD, idx_BC), mesh) == []
    sort = jax.vmap(lambda r_T: jnp.argsort(r_T, stable=True, descending=True)[:11])
    assert moved_activations(compiled_on_batch(mesh, sort, scores_BT), mesh) == []


def test_the_training_stream_does_not_depend_on_the_mesh(tiny_config):
    config = tiny_config()
    corpus = prepare_corpus(config.data)
    whole = train_batches(corpus, seq_len=16, batch_size=8, seed=0)
    parts = ([0, 1, 6, 7], [2, 5])  # as the hosts of a pod hold them
    streams = [train_batches(corpus, seq_len=16, batch_size=8, seed=0, rows=np.array(rows)) for rows in parts]
    for _ in range(3):
        tokens_BT = next(whole)["tokens_BT"]
        for rows, stream in zip(parts, streams, strict=True):
            np.testing.assert_array_equal(next(stream)["tokens_BT"], tokens_BT[rows])
