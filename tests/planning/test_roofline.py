"""The estimate, by hand: seconds of each term for numbers that are easy to divide."""

import dataclasses

import pytest

from mod_jax.planning import roofline
from mod_jax.planning.collectives import Collective
from mod_jax.planning.program import Run, Step
from mod_jax.planning.topology import Product

V5E_256 = Product("v5e", "16x16")
GRID = [(x, y, 0) for x in range(16) for y in range(16)]  # device 16 * x + y


def collective(kind, num_bytes, group):
    return Collective(kind, "f32", (num_bytes // 4,), num_bytes, ("fsdp",), tuple(group))


@pytest.mark.parametrize(
    ("kind", "group", "sent"),
    [
        ("all-gather", range(4), 300),  # each chip passes on three of the four parts
        ("reduce-scatter", range(4), 300),
        ("all-reduce", range(4), 600),  # both of the above
        ("all-to-all", range(4), 300),
        ("collective-permute", (0, 1), 400),
        ("all-reduce", (3,), 0),
    ],
)
def test_bytes_sent(kind, group, sent):
    assert roofline.bytes_sent(collective(kind, 400, group)) == sent


@pytest.mark.parametrize(
    ("product", "group", "gigabytes"),
    [
        # v5e: 400 GB/s for two axes and both directions: 100 GB/s along a ring, 50 along an open line.
        (V5E_256, range(16), 100),
        (V5E_256, range(8), 50),
        (V5E_256, range(256), 200),
        (V5E_256, (0, 16), 50),
        (V5E_256, (0, 8), 12.5),  # 16 chips send over 8 hops each, on 32 links of 50
        (V5E_256, (0, 4), 12.5),  # one way only, of which four groups take a quarter each
        (V5E_256, range(0, 16, 2), 50),  # every other chip of a ring, two groups
        (Product("v5e", "8x16"), range(16), 100),  # the axis of 16 closes, the axis of 8 does not
        (Product("v5e", "8x16"), range(128), 150),
    ],
)
def test_bandwidth_of_a_group(product, group, gigabytes):
    places = [place for place in GRID if place[0] < int(product.shape.split("x")[0])]
    assert roofline.bandwidth(group, product, places) == gigabytes * 1e9


def test_bandwidth_in_space():
    """v5p: 1200 GB/s for three axes: 200 along a ring; a slice that is no whole cube has no rings."""
    cube = [(x, y, z) for x in range(4) for y in range(4) for z in range(4)]
    assert roofline.bandwidth(range(4), Product("v5p", "4x4x4"), cube) == 200e9
    assert roofline.bandwidth(range(64), Product("v5p", "4x4x4"), cube) == 600e9
    half = [place for place in cube if place[0] < 2]
    assert roofline.bandwidth(range(4), Product("v5p", "2x4x4"), half) == 100e9


def test_an_operation_takes_the_larger_of_its_two_times():
    chip = V5E_256.chip
    peak = 100e12
    runs = (
        Run(None, 2, flops=1e12, hbm_bytes=0.0),  # 2 x 10 ms of compute
        Run(None, 1, flops=1e11, hbm_bytes=chip.hbm_bandwidth * 5e-3),  # 1 ms of compute, 5 ms of HBM
    )
    moved = ((collective("all-gather", 16 * 10**8, range(16)), 3),)  # 3 x 1.5e9 bytes at 100e9: 45 ms
    step = Step(runs, moved, (), 0, 0, 0)
    assert dataclasses.asdict(roofline.estimate(step, V5E_256, peak, GRID)) == pytest.approx(
        dict(compute=0.021, hbm=0.005, interconnect=0.045, seconds_hidden=0.045, seconds_exposed=0.070)
    )
