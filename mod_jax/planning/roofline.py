"""An estimate of the time of one step from what the program does and what the chip can do. NOT a measurement.

Three terms, for one chip, all chips doing the same:

    compute       matrix FLOPs / peak FLOP/s
    HBM           bytes between HBM and on-chip memory / HBM bandwidth
    interconnect  bytes that a chip sends / bandwidth of the links that its group of chips can use

An operation takes the larger of its compute and its HBM time, operations follow each other, and collectives run either
fully behind them (`seconds_hidden`) or not at all (`seconds_exposed`). Left out: the vector unit (softmax, norms,
activations), the latency of collectives and of every operation, sorts, gathers and scatters beyond their bytes, the
inside of custom kernels, matrix products that do not fill the matrix unit, and the host. So it is optimistic: a bound
that says which term to attack, and which of two plans is the faster.

A ring sends (n - 1) / n of the array per chip and pass; an all-reduce is two passes. Each physical axis that a group
extends along adds its links: both directions where the axis closes into a ring, half of that on an open line. Members
that are k hops apart share each link with the k groups between them, which send at the same time: 1 / k of it is left.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from mod_jax.planning.collectives import Collective
from mod_jax.planning.program import Step
from mod_jax.planning.topology import Product

PASSES = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0, "ragged-all-to-all": 1.0}


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of one step, by term and together."""

    compute: float
    hbm: float
    interconnect: float
    seconds_hidden: float
    seconds_exposed: float


def estimate(step: Step, product: Product, peak_flops: float, coordinates: Sequence[tuple[int, ...]]) -> Roofline:
    """The estimate for a step on this slice; `coordinates` places each device of the mesh in it."""
    chip = product.chip
    on_chip = sum(run.times * max(run.flops / peak_flops, run.hbm_bytes / chip.hbm_bandwidth) for run in step.runs)
    links = sum(
        times * bytes_sent(collective) / bandwidth(collective.group, product, coordinates)
        for collective, times in step.moved
        if bytes_sent(collective)
    )
    return Roofline(
        compute=step.flops / peak_flops,
        hbm=step.hbm_bytes / chip.hbm_bandwidth,
        interconnect=links,
        seconds_hidden=max(on_chip, links),
        seconds_exposed=on_chip + links,
    )


def bytes_sent(collective: Collective) -> float:
    """Bytes that one chip sends for one run of a collective. A reduce-scatter is sized by its input."""
    if collective.kind in ("collective-permute", "collective-broadcast"):
        return float(collective.bytes)
    size = len(collective.group)
    return PASSES[collective.kind] * collective.bytes * (size - 1) / size


def bandwidth(group: Sequence[int], product: Product, coordinates: Sequence[tuple[int, ...]]) -> float:
    """Bytes per second that a chip can send within a group of devices."""
    along_axis = product.chip.ici_bandwidth / 2 / product.chip.torus_dims  # published: both directions of all links
    total = 0.0
    for axis, closes in enumerate(product.rings):
        members = {coordinates[device][axis] for device in group}
        whole = {place[axis] for place in coordinates}
        if len(members) > 1:
            hops = min(b - a for a, b in itertools.pairwise(sorted(members)))
            total += (along_axis if closes and len(members) * hops == len(whole) else along_axis / 2) / hops
    return total or along_axis / 2
