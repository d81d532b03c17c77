"""Numbers that are not finite, wherever they come from: nothing of them is learned or saved, and they are named.

Most faults are finite states that overflow in one place of the forward or backward pass, so that all of them run in one
compiled program per way of computing: as it is, with accumulation, and on eight devices.
"""

import contextlib
import functools
import io
import math
import os
import re
import signal

import jax
import numpy as np
import pytest
from tiny import TINY

from mod_jax import cli, sharding
from mod_jax.config import make_config
from mod_jax.data.batches import MODEL_INPUTS
from mod_jax.errors import NumericsError
from mod_jax.models.model import make_model
from mod_jax.training import finite, loop, prepare
from mod_jax.training.language import Language
from mod_jax.training.step import init_state

VOCAB, NUM_STEPS = 32, 20
UNUSED = VOCAB - 1  # an id that no batch holds
HUGE = 3e38  # the largest float32 is 3.4e38
SMALL = {**TINY, "model.depth": 2, "routing.aux_weight": 0.1, "train.steps": NUM_STEPS}
WAYS = {
    "plain": {},
    "accumulated": {"train.accumulation": 2},
    "eight devices": {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
}


@functools.cache
def program(way):
    """(a function of state and batch, in and out of NumPy; a state after one good step; the names of the parts)."""
    config = make_config(**{**SMALL, "mesh.data": 1, **WAYS[way]})
    model, mesh = make_model(config, VOCAB), sharding.make_mesh(config)
    abstract = prepare.abstract_state(config, model, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    compiled = loop.lower_step(Language(config, model), mesh, abstract, NUM_STEPS).compile()

    def step(state, batch):
        placed = sharding.put_batch(mesh, batch, config.train.batch_size)
        return jax.device_get(compiled(jax.device_put(state, shardings), placed))

    with jax.set_mesh(mesh):
        state = jax.device_get(jax.jit(lambda: init_state(config, model), out_shardings=shardings)())
    return step, step(state, make_batch())[0], finite.part_names(config.routed_depths, abstract)


def make_batch(real=True):
    tokens_BT, targets_BT = np.random.default_rng(0).integers(0, UNUSED, (2, 8, 16), np.int32)
    positions_BT = np.broadcast_to(np.arange(16, dtype=np.int32), (8, 16))
    segment_ids_BT = np.full((8, 16), int(real), np.int32)
    return dict(zip(MODEL_INPUTS, (tokens_BT, targets_BT, positions_BT, segment_ids_BT), strict=True))


def spoil(state, path, change):
    """The state with `change` done, in place, to a copy of the leaf at `path`."""
    hits = []

    def visit(where, leaf):
        if jax.tree_util.keystr(where, simple=True, separator="/") != path:
            return leaf
        hits.append(leaf := np.array(leaf))
        change(leaf)
        return leaf

    state = jax.tree_util.tree_map_with_path(visit, state)
    assert len(hits) == 1, path
    return state


def first_is(value):
    """Sets the first number of a leaf, so that its sum is still finite."""

    def change(leaf):
        leaf.flat[0] = value

    return change


def times(factor):
    def change(leaf):
        leaf *= factor

    return change


def unused_row(leaf):
    leaf[UNUSED] = math.nan


FULL, ROUTED = "params/units/blocks/0", "params/units/blocks/1"
MOMENTS = "opt_state/2"
# what is wrong: (leaf to change, how, what is named first)
FAULTS = {
    "an activation of a full block": (f"{FULL}/mlp/up_DF", times(1e25), "router scores of block 1"),
    "an activation of a routed block": (f"{ROUTED}/block/mlp/up_DF", times(1e25), "update of block 1"),
    "router scores": (f"{ROUTED}/router/weight_D", first_is(HUGE), "router scores of block 1"),
    "predictor logits": (f"{ROUTED}/predictor/down_P", first_is(HUGE), "predictor logits of block 1"),
    "the loss": ("params/embedder/unembed_DV", first_is(HUGE), "loss"),
    "the gradient alone": ("params/embedder/unembed_DV", times(1e30), "gradient of params/embedder/table_VD"),
    "a first moment": (f"{MOMENTS}/mu/final_norm/scale_D", first_is(math.nan), f"{MOMENTS}/mu/final_norm/scale_D"),
    "a second moment": (f"{MOMENTS}/nu/embedder/table_VD", first_is(math.inf), f"{MOMENTS}/nu/embedder/table_VD"),
    "a parameter that no token uses": ("params/embedder/table_VD", unused_row, "params/embedder/table_VD"),
    "a cut-off": ("cutoffs_L", first_is(-math.inf), "cutoffs_L"),
}


def assert_same_bits(actual, expected):
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(e).tobytes() for a, e in pairs)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_is_not_finite_is_skipped_counted_and_named(way, fault):
    step, good, names = program(way)
    path, change, name = FAULTS[fault]
    spoiled = spoil(good, path, change)
    new, metrics = step(spoiled, make_batch())
    assert_same_bits((new.params, new.opt_state, new.cutoffs_L), (spoiled.params, spoiled.opt_state, spoiled.cutoffs_L))
    assert (new.step, new.bad_steps, metrics["train/bad_steps"], metrics["train/finite"]) == (2, 1, 1, 0)
    bad = [name for name, fine in zip(names, metrics["train/finite_parts"], strict=True) if not fine]
    assert bad[0] == name
    if name.startswith(("gradient", "params", "opt_state", "cutoffs_L")):
        assert np.isfinite(metrics["train/objective"])  # so that the loss alone would not have shown it


@pytest.mark.parametrize("way", WAYS)
def test_a_good_step_and_one_of_nothing_but_padding_are_finite(way):
    step, good, names = program(way)
    for batch in (make_batch(), make_batch(real=False)):
        new, metrics = step(good, batch)
        assert metrics["train/finite_parts"].all()
        assert metrics["train/finite_parts"].size == len(names) == len(set(names))
        finite.check_state(new, "the state")
        assert (new.bad_steps, metrics["train/finite"]) == (0, 1)


def test_no_number_that_is_not_finite_can_come_with_the_data():
    assert {array.dtype for array in make_batch().values()} == {np.dtype("int32")}


# Whole runs, with a fault in them.

RUN = {**TINY, "model.depth": 2, "data.eval_windows": 8, "train.steps": 3, "train.save_every": 1, "train.eval_every": 0}


def train(workdir, **changes):
    """(how it ended: its outcome or its error, what it printed)."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            end = loop.train(make_config(**{**RUN, **changes}), workdir)
        except NumericsError as error:
            end = error
    return end, out.getvalue()


@pytest.fixture
def fault_at(monkeypatch):
    """fault_at(before={3: f}, after={4: g}): f changes what step 3 starts from, g what step 4 gives."""
    compile_step = loop.compile_step

    def arm(before=None, after=None):
        def compiled(run):
            step_fn = compile_step(run)
            shardings = jax.tree.map(lambda leaf: leaf.sharding, run.abstract_state)

            def step(state, batch):
                number = int(state.step) + 1
                if number in (before or {}):
                    state = jax.device_put(before[number](jax.device_get(state)), shardings)
                state, metrics = step_fn(state, batch)
                if number in (after or {}):
                    state = jax.device_put(after[number](jax.device_get(state)), shardings)
                return state, metrics

            return step

        monkeypatch.setattr(loop, "compile_step", compiled)

    return arm


def flip(state):
    return spoil(state, "params/final_norm/scale_D", first_is(math.nan))


def flip_and_terminate(state):
    os.kill(os.getpid(), signal.SIGTERM)
    return flip(state)


def steps_on_disk(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())


def test_too_many_bad_steps_end_the_run_and_say_where_to_look(tmp_path, fault_at, capsys):
    fault_at(before={2: lambda state: spoil(state, f"{ROUTED}/router/weight_D", first_is(HUGE))})
    changes = {"train.max_bad_steps": 2, "train.steps": 9, "train.log_every": 1}
    end, output = train(tmp_path / "run", **changes)
    expected = (
        r"2 consecutive steps up to step 3 were not finite and changed nothing, the first at step 2: router scores of "
        r"block 1 and \d+ more; its examples: (\d+, ){4}\.\.\. \(example i is the train tokens from 16 \* i on\)\."
    )
    assert re.match(expected, str(end))
    assert len(re.findall("WARNING skipped a step", output)) == 1  # not once per step
    assert steps_on_disk(tmp_path / "run") == [1]
    assert cli.exit_code(lambda: loop.train(make_config(**{**RUN, **changes}), tmp_path / "run")) == 3
    assert "error: 2 consecutive steps up to step 3" in capsys.readouterr().err


@pytest.mark.parametrize(("fault", "step", "saved"), [(flip, 1, []), (flip, 3, [1, 2]), (flip_and_terminate, 2, [1])])
def test_a_state_that_is_not_finite_is_never_saved(tmp_path, fault_at, monkeypatch, fault, step, saved):
    """The first step, the last one, and the one after which the machine is taken away."""
    monkeypatch.setattr(loop.Watch, "evaluate", lambda *args: {"eval/topk_loss": 1.0})
    fault_at(after={step: fault})
    end, _ = train(tmp_path / "run")
    what = f"the state after step {step}, which was not saved, is not finite: 1 of "
    assert str(end).startswith(what)
    assert str(end).endswith("arrays, the first is params/final_norm/scale_D")
    assert steps_on_disk(tmp_path / "run") == saved


def test_a_checkpoint_that_is_not_finite_is_refused_at_once(tmp_path, fault_at, monkeypatch):
    monkeypatch.setattr(loop.Watch, "evaluate", lambda *args: {"eval/topk_loss": 1.0})
    fault_at(after={2: flip_and_terminate})
    with monkeypatch.context() as patch:
        patch.setattr(finite, "check_state", lambda *args: None)
        assert train(tmp_path / "run")[0] is loop.Outcome.PREEMPTED
    end, output = train(tmp_path / "run")
    assert str(end).startswith("the checkpoint of step 2 (moved away, an older one is used) is not finite: 1 of ")
    assert "compiled" not in output


def test_an_evaluation_of_weights_that_are_not_finite_says_so(tmp_path, fault_at):
    fault_at(after={3: flip})
    end, _ = train(tmp_path / "run", **{"train.save_every": 0})
    assert str(end) == "selection 'predictor': the logits of the first held-out batch are not finite"
