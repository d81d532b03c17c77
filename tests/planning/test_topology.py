"""TPU slices: their names, their chips, and compiling for them.

Tests that need libtpu are skipped where it is missing and say so. The known
traps of compiling for a slice that is not there, and where each is met:

 1. the compiler's `optimal_seconds` loses a second per ConcatBitcast call: unused, `roofline` makes its own estimate
 2. its cost analysis counts a loop's body once: `program` multiplies (tests/planning/test_program.py)
 3. custom kernels count as nothing, gathers many times: `program` counts kernels apart, and slices for what they take
 4. two processes fail on libtpu's lock file: tests/test_plan.py runs two at once
 5. it asks a metadata server, and complains about host names: tests/test_plan.py reads stderr
 6. names of slices that nobody sells compile, and some chips are two devices: here
 7. a mesh axis that is no product of whole physical axes: here
 8. JAX's compilation cache cannot read a topology's entries: `compile_for` keeps results of its own, here
 9. tied embeddings can have full logits reduced over fsdp: `token_movers` would name them, in tests/test_plan.py
10. a loss in chunks of flattened rows gathers the batch: the same
11. top-k can run again in the backward pass: tests/test_plan.py counts sorts
12. fused q, k, v do not line up with a tensor axis: they are separate weights
13. `exec_time_optimization_effort` is refused or does nothing: no compiler option is passed
14. compile time follows the load of the machine: CPU seconds are reported beside it
"""

import dataclasses
import gzip
import importlib.util
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mod_jax import sharding
from mod_jax.errors import ConfigError
from mod_jax.planning import program, topology
from mod_jax.planning.collectives import Collective, token_movers
from mod_jax.tuning import peak_flops


@pytest.mark.parametrize(
    ("name", "product", "note"),
    [
        ("v5e:16x16", "v5e:16x16", ""),
        ("v5p:2x2x1", "v5p:2x2x1", ""),
        ("v5e-256", "v5e:16x16", "v5e-256 is v5e:16x16 (chips)"),
        ("v5litepod-4", "v5e:2x2", "v5litepod-4 is v5e:2x2 (chips)"),
        ("v6e-8", "v6e:2x4", "v6e-8 is v6e:2x4 (chips)"),
        ("trillium:4x4", "v6e:4x4", "trillium:4x4 is v6e:4x4"),
        ("V5P-128", "v5p:4x4x4", "V5P-128 is v5p:4x4x4 (TensorCores, two a chip)"),
    ],
)
def test_names(name, product, note):
    found, said = topology.find_product(name)
    assert (found.name, said) == (product, note)


@pytest.mark.parametrize(
    "name", ["v5e:32x32", "v5e:3x3", "v5e:2x1", "v5e-100", "v5p-4", "v5p:1x1x1", "v4:2x2x1", "", "v5e"]
)
def test_what_nobody_sells_is_refused(name):
    with pytest.raises(ConfigError, match=rf"--topology={name}: no such product; must be one of v\d"):
        topology.find_product(name)


def test_the_message_lists_the_family():
    with pytest.raises(ConfigError, match=r"must be one of v5p:2x2x1, .*, v5p:4x8x8$"):
        topology.find_product("v5p:3x3x3")


def test_products():
    for family, chip in topology.CHIPS.items():
        sizes = [product.num_chips for product in topology.PRODUCTS if product.family == family]
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == 256
        assert peak_flops(chip.kind)
    assert topology.list_products().count("\n") == len(topology.PRODUCTS)
    assert "v5p:4x8x8" in topology.list_products()
    assert topology.Product("v5e", "8x16").rings == (False, True)


def test_without_libtpu_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[tpu\]'"):
        topology.devices(topology.Product("v5e", "2x2"))


# Compiling, with a stand-in for the compiler.


def test_a_program_that_jaxlib_cannot_read_names_the_libtpu_that_fits(mesh, tmp_path):
    def unreadable():
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure")

    lowered = FakeLowered(compiled_text=unreadable)
    with pytest.raises(ConfigError, match=rf"libtpu 1 wrote .* pip install 'jax\[tpu\]=={jax.__version__}'.*RET_CHECK"):
        topology.compile_for(lowered, V5E_4, mesh, tmp_path)
    assert list(tmp_path.iterdir()) == []


