"""The parser of compiled programs reads every spelling of device groups, and refuses what it cannot read."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from mod_jax.planning.collectives import Collective, device_groups, find_collectives, spanned_axes

MESH = {"data": 2, "fsdp": 2, "tensor": 2}  # device number = 4 * data + 2 * fsdp + tensor


@pytest.mark.parametrize(
    ("spelling", "groups"),
    [
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups={{0,1,2,3,4,5,6,7}}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups={}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[8]", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        # 0..7 as 2 x 4, transposed: 0 4 1 5 2 6 3 7.
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        # 0..7 as [data, fsdp, tensor], fsdp moved last: (data, tensor) = 00 01 10 11, each with both fsdp.
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['a'=4,'b'=1,'c'=2] {'a'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("replica_groups=mesh['data'=2,'fsdp'=2,'tensor'=2] {'data','tensor'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        # Devices in the order 0 4 1 5 2 6 3 7, as 4 x 2: rows are [0 4] [1 5] [2 6] [3 7].
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", [[0, 2], [1, 3]]),
        # The second half of an axis of 4, beside an axis of 2: 8 = (2, 2) x 2, grouped along the middle.
        ("replica_groups=mesh['a'=4,'b'=2] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
    ],
)
def test_every_spelling_of_device_groups(spelling, groups):
    assert device_groups(f"%x), channel_id=1, {spelling}, use_global_device_ids=true", 8) == groups


def test_an_unknown_spelling_is_an_error():
    with pytest.raises(ValueError, match="cannot read the device groups"):
        find_collectives("  %a = f32[4]{0} all-reduce(%b), replica_groups=spiral(8)", MESH)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ([[0, 1], [6, 7]], ("tensor",)),
        ([[0, 2]], ("fsdp",)),
        ([[0, 4]], ("data",)),
        ([[1, 2]], ("fsdp", "tensor")),
        ([[0], [1]], ()),
        ([[0, 1, 2, 3, 4, 5, 6, 7]], ("data", "fsdp", "tensor")),
    ],
)
def test_groups_become_mesh_axes(groups, axes):
    assert spanned_axes(groups, MESH) == axes


def test_one_entry_per_array_with_its_bytes():
    text = """
      %p = f32[3,5]{1,0} parameter(0), metadata={op_name="all-gather(x)"}
      %a = (f32[22,16]{1,0}, /*index=1*/bf16[4]{0:T(128)}) all-reduce(%p, %q), replica_groups=[4,2]<=[8], to_apply=%add
      %b = (f32[2,3]{1,0}, f32[4,3]{1,0}) all-gather-start(%p), replica_groups={{0,4},{1,5},{2,6},{3,7}}
      %c = f32[4,3]{1,0} all-gather-done(%b)
      %d = (pred[8]{0}, pred[8]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,2},{2,0}}
      %e = s32[2]{0} reduce-scatter(%p), replica_groups={}, dimensions={0}
    """
    assert find_collectives(text, MESH) == [
        Collective("all-reduce", "f32", (22, 16), 22 * 16 * 4, ("tensor",)),
        Collective("all-reduce", "bf16", (4,), 8, ("tensor",)),
        Collective("all-gather", "f32", (4, 3), 48, ("data",)),
        Collective("collective-permute", "pred", (8,), 8, ("fsdp",)),
        Collective("reduce-scatter", "s32", (2,), 8, ("data", "fsdp", "tensor")),
    ]


def test_a_real_program():
    """A sum over rows that are split over data and fsdp is one all-reduce over exactly these."""
    mesh = jax.make_mesh((2, 2, 2), tuple(MESH), axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        rows = jax.ShapeDtypeStruct(
            (8, 6), jnp.float32, sharding=jax.NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
        )
        text = jax.jit(lambda x: jnp.sum(x, axis=0), out_shardings=PartitionSpec()).lower(rows).compile().as_text()
    assert find_collectives(text, MESH) == [Collective("all-reduce", "f32", (6,), 24, ("data", "fsdp"))]
