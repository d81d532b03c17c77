"""Plans of decoding: that they are of the sampler's program, counts by hand, and what a TPU's compiler makes of it."""

import functools
import json
import math
from types import MappingProxyType

import jax
import pytest

from mod_jax import sampling, sharding
from mod_jax.config import make_config
from mod_jax.data.tokenizers import ByteTokenizer
from mod_jax.errors import ConfigError
from mod_jax.models import flops
from mod_jax.models.model import make_model
from mod_jax.planning import decode as plan
from mod_jax.planning import serving, topology
from mod_jax.planning.collectives import find_collectives
from mod_jax.sampling.cache import init_cache
from mod_jax.sampling.programs import serving_stack
from mod_jax.tuning import rows_per_pass

CHANGES = {
    "model.width": 16,
    "model.depth": 4,
    "model.num_heads": 2,
    "model.vocab_size": 64,
    "model.context": 64,
    "data.seq_len": 32,
    "routing.capacity": 0.25,
    "train.steps": 4,
}


EXPERTS = {"model.layout": "Ee", "model.depth": 2, "experts.count": 4}
CHOOSING = {**EXPERTS, "experts.choice": "expert", "experts.capacity": 0.5}


@pytest.mark.parametrize(
    ("num_rows", "changes"), [(1, {}), (4, {}), (1, EXPERTS), pytest.param(4, CHOOSING, marks=pytest.mark.slow)]
)
def test_what_is_planned_is_what_the_sampler_runs(build, watched, num_rows, changes):
    """The loop that a sampler runs here, word for word, if the plan is for a CPU."""
    model = build(**{"model.vocab_size": ByteTokenizer().vocab_size, "model.dtype": "bfloat16", **changes})
    sampler = sampling.Sampler(model)
    programs = watched(sampler, "_advance")
    sampler.generate(["a"] * num_rows, max_new_tokens=8)
    traced, given = plan.trace_decoding(model.config, sampler.selection, num_rows, 32, jax.devices()[0])
    assert str(traced.jaxpr) == programs[0]
    kept = [(leaf.shape, leaf.dtype) for leaf in sampler._weights]
    assert [(leaf.shape, leaf.dtype) for leaf in given.weights] == kept


@pytest.mark.parametrize(
    ("rows", "capacity", "passes"),
    [
        (1, 0.125, 0.125),
        (4, 1.0, 1.0),
        (2, 0.5, 0.75),  # R = 2: one pass unless nobody enters
        # R = 1: as many passes as rows that enter.
        (2, 0.01, 0.02),
    ],
)
def test_expected_passes(rows, capacity, passes):
    per_pass = rows_per_pass(rows, capacity, "tpu")
    assert serving.expected_passes(rows, capacity, per_pass) == pytest.approx(passes)


def test_expected_passes_of_many_rows_are_little_more_than_one():
    assert 1 < serving.expected_passes(2048, 0.125, rows_per_pass(2048, 0.125, "tpu")) < 1.1


def test_a_pass_is_made_while_any_group_has_rows_left():
    assert serving.expected_passes(1, 0.5, 1, groups=2) == pytest.approx(0.75)
    # Of 2 rows in one pass each: 0, 1 or 2 passes with chances 1/4, 1/2, 1/4; the larger of two groups.
    assert serving.expected_passes(2, 0.5, 1, groups=2) == pytest.approx((1 - 1 / 16) + (1 - 9 / 16))


def test_bytes_read_by_hand():
    """D 16, 2 heads of 8, F 64, V 64, FR: float32. A block has 4 matrices of 16 x 16, two of 16 x 64, norms."""
    config = make_config(**{**CHANGES, "model.depth": 2})
    model = make_model(config, 64)
    stack = jax.eval_shape(functools.partial(serving_stack, config, model, platform="tpu"), model.abstract_params)
    block = 4 * (4 * 16 * 16 + 2 * 16 * 64 + 2 * 16 + 2 * 8)
    heads = 4 * (16 + 16 * 32 + 32 + 32 + 1)  # router; predictor of 32 hidden units
    outside = 4 * (16 * 64 + 16)  # unembedding, final norm; of the table B rows alone
    cache = jax.eval_shape(lambda: init_cache(config, 4, (64, 24)))
    read = plan.bytes_read(config, stack, cache, [1.0, 0.5], [4, 2], [0.0, 0.0])
    assert read["weights"] == outside + block + heads + 0.5 * block
    # Keys and values of 2 heads of 8 in float32, for 4 rows of 64 slots; half a pass of 2 rows of 24 slots; each slot
    # with its position, each row with its length.
    assert read["cache"] == sum(rows * (slots * (2 * 2 * 8 * 4 + 4) + 4) for rows, slots in ((4, 64), (0.5 * 2, 24)))