class FakeLowered:
    """Stands for a lowered program; `compile` counts its calls."""

    def __init__(self, text="program", error=None, compiled_text=lambda: "HloModule"):
        self.text, self.error, self.compiled_text, self.calls = text, error, compiled_text, 0

    def as_text(self):
        return self.text

    def compile(self):
        self.calls += 1
        if self.error:
            raise self.error
        sizes = dict(argument=100, temp=50, output=90, alias=80, generated_code=7)
        return types.SimpleNamespace(
            memory_analysis=lambda: types.SimpleNamespace(**{f"{k}_size_in_bytes": v for k, v in sizes.items()}),
            cost_analysis=lambda: {"flops": 3.0, "optimal_seconds": -4.93},
            as_text=self.compiled_text,
        )


@pytest.fixture
def mesh(tiny_config, monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1" if name == "libtpu" else real(name))
    return sharding.make_mesh(tiny_config())


V5E_4 = topology.Product("v5e", "2x2")


def test_memory_is_arguments_temporaries_and_outputs_that_overwrite_nothing(mesh, tmp_path):
    assert topology.compile_for(FakeLowered(), V5E_4, mesh, tmp_path).hbm_bytes == 100 + 50 + 90 - 80


def test_the_same_program_is_compiled_once(mesh, tmp_path, monkeypatch, capsys):
    lowered = FakeLowered()
    first = topology.compile_for(lowered, V5E_4, mesh, tmp_path / "plans")
    assert "compiling for v5e:2x2: 0 s, 0 s of CPU" in capsys.readouterr().err
    again = topology.compile_for(lowered, V5E_4, mesh, tmp_path / "plans")
    assert capsys.readouterr().err == ""
    assert lowered.calls == 1
    assert (first.cached, again.cached) == (False, True)
    assert dataclasses.replace(again, cached=False) == first

    others = [
        lambda: topology.compile_for(FakeLowered("other"), V5E_4, mesh, tmp_path / "plans"),
        lambda: topology.compile_for(lowered, topology.Product("v6e", "2x2"), mesh, tmp_path / "plans"),
        lambda: (
            monkeypatch.setenv("LIBTPU_INIT_ARGS", "--x")
            or topology.compile_for(lowered, V5E_4, mesh, tmp_path / "plans")
        ),
    ]
    assert not any(compile_other().cached for compile_other in others)


@pytest.mark.parametrize(
    "damage",
    [b"", b"not gzip", gzip.compress(b"{"), gzip.compress(b'{"text": 1}')],
    ids=["empty", "not gzip", "not JSON", "not all there"],  # gzip stores the time: names must not come from it
)
def test_a_damaged_result_is_made_again(mesh, tmp_path, damage):
    topology.compile_for(FakeLowered(), V5E_4, mesh, tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(damage)
    assert not topology.compile_for(FakeLowered(), V5E_4, mesh, tmp_path).cached
    assert topology.compile_for(FakeLowered(), V5E_4, mesh, tmp_path).cached


def test_without_a_place_to_keep_it_the_result_is_still_given(mesh, tmp_path):
    (tmp_path / "file").touch()
    assert topology.compile_for(FakeLowered(), V5E_4, mesh, tmp_path / "file" / "plans").hbm_bytes == 160


def test_too_much_memory_is_an_answer_and_other_errors_are_errors(mesh, tmp_path):
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory: needs (33.04G) of (15.75G).\nmore")
    refused = topology.compile_for(FakeLowered("big", error), V5E_4, mesh, tmp_path)
    assert refused.refused == "RESOURCE_EXHAUSTED: Ran out of memory: needs (33.04G) of (15.75G)."
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        topology.compile_for(FakeLowered("bad", jax.errors.JaxRuntimeError("INTERNAL: bug")), V5E_4, mesh, tmp_path)


# Which collectives move tokens.

# A stack of 3 units of [8, 6] split 4 ways along 8, a table [40, 8] split along 8, a vector of 200.
# Keys' and values' weights of 3 units, [8, 7, 5], are two of one shape.
PARAMS = [((3, 8, 6), (3, 2, 6)), ((40, 8), (40, 2)), ((200,), (200,)), ((3, 8, 4, 5), (3, 2, 4, 5))]
PARAMS += [((3, 8, 7, 5), (3, 2, 7, 5))] * 2


@pytest.mark.parametrize(
    ("dtype", "shape", "axes", "moves"),
    [
        ("bf16", (40, 8), ("fsdp",), False),  # the table, gathered
        ("f32", (8, 40), ("fsdp",), False),  # and transposed
        ("f32", (1, 171, 1), ("fsdp",), True),  # 171 numbers that are no weight
        ("f32", (3, 8, 6), ("fsdp",), False),  # all units
        ("f32", (8, 20), ("fsdp",), False),  # one unit of the last, heads merged
        ("f32", (8, 4, 5), ("fsdp",), False),
        ("f32", (2, 7, 5, 8), ("fsdp",), False),  # keys' and values' as one array
        ("f32", (2, 56, 5), ("fsdp",), True),  # not merged: two rows of [56, 5] could be activations
        ("f32", (3, 7, 5, 8), ("fsdp",), False),  # all units of one of them
        ("f32", (5, 7, 5, 8), ("fsdp",), True),  # nor five
        ("f32", (2, 40, 8), ("fsdp",), True),  # one table, not two
        ("s32", (40, 8), ("fsdp",), True),  # whole numbers are never a weight
        ("f32", (16, 64), ("data", "fsdp"), True),  # scores
        ("f32", (16, 64), ("tensor",), False),  # the tensor axis holds the same rows
        ("f32", (128,), ("fsdp",), False),  # a few sums
    ],
)
def test_token_movers(dtype, shape, axes, moves):
    collective = Collective("all-gather", dtype, shape, 4 * math.prod(shape), axes)
    assert bool(token_movers([collective], PARAMS, ("data", "fsdp"))) == moves


# With libtpu.


@pytest.fixture(scope="module")
def slices():
    pytest.importorskip("libtpu")
    return {name: topology.devices(topology.find_product(name)[0]) for name in ("v5e:2x2", "v6e:16x16", "v5p:4x4x4")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "chips"), [("v5e:2x2", "v5e", 4), ("v6e:16x16", "v6e", 256), ("v5p:4x4x4", "v5p", 64)]
)
def test_devices_and_chips(slices, name, kind, chips):
    assert len(slices[name]) == topology.count_chips(slices[name]) == chips
    assert slices[name][0].device_kind == topology.CHIPS[kind].kind


@pytest.mark.slow
def test_two_devices_can_be_one_chip():
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    found = topologies.get_topology_desc("v4:2x2x1", platform="tpu").devices
    assert (len(found), topology.count_chips(found)) == (8, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "splits"),
    [
        ({"mesh.data": 1, "mesh.fsdp": 256}, False),
        ({"mesh.data": 16, "mesh.fsdp": 16}, False),
        ({"mesh.data": 1, "mesh.fsdp": 64, "mesh.tensor": 4}, True),  # 64 is no product of 16 and 16
    ],
)
def test_a_mesh_axis_may_split_an_axis_of_the_machine(slices, tiny_config, changes, splits):
    config = tiny_config(**{"train.batch_size": 256, "model.width": 256, "model.num_heads": 4, **changes})
    mesh = sharding.make_mesh(config, slices["v6e:16x16"])
    assert topology.splits_physical_axes(mesh) == splits
    assert len({device.id for device in mesh.devices.flat}) == 256


