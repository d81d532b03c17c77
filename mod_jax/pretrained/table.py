"""Loss against FLOPs: the routed model at several capacities, beside the dense model with whole blocks deleted."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mod_jax import outputs
from mod_jax.config import Config
from mod_jax.models import flops
from mod_jax.models.flops import Flops


@dataclasses.dataclass(frozen=True)
class Point:
    """One model: `flops` forward per token, its share of the dense model's, and what of both is in blocks alone.

    `capacity` is None of a model with deleted blocks; `realised` is the fraction that routed blocks computed on.
    """

    loss: float
    flops: float
    of_dense: float
    blocks_of_dense: float
    capacity: float | None = None
    realised: float | None = None
    deleted: tuple[int, ...] = ()


def routed_point(config: Config, vocab_size: int, capacity: float, realised_L: Sequence[float], loss: float) -> Point:
    """A model of `config` whose routed blocks computed on these fractions of the tokens."""
    spent = flops.forward_flops(config, vocab_size, realised_capacity=tuple(map(float, realised_L)))
    return Point(loss, *_shares(config, vocab_size, spent), capacity, float(np.mean(realised_L)))


def deleted_point(config: Config, vocab_size: int, deleted: Sequence[int], loss: float) -> Point:
    """The dense model without these blocks."""
    model = dataclasses.replace(config.model, layout="F", depth=config.model.depth - len(deleted))
    spent = flops.forward_flops(dataclasses.replace(config, model=model), vocab_size)
    return Point(loss, *_shares(config, vocab_size, spent), deleted=tuple(deleted))


def _shares(config: Config, vocab_size: int, spent: Flops) -> tuple[float, float, float]:
    dense = flops.dense_flops(config, vocab_size)
    in_blocks = (spent.total - spent.unembed) / (dense.total - dense.unembed)
    return spent.total / config.data.seq_len, spent.total / dense.total, in_blocks


def counts_to_delete(config: Config, vocab_size: int, routed: Sequence[Point], most: int) -> list[int]:
    """How many blocks to delete, so that each routed model's FLOPs lie between those of two of the counts."""
    one = 1 - deleted_point(config, vocab_size, [0], 0.0).of_dense
    counts = set()
    for point in routed:
        exact = (1 - point.of_dense) / one
        counts |= {int(np.floor(exact)), int(np.ceil(exact))}
    return sorted(count for count in counts if 1 <= count <= most)


def deleted_at(points: Sequence[Point], of_dense: float) -> float | None:
    """The loss of deletion at these FLOPs, between its two nearest points; None beyond them."""
    ordered = sorted(points, key=lambda point: point.of_dense)
    shares = [point.of_dense for point in ordered]
    if not shares or not shares[0] - 1e-9 <= of_dense <= shares[-1] + 1e-9:
        return None
    return float(np.interp(of_dense, shares, [point.loss for point in ordered]))


def lines(dense: Point, routed: Sequence[Point], deleted: Sequence[Point]) -> list[str]:
    """The table for a person. Losses are nats per token on the same windows."""
    header = f"{'capacity':>9}{'routed':>9}{'FLOPs/token':>13}{'of dense':>10}{'blocks':>9}{'loss':>9}{'+ dense':>9}"
    found = [header + f"{'deleting blocks at equal FLOPs':>33}"]
    found.append(f"{'dense':>9}{'':>9}{dense.flops:>13.4g}{1:>10.1%}{1:>9.1%}{dense.loss:>9.4f}")
    for point in routed:
        static = deleted_at([dense, *deleted], point.of_dense)
        beside = "not measured" if static is None else f"{static:.4f} ({static - dense.loss:+.4f})"
        found.append(
            f"{point.capacity:>9g}{point.realised:>9.1%}{point.flops:>13.4g}{point.of_dense:>10.1%}"
            f"{point.blocks_of_dense:>9.1%}{point.loss:>9.4f}{point.loss - dense.loss:>+9.4f}{beside:>33}"
        )
    for point in deleted:
        found.append(
            f"{f'-{len(point.deleted)}':>9}{'':>9}{point.flops:>13.4g}{point.of_dense:>10.1%}"
            f"{point.blocks_of_dense:>9.1%}{point.loss:>9.4f}{point.loss - dense.loss:>+9.4f}"
        )
    return found


def draw(folder: pathlib.Path, caption: str, dense: Point, routed: Sequence[Point], deleted: Sequence[Point]) -> None:
    """Loss against the share of the dense model's FLOPs, as folder/loss.png and .pdf."""
    from mod_jax.analysis import plots  # matplotlib, once something is drawn

    series = {
        "routed, selection threshold": [(p.of_dense, p.loss, f"{p.capacity:g}") for p in routed],
        "whole blocks deleted": [(p.of_dense, p.loss, str(len(p.deleted))) for p in deleted],
    }
    figure = plots.loss_against_flops((dense.of_dense, dense.loss), series)
    plots.add_caption(figure, caption)
    for ending in ("png", "pdf"):
        plots.save(figure, folder / f"loss.{ending}")


def to_json(dense: Point, routed: Sequence[Point], deleted: Sequence[Point]) -> dict[str, Any]:
    """All points, for a file."""
    groups = dict(dense=[dense], routed=routed, deleted=deleted)
    return outputs.plain({name: [dataclasses.asdict(point) for point in points] for name, points in groups.items()})
