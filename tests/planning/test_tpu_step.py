"""The train step as the TPU compiler makes it, for slices of eight chips: nothing of one row goes to another.

`token_movers` knows a weight by its shape. So that no activation can pass for one, T and C are multiples of 11 and no
other size of the model is: the second check is for those, whatever the first one thinks of their shapes.
Skipped where libtpu is missing.
"""

import jax
import jax.numpy as jnp
import pytest

from mod_jax import sharding
from mod_jax.config import make_config
from mod_jax.models.blocks import Routed
from mod_jax.models.model import make_model
from mod_jax.planning import program, topology
from mod_jax.planning.collectives import token_movers
from mod_jax.planning.train_step import BATCH_AXES
from mod_jax.training import loop, prepare
from mod_jax.training.language import Language

pytestmark = pytest.mark.slow

SMALL = {
    "model.vocab_size": 512,
    "model.width": 128,
    "model.depth": 4,
    "model.num_heads": 4,
    "model.dtype": "bfloat16",
    "data.source": "synthetic",
    "data.seq_len": 176,
    "routing.capacity": 0.5,
    "routing.aux_weight": 0.1,
    "train.batch_size": 8,
    "train.steps": 4,
}
STOCHASTIC = {"routing.score": "stochastic", "routing.predictor": False, "routing.aux_weight": 0.0}


@pytest.fixture
def compiled_step(tmp_path):
    """A function of the mesh and config changes: (what the compiled step moves and how often, its movers of tokens)."""
    pytest.importorskip("libtpu")

    def make(shape, **changes):
        mesh = {f"mesh.{name}": size for name, size in zip(sharding.AXES, shape, strict=False)}
        config = make_config(**{**SMALL, **mesh, **changes})
        product, _ = topology.find_product("v5e:2x4")
        mesh = sharding.make_mesh(config, topology.devices(product))
        model = make_model(config, config.model.vocab_size)
        state = prepare.abstract_state(config, model, mesh)
        lowered = loop.lower_step(Language(config, model), mesh, state, config.train.steps)
        step = program.read_step(topology.compile_for(lowered, product, mesh, tmp_path).text, dict(mesh.shape))
        shapes = [(leaf.shape, leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(state.params)]
        assert not any(size % 11 == 0 for whole, part in shapes for size in (*whole, *part))
        return step.moved, token_movers([c for c, _ in step.moved], shapes, BATCH_AXES)

    return make


def with_positions(moved):
    """Collectives over the batch axes of arrays with an axis of positions or slots, alone or flattened with others."""
    return [c for c, _ in moved if set(BATCH_AXES) & set(c.axes) and any(size % 11 == 0 for size in c.shape)]


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ((8, 1, 1), {}),
        ((1, 8, 1), {"model.tie_embedding": True, "model.remat": "full"}),
        ((2, 4, 1), {"routing.topk_per": "document"}),
        ((1, 4, 2), {"routing.router_input": "raw", "model.remat": "dots"}),
        ((1, 8, 1), {"train.batch_size": 16, "train.accumulation": 2}),
        ((2, 2, 2), {"train.batch_size": 16, "train.accumulation": 4, "routing.topk_per": "document"}),
        ((2, 4, 1), STOCHASTIC),
        ((1, 8, 1), {"routing.gate": "softmax", "routing.predictor": False, "model.scan": False}),
        ((2, 2, 2), {"data.seq_len": 1408, "model.depth": 2, "model.width": 256}),  # long enough for the kernel
    ],
    ids=["data", "fsdp", "document", "tensor", "accumulation", "all axes", "stochastic", "softmax", "kernel"],
)
def test_nothing_of_a_row_goes_to_another(compiled_step, shape, changes):
    moved, movers = compiled_step(shape, **changes)
    assert movers == []
    assert with_positions(moved) == []
    # The reader saw the program: gradients are summed over rows and, over fsdp, weights are gathered.
    kinds = {c.kind for c, _ in moved if set(BATCH_AXES) & set(c.axes)}
    assert kinds & {"all-reduce", "reduce-scatter"}
    assert ("all-gather" in kinds) == (shape[1] > 1)
    if shape[2] > 1:  # and activations of one row are shared by the chips that hold it
        assert any(c.axes == ("tensor",) and any(size % 11 == 0 for size in c.shape) for c, _ in moved)


def rank_over_rows(self, choice, scores_BT, predictor_logits_BT, tokens, choose=Routed.choose):
    """Top-k of scores that are ranked among those of the other rows."""
    ranks_BT = jnp.argsort(jnp.argsort(scores_BT, axis=0), axis=0).astype(jnp.float32)
    return choose(self, choice, ranks_BT, predictor_logits_BT, tokens)


def score_the_next_row(self, x_BTD, tokens, keys_B=None, score=Routed.score):
    """Each row gets the scores of its neighbour."""
    return score(self, jnp.roll(x_BTD, 1, axis=0), tokens, keys_B)


def subtract_the_mean_row(self, x_BTD, tokens, keys_B=None, score=Routed.score):
    """Scores relative to the mean of all rows."""
    scores_BT, predictor_logits_BT = score(self, x_BTD, tokens, keys_B)
    return scores_BT - jnp.mean(scores_BT, axis=0, keepdims=True), predictor_logits_BT


@pytest.mark.parametrize(
    ("method", "fault", "kinds"),
    [
        ("choose", rank_over_rows, {"all-gather", "all-to-all"}),
        ("score", score_the_next_row, {"collective-permute"}),
        ("score", subtract_the_mean_row, {"all-reduce"}),
    ],
)
def test_the_checks_fail_on_a_step_whose_rows_meet(compiled_step, monkeypatch, method, fault, kinds):
    monkeypatch.setattr(Routed, method, fault)
    moved, movers = compiled_step((2, 4, 1))
    assert kinds & {c.kind for c in movers}
    assert kinds & {c.kind for c in with_positions(moved)}