@pytest.mark.parametrize(
    ("changes", "depth", "rows", "passes", "used"),
    [
        ({}, 0, 1, 1.0, 1.0),  # a token has one expert
        ({}, 0, 2, 1.0, 1.75),  # 4 * (1 - (3/4)^2)
        ({}, 1, 4, 0.5, 1.75),  # a quarter of 4 rows enter, in half a pass: 2 tokens in a pass
        ({"experts.noop": 4}, 0, 1, 1.0, 0.5),  # or no-op
        ({"experts.chosen": 2}, 0, 1, 1.0, 2.0),
        ({"experts.choice": "expert", "experts.capacity": 0.5}, 0, 1, 1.0, 0.5),
        ({"experts.choice": "expert", "experts.capacity": 4.0}, 0, 3, 1.0, 4.0),  # all
        ({"model.layout": "F"}, 0, 1, 1.0, 0.0),
    ],
)
def test_expected_experts(changes, depth, rows, passes, used):
    config = make_config(**{**CHANGES, **EXPERTS, **changes})
    assert plan.expected_experts(config, depth, rows, passes) == pytest.approx(used)


def test_bytes_read_of_experts_are_those_of_the_ones_that_are_used():
    """As above; an expert has two matrices of 16 x 64, float32, and its router one of 16 x 4."""
    config = make_config(**{**CHANGES, **EXPERTS})
    model = make_model(config, 64)
    stack = jax.eval_shape(functools.partial(serving_stack, config, model, platform="tpu"), model.abstract_params)
    expert, rest = 4 * 2 * 16 * 64, 4 * (4 * 16 * 16 + 16 * 4 + 2 * 16 + 2 * 8)
    heads, outside = 4 * (16 + 16 * 32 + 32 + 32 + 1), 4 * (16 * 64 + 16)
    cache = jax.eval_shape(lambda: init_cache(config, 4, (64, 24)))
    read = plan.bytes_read(config, stack, cache, [1.0, 0.5], [4, 2], [3.0, 1.5])
    assert read["weights"] == outside + heads + rest + 3 * expert + 0.5 * (rest + 1.5 * expert)


# The report, with this machine's devices in the place of a slice.


@pytest.fixture
def report(tmp_path, devices_here):
    """A function of config changes that plans for v5e:2x2, by default for one of its chips."""

    def make(batch=4, context=None, mesh=MappingProxyType({}), **changes):
        config = make_config(**{**CHANGES, "data.cache_dir": str(tmp_path), **changes})
        return plan.make_report(config, "v5e-4", batch, context, mesh)

    return make


def test_a_report(report):
    first = report(batch=5)
    found = json.loads(json.dumps(first))
    assert (found["topology"]["chips"], found["program"], found["selection"]) == (4, "decode", "predictor")
    assert (found["batch"], found["context"], found["layout"]) == (6, 64, "FRFR")
    assert "--batch=5 is rounded up to 6, as the sampler does" in found["notes"]
    memory = found["memory"]
    assert memory["needed"] == memory["argument"] + memory["temp"] + memory["output"] - memory["alias"]
    assert memory["argument"] >= memory["weights"] + memory["cache"]
    assert memory["loading"] == 4 * found["parameters"]["total"] + memory["weights"]
    assert memory["cache"] < 0.8 * memory["dense_cache"]
    assert found["estimate"]["tokens_per_second"] == pytest.approx(6 / found["estimate"]["seconds"])
    assert found["fits"]

    text = plan.describe(found)
    assert max(map(len, text.splitlines())) <= 120
    assert text.splitlines()[-1].startswith("verdict   FITS on a chip of v5e:2x2: 15.7")
    flat = " ".join(text.split())
    for part in ("one chip of v5e:2x2", "; the other 3 are free", "no chip needs another", "no TPU ran it"):
        assert part in flat
    assert report(batch=6)["compile"]["cached"]


@pytest.mark.parametrize("batch", [1, 4])
def test_the_compiled_loop_has_the_flops_of_the_rows_that_it_runs(report, batch):
    """Full blocks and logits for every row, routed blocks for R rows a pass and as many passes as expected."""
    found = report(batch)
    config = make_config(**CHANGES)
    slots = (64, 24, 64, 24)  # ceil(16 * 1.08 / 8) * 8
    dense = flops.decode_flops(make_config(**{**CHANGES, "model.layout": "F"}), 64, slots)
    one = flops.decode_flops(config, 64, slots)
    full = dense.linear / 2 + dense.attention * 64 / (64 + 24) + one.router + one.predictor + one.unembed
    routed = dense.linear / 2 + dense.attention * 24 / (64 + 24)
    share = found["passes"][1] * found["rows_per_pass"][1] / batch
    assert found["flops"]["model"] == one.total
    assert found["flops"]["compiled"] == pytest.approx(full + share * routed, rel=0.02)