@pytest.mark.slow
def test_the_check_of_rows_fails_on_a_program_that_mixes_them(slices, tiny_config, tmp_path):
    """One flattened index into all rows at once moves rows between chips; row by row, nothing moves."""
    config = tiny_config(**{"mesh.data": 1, "mesh.fsdp": 4, "train.batch_size": 4})
    mesh = sharding.make_mesh(config, slices["v5e:2x2"])
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    x_BTD = jax.ShapeDtypeStruct((4, 256, 128), jnp.float32, sharding=rows)
    idx_BC = jax.ShapeDtypeStruct((4, 32), jnp.int32, sharding=rows)

    def flattened(x_BTD, idx_BC):
        flat_M = (idx_BC + 256 * jnp.arange(4)[:, None]).reshape(-1)
        return x_BTD.reshape(-1, 128)[flat_M].reshape(4, 32, 128)

    def by_row(x_BTD, idx_BC):
        return jax.vmap(lambda x_TD, idx_C: x_TD.at[idx_C].get(mode="promise_in_bounds"))(x_BTD, idx_BC)

    for function, moves in ((flattened, True), (by_row, False)):
        lowered = jax.jit(function, out_shardings=rows).lower(x_BTD, idx_BC)
        compiled = topology.compile_for(lowered, V5E_4, mesh, tmp_path)
        step = program.read_step(compiled.text, dict(mesh.shape))
        assert bool(token_movers([c for c, _ in step.moved], [((512, 128), (512, 32))], ("fsdp",))) == moves
    assert np.prod(mesh.devices.shape) == 4
