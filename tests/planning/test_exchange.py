"""Tokens travel to experts on other devices, and back, by four all-to-alls a channel and step; nothing else moves them.

Read in the compiled train step: of eight virtual CPU devices and, where libtpu is installed, of a slice of eight chips.
As in test_tpu_step.py, T and the slots of a row are multiples of 11, and no other size of the model is.
"""

import jax
import pytest

from mod_jax import sharding
from mod_jax.config import make_config
from mod_jax.models import moe
from mod_jax.planning import program, topology
from mod_jax.planning import train_step as plan
from mod_jax.planning.collectives import is_exchange, token_movers
from mod_jax.training import loop, prepare

SMALL = {
    "model.vocab_size": 512,
    "model.width": 32,
    "model.depth": 1,
    "model.num_heads": 2,
    "model.layout": "E",
    "experts.count": 4,
    "experts.capacity": 1.0,
    "data.source": "synthetic",
    "data.seq_len": 176,
    "routing.capacity": 0.5,
    "train.batch_size": 8,
    "train.steps": 4,
}
CHOSEN = {"experts.choice": "expert", "experts.capacity": 0.5}
INTEGRATED = {"experts.noop": 4, "experts.chosen": 2}


def read(config, devices, compile_step):
    """(what the compiled step moves and how often, its movers of tokens)."""
    mesh = sharding.make_mesh(config, devices)
    task = prepare.make_task(config, config.model.vocab_size)
    state = prepare.abstract_state(config, task.model, mesh)
    text = compile_step(loop.lower_step(task, mesh, state, config.train.steps), mesh)
    step = program.read_step(text, dict(mesh.shape))
    shapes = [(leaf.shape, leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(state.params)]
    assert not any(size % 11 == 0 for whole, part in shapes for size in (*whole, *part))
    return step.moved, token_movers([c for c, _ in step.moved], shapes, plan.BATCH_AXES)


@pytest.fixture
def on_cpu():
    return lambda config: read(config, jax.devices(), lambda lowered, mesh: lowered.compile().as_text())


@pytest.fixture
def on_tpu(tmp_path):
    pytest.importorskip("libtpu")
    product, _ = topology.find_product("v5e:2x4")

    def compile_step(lowered, mesh):
        return topology.compile_for(lowered, product, mesh, tmp_path).text

    return lambda config: read(config, topology.devices(product), compile_step)


def check(config, moved, movers, per_channel=4):
    exchanges = [(c, times) for c, times in moved if is_exchange(c)]
    channels = len(config.expert_depths) * config.train.accumulation
    assert sum(times for _, times in exchanges) == per_channel * channels
    # Whatever else crosses the batch is no token: no weight has a size that is a multiple of 11.
    assert movers == []
    others = [c for c, _ in moved if not is_exchange(c) and set(plan.BATCH_AXES) & set(c.axes)]
    assert [c for c in others if any(size % 11 == 0 for size in c.shape)] == []
    assert not any("expert" in c.axes for c in others if c.kind == "all-gather")
    # Each carries the slots that one device has for its rows, whatever shape it gives them.
    mesh = {name: getattr(config.mesh, name) for name in sharding.AXES}
    rows = config.train.batch_size // config.train.accumulation // (mesh["data"] * mesh["fsdp"] * mesh["expert"])
    e, width = config.experts, config.model.width
    claims = 1 if e.choice == "expert" else e.chosen
    itemsize = 2 if config.model.dtype == "bfloat16" else 4
    lengths = {round(config.data.seq_len * config.blocks[depth].capacity) for depth in config.expert_depths}
    assert {c.bytes for c, _ in exchanges} == {
        rows * round(e.capacity * length * claims) * width * itemsize for length in lengths
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh.data": 4, "mesh.expert": 2},
        {"mesh.data": 2, "mesh.expert": 4, "model.layout": "Ee", "model.depth": 2},
        pytest.param({"mesh.data": 2, "mesh.expert": 4, **CHOSEN}, marks=pytest.mark.slow),
        pytest.param({"mesh.data": 1, "mesh.fsdp": 4, "mesh.expert": 2, **INTEGRATED}, marks=pytest.mark.slow),
        pytest.param(
            {"mesh.data": 1, "mesh.fsdp": 2, "mesh.tensor": 2, "mesh.expert": 2, "train.accumulation": 2},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_four_all_to_alls_a_channel(on_cpu, changes):
    config = make_config(**{**SMALL, **changes})
    check(config, *on_cpu(config))


@pytest.mark.slow
def test_two_more_where_everything_is_recomputed(on_cpu):
    config = make_config(**{**SMALL, "mesh.data": 4, "mesh.expert": 2, "model.remat": "full"})
    check(config, *on_cpu(config), per_channel=6)


def test_the_check_fails_where_slots_are_left_to_the_compiler(on_cpu, monkeypatch):
    monkeypatch.setattr(moe, "constrain", lambda x, axes: x)
    config = make_config(**{**SMALL, "mesh.data": 4, "mesh.expert": 2})
    with pytest.raises(AssertionError):
        check(config, *on_cpu(config))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"mesh.data": 4, "mesh.expert": 2, "model.layout": "Ee", "model.depth": 2},
        {"mesh.data": 1, "mesh.fsdp": 2, "mesh.expert": 4, **INTEGRATED},
        {"mesh.data": 1, "mesh.fsdp": 2, "mesh.tensor": 2, "mesh.expert": 2, **CHOSEN},
    ],
    ids=str,
)
def test_four_all_to_alls_a_channel_on_a_slice(on_tpu, changes):
    config = make_config(**{**SMALL, "model.width": 128, "model.dtype": "bfloat16", **changes})
    check(config, *on_tpu(config))