def test_a_dense_model_has_no_routed_line(report):
    text = plan.describe(report(**{"model.layout": "F", "routing.predictor": False}))
    assert "\nrouted" not in text
    for part in ("selection none", "1.000 of a dense model's"):
        assert part in " ".join(text.split())


def test_a_plan_over_all_chips(report):
    """Two heads: tensor 2, and data 2. A chip holds half of the weights, and a quarter of the caches."""
    one, found = report(), json.loads(json.dumps(report(mesh=None)))
    assert found["topology"]["mesh"] == {"data": 2, "fsdp": 1, "tensor": 2, "expert": 1}
    assert found["notes"][1:] == [
        "the mesh is chosen here, tensor as large as it can be; sample takes it by --mesh.data=2 --mesh.tensor=2"
    ]
    assert found["rows_per_pass"] == [2, 2, 2, 2]
    norms_and_routers = 2 * (4 * 16 * 33 + 4 * (32 + 32 + 1)) + 4 * (9 * 16 + 8 * 8)
    matrices = one["memory"]["weights"] - norms_and_routers
    assert found["memory"]["weights"] == norms_and_routers + matrices / 2
    assert found["memory"]["loading"] == one["memory"]["loading"] - matrices
    keys_and_values = sum(4 * slots * 2 * 2 * 8 * 4 for slots in (64, 24, 64, 24))
    of_rows = one["memory"]["cache"] - keys_and_values
    assert found["memory"]["cache"] == keys_and_values / 4 + of_rows / 2
    assert {tuple(entry["axes"]) for entry in found["collectives"]} == {("data",), ("tensor",)}
    assert found["memory"]["argument"] < 0.6 * one["memory"]["argument"]
    text = " ".join(plan.describe(found).split())
    for part in ("4 chips of v5e:2x2", "mesh data 2 x tensor 2", "collectives is not in it", "FITS on v5e:2x2: 15.7"):
        assert part in text


def test_a_context_is_rounded_up_as_the_sampler_does(report):
    found = report(context=33)
    assert (found["context"], found["notes"][1:]) == (64, ["--context=33 is rounded up to 64, as the sampler does"])


def test_a_plan_of_experts_says_how_many_are_read(report):
    found = json.loads(json.dumps(report(batch=1, **EXPERTS)))
    assert found["experts"] == {"count": 4, "used": [1.0, 1.0]}
    text = " ".join(plan.describe(found).split())
    assert "experts 1 of 4 a block and pass, expected if all are used alike; no others are read" in text
    assert "routed 0.25 passes of 1 row" in text
    total, active = found["parameters"]["total"], found["parameters"]["active"]
    assert total - active == 2 * 3 * 2 * 16 * 64  # 3 of 4 experts of two blocks, each of two matrices
    assert f"Ee, {total:,} parameters, {active:,} active" in text
    text = plan.describe(report(batch=1, **EXPERTS | {"model.layout": "E", "model.depth": 1}))
    assert "selection all" in " ".join(text.split())
    assert "\nrouted" not in text


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        ((0,), {}, r"--batch=0: must be >= 1"),
        ((4, 65), {}, r"--context=65: must be in \[2, 64\], the model's context"),
        ((4, None, {"tensor": 4}), {}, r"model.num_heads = 2: must be divisible by mesh.tensor = 4"),
        ((4, None, {"data": 8}), {}, r"^mesh.data = 8 .*: needs 8 devices, there are 4"),
        ((4,), {"model.vocab_size": 0}, r"config.model.vocab_size = 0: planning reads no corpus"),
        ((4,), {"routing.gate": "softmax", "routing.predictor": False}, r"routing.gate = 'softmax'"),
        ((4,), {"routing.score": "stochastic", "routing.predictor": False}, r"routing.score = 'stochastic'"),
    ],
)
def test_what_cannot_be_planned_is_refused(report, arguments, changes, message):
    with pytest.raises(ConfigError, match=message):
        report(*arguments, **changes)


def test_advice(report):
    found = report()
    found["fits"] = False
    found["memory"] |= {"needed": 20 * 2**30}
    assert plan.verdict(found) == (
        "DOES NOT FIT on a chip of v5e:2x2: decoding takes 20.00 GiB of 15.75 GiB a chip; try --batch=2, then "
        "--context=32, then more chips, or chips of v5p (95.73 GiB) or v6e (31.24 GiB)"
    )
    found["memory"]["loading"] = 100 * 2**30
    assert plan.verdict(found).endswith("beside those rounded; try more chips")
    found |= {"fits": True}
    found["memory"] |= {"needed": 15 * 2**30, "loading": 0}
    assert plan.verdict(found).endswith("0.75 GiB a chip to spare (tight)")
    found |= {"fits": False}
    found["topology"]["mesh"] = {"data": 2, "fsdp": 2, "tensor": 1, "expert": 1}
    found["memory"] |= {"loading": 100 * 2**30}
    assert plan.verdict(found).endswith(
        "try --mesh.data=1 --mesh.fsdp=4 (weights split; more collectives), then more chips"
    )


# A real chip.


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
def test_the_compiled_loop_of_a_chip(tmp_path, batch):
    """Its loops and branches are known by the blocks that they belong to: more capacity, more bytes and FLOPs."""
    pytest.importorskip("libtpu")
    wide = {**CHANGES, "model.width": 512, "model.num_heads": 4, "model.dtype": "bfloat16", "model.vocab_size": 512}
    config = make_config(**{**wide, "data.cache_dir": str(tmp_path)})
    found = plan.make_report(config, "v5e:1x1", batch)
    assert found["fits"]
    assert found["memory"]["argument"] >= found["memory"]["weights"] + found["memory"]["cache"]
    text = json.loads(json.dumps(found))
    assert "one chip of v5e:1x1 (TPU v5 lite)" in plan.describe(text)

    product, _ = topology.find_product("v5e:1x1")
    mesh = sharding.mesh_of((1, 1, 1, 1), topology.devices(product))
    traced, _ = plan.trace_decoding(config, "predictor", batch, 64, mesh.devices.item())
    compiled = topology.compile_for(traced.lower(), product, mesh, tmp_path / "plans")
    assert compiled.cached
    often, never = (plan.read_loop(compiled.text, dict(mesh.shape), [passes] * 4, []) for passes in (1.0, 0.0))
    assert often.unknown_loops == never.unknown_loops == 0
    assert often.hbm_bytes > never.hbm_bytes
    assert often.moved == ()


@pytest.mark.slow
def test_chips_send_single_tokens_and_neither_weights_nor_caches(tmp_path):
    """By the real compiler. Of 4 rows on two devices along fsdp no array is larger than their hidden values of width
    2048; of weights the smallest that is split has 512 * 256 numbers, of caches 2 rows * 64 slots * 512."""
    pytest.importorskip("libtpu")
    wide = {"model.width": 512, "model.num_heads": 4, "model.dtype": "bfloat16", "model.vocab_size": 512}
    config = make_config(**{**CHANGES, **wide, "data.cache_dir": str(tmp_path)})
    found = plan.make_report(config, "v5e:2x4", 8, mesh=dict(data=2, fsdp=2, tensor=2))
    assert found["fits"]
    product, _ = topology.find_product("v5e:2x4")
    mesh = sharding.mesh_of((2, 2, 2, 1), topology.devices(product))
    traced, _ = plan.trace_decoding(config, "predictor", 8, 64, mesh)
    compiled = topology.compile_for(traced.lower(), product, mesh, tmp_path / "plans")
    assert compiled.cached
    moved = find_collectives(compiled.text, dict(mesh.shape))
    assert {"data", "fsdp", "tensor"} <= {axis for collective in moved for axis in collective.axes}
    for collective in moved:
        assert math.prod(collective.shape) <= (8 if "data" in collective.axes else 4 * 2048), collective


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
def test_a_chip_fetches_no_weights_of_a_block_that_no_row_enters(tmp_path, batch):
    """Half of the weights are theirs. Weights apart would be fetched ahead of the branch: 1.7 times what is read."""
    pytest.importorskip("libtpu")
    config = make_config(
        **CHANGES
        | {"model.width": 2048, "model.num_heads": 16, "model.depth": 16, "model.dtype": "bfloat16"}
        | {"data.cache_dir": str(tmp_path)}
    )
    read = plan.make_report(config, "v5e:1x1", batch)["read"]
    full_blocks = 8 * 2 * (4 * 2048**2 + 2 * 2048 * 8192)  # the routed ones are as large
    assert read["compiled_bypassed"] < 1.25 * full_blocks
    assert read["compiled"] < 1.1 * (read["weights"] + read["cache"])


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
def test_a_chip_reads_only_the_experts_that_are_used(tmp_path, batch):
    """Of eight, in full blocks and in routed ones, whose weights lie in one stack: a slice of it would be copied."""
    pytest.importorskip("libtpu")
    config = make_config(
        **CHANGES
        | {"model.width": 1024, "model.num_heads": 8, "model.layout": "Ee", "model.depth": 4, "experts.count": 8}
        | {"model.dtype": "bfloat16", "data.cache_dir": str(tmp_path)}
    )
    read = plan.make_report(config, "v5e:1x1", batch)["read"]
    by_count = read["weights"] + read["cache"]
    one_expert = 2 * 2 * 1024 * 4096
    # Attention of routed blocks fits on the chip: it is fetched ahead. All experts would be seven more a block.
    assert read["compiled"] < by_count + 2 * one_expert
