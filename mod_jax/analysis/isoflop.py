"""Optimal sizes from runs of equal training FLOPs: curves through losses of several sizes, and what a budget does.

Vocabulary. A *curve* is the runs of one variant and one budget, of several *sizes* (parameters, or forward FLOPs per
token). Its *optimum* is the size at which a fitted line is lowest. A *power law* says how optima grow with the budget.

The line is a parabola in log size (Hoffmann et al. 2022, arXiv 2203.15556, section 3.2), bent by one number. Loss at
equal FLOPs falls as size ** -a and rises as size ** b. Where a and b differ, the curve is not symmetric in log size,
and a plain parabola misplaces its minimum by up to a tenth (sizes 2 apart, a and b in 0.2 to 0.6). So the parabola is
in (size ** k - 1) / k, which is log size for k = 0. The *skew* k is one for all curves of a fit, since a and b are, and
is taken from the data. Only the sizes nearest to the minimum count: far away no parabola holds.

Intervals hold 95 %. They come from a bootstrap: residuals, scaled by the degrees of freedom that the fit took and
pooled over the curves of a budget, are drawn anew, and everything is fitted again. They say how far the runs' noise
carries, and nothing of what all runs share: the text, the sizes' rule, the learning rate.
"""

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np

NEAREST = 5  # sizes that a line is fitted to
FEWEST = 4  # with three, a parabola goes through every point and says nothing of noise
SKEWS = np.linspace(-0.15, 0.15, 61)  # holds a and b between 0.2 and 0.6, with some room
DRAWS = 1000


class Curve(NamedTuple):
    """Runs of one variant and budget: arrays [n] of sizes and losses. A size may come several times, by seed."""

    sizes: np.ndarray
    losses: np.ndarray


@dataclasses.dataclass(frozen=True)
class Optimum:
    """Where a curve is lowest.

    Attributes:
      size, loss: of the minimum.
      size_interval, loss_interval: 95 %; None without noise to draw from. A bound of the size that is one of `reach` is
        open: there may be no minimum within it.
      residual: root of the summed squares of what the line leaves, over the degrees of freedom that are left.
      reach: smallest and largest size that the line was fitted to.
      size_draws, loss_draws: [DRAWS], of the bootstrap.
    """

    size: float
    loss: float
    size_interval: tuple[float, float] | None
    loss_interval: tuple[float, float] | None
    residual: float
    reach: tuple[float, float]
    skew: float
    coefficients: tuple[float, float, float]
    centre: float
    size_draws: np.ndarray
    loss_draws: np.ndarray

    def line(self, sizes: np.ndarray) -> np.ndarray:
        """The fitted loss at these sizes."""
        return _design(np.log(sizes) - self.centre, self.skew) @ np.array(self.coefficients)


class Refused(NamedTuple):
    """Why a curve has no optimum."""

    reason: str


class PowerLaw(NamedTuple):
    """value = factor * budget ** exponent. `residual`: of log value; None for two budgets, which it meets exactly."""

    factor: float
    exponent: float
    exponent_interval: tuple[float, float] | None
    residual: float | None


def fit_curves(
    curves: Mapping[tuple[float, Hashable], Curve], skew: float | None = None, seed: int = 0
) -> dict[tuple[float, Hashable], Optimum | Refused]:
    """The optimum of each curve, or why it has none.

    Args:
      curves: by (budget, variant).
      skew: k of all curves; 0 gives plain parabolas in log size. None: the one that fits them best.
      seed: of the bootstrap; the same one gives the same intervals.
    """
    found: dict[tuple[float, Hashable], Optimum | Refused] = {}
    chosen: dict[tuple[float, Hashable], Curve] = {}
    for key, curve in curves.items():
        part = _near_minimum(curve)
        found[key] = part if isinstance(part, Refused) else Refused("")  # keeps the order of `curves`
        if isinstance(part, Curve):
            chosen[key] = part
    if not chosen:
        return found
    skews = SKEWS if skew is None else np.array([skew])
    centres = {key: np.log(curve.sizes).mean() for key, curve in chosen.items()}
    logs = {key: np.log(curve.sizes) - centres[key] for key, curve in chosen.items()}
    best, coefficients = _fit_all(logs, {key: curve.losses[:, None] for key, curve in chosen.items()}, skews)

    drawn = _draw_losses(chosen, logs, best[0], coefficients, np.random.default_rng(seed))
    draw_skews, draw_coefficients = _fit_all(logs, drawn, skews)
    for key, curve in chosen.items():
        x_n = logs[key]
        here = x_n.min(), x_n.max()
        [place], [loss], [inside] = _lowest(coefficients[key], best, here)
        if not inside:
            found[key] = Refused("the fitted line has no minimum inside the sizes")
            continue
        places, losses, _ = _lowest(draw_coefficients[key], draw_skews, here)
        size_draws = np.exp(places + centres[key])
        residuals = curve.losses - _design(x_n, best[0]) @ coefficients[key][:, 0]
        noisy = len(set(map(float, losses))) > 1
        found[key] = Optimum(
            size=float(np.exp(place + centres[key])),
            loss=float(loss),
            size_interval=_interval(size_draws) if noisy else None,
            loss_interval=_interval(losses) if noisy else None,
            residual=float(np.sqrt(np.sum(residuals**2) / (len(residuals) - 3))),
            reach=(float(curve.sizes.min()), float(curve.sizes.max())),
            skew=float(best[0]),
            coefficients=tuple(map(float, coefficients[key][:, 0])),
            centre=float(centres[key]),
            size_draws=size_draws,
            loss_draws=losses,
        )
    return found


def loss_difference(first: Optimum, second: Optimum) -> tuple[float, tuple[float, float] | None]:
    """(loss at the first optimum minus that at the second, its interval)."""
    draws = first.loss_draws - second.loss_draws
    return first.loss - second.loss, _interval(draws) if first.loss_interval and second.loss_interval else None


def fit_power_law(budgets: np.ndarray, optima: list[Optimum], what: str) -> PowerLaw | Refused:
    """How `what` of the optima, "size" or "loss", goes with the budget: a straight line in logarithms."""
    if len(budgets) < 2:
        return Refused("one budget has no slope")
    x_n = np.log(np.asarray(budgets, np.float64))
    values = np.log([getattr(optimum, what) for optimum in optima])
    draws = np.log([getattr(optimum, f"{what}_draws") for optimum in optima])
    slope, offset = np.polyfit(x_n, values, 1)
    slopes = np.polyfit(x_n, draws, 1)[0]
    left = values - (offset + slope * x_n)
    residual = float(np.sqrt(np.sum(left**2) / (len(x_n) - 2))) if len(x_n) > 2 else None
    noisy = all(optimum.size_interval for optimum in optima)
    return PowerLaw(float(np.exp(offset)), float(slope), _interval(slopes) if noisy else None, residual)


def _near_minimum(curve: Curve) -> Curve | Refused:
    """The runs of the NEAREST sizes about the minimum, or why there is none."""
    sizes, losses = np.asarray(curve.sizes, np.float64), np.asarray(curve.losses, np.float64)
    if not (np.isfinite(losses).all() and np.isfinite(sizes).all() and (sizes > 0).all()):
        return Refused("a size or a loss is not a finite number")
    distinct = np.unique(sizes)
    if len(distinct) < FEWEST:
        return Refused(f"{len(distinct)} sizes; {FEWEST} are needed")
    means = np.array([losses[sizes == size].mean() for size in distinct])
    lowest = int(np.argmin(means))
    if lowest in (0, len(distinct) - 1):
        end = "smallest" if lowest == 0 else "largest"
        return Refused(f"the {end} size, {distinct[lowest]:.3g}, has the lowest loss: the minimum is not inside")
    x = np.log(distinct)
    centre, before = x[lowest], None
    for _ in range(2 * len(x)):
        near = np.sort(np.argsort(np.abs(x - centre), kind="stable")[:NEAREST])
        if before is not None and (near == before).all():
            break
        before = near
        inside = np.isin(sizes, distinct[near])
        middle = x[near].mean()
        square, linear, _ = np.polyfit(np.log(sizes[inside]) - middle, losses[inside], 2)
        if square <= 0:
            return Refused("the losses have no minimum: they bend downwards")
        centre = np.clip(middle - linear / (2 * square), x[0], x[-1])
    inside = np.isin(sizes, distinct[before])
    return Curve(sizes[inside], losses[inside])


def _bent(x: np.ndarray, skew: float) -> np.ndarray:
    return np.expm1(skew * x) / skew if skew else x


def _straight(bent: np.ndarray, skew: float) -> np.ndarray:
    return np.log1p(skew * bent) / skew if skew else bent


def _design(x_n: np.ndarray, skew: float) -> np.ndarray:
    """[n, 3]: 1, u, u ** 2 of the bent log size."""
    u_n = _bent(x_n, skew)
    return np.stack([np.ones_like(u_n), u_n, u_n**2], axis=-1)


def _fit_all(
    logs: Mapping[Any, np.ndarray], losses: Mapping[Any, np.ndarray], skews: np.ndarray
) -> tuple[np.ndarray, dict[Any, np.ndarray]]:
    """Least squares of every curve, for each of R draws of its losses [n, R], with the skew that fits all best.

    Returns:
      The skew of each draw, [R], and by curve the coefficients, [3, R].
    """
    squares, solutions = [], []
    for skew in skews:
        fitted = {key: np.linalg.pinv(_design(x_n, skew)) @ losses[key] for key, x_n in logs.items()}
        left = [losses[key] - _design(x_n, skew) @ fitted[key] for key, x_n in logs.items()]
        squares.append(sum((part**2).sum(axis=0) for part in left))
        solutions.append(fitted)
    best = np.argmin(squares, axis=0)
    draws = np.arange(len(best))
    coefficients = {key: np.stack([s[key] for s in solutions])[best, :, draws].T for key in logs}
    return skews[best], coefficients


def _lowest(
    coefficients: np.ndarray, skews: np.ndarray, reach: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(where, [R]; how low, [R]; whether the line has a minimum there, [R]) within reach, of lines [3, R]."""
    places, losses, inside = [], [], []
    for (constant, linear, square), skew in zip(coefficients.T, skews, strict=True):
        ends = [_bent(np.float64(end), skew) for end in reach]
        u = -linear / (2 * square) if square > 0 else np.inf
        is_inside = ends[0] < u < ends[1]
        candidates = [u] if is_inside else ends
        values = [constant + linear * v + square * v**2 for v in candidates]
        least = int(np.argmin(values))
        places.append(_straight(np.float64(candidates[least]), skew))
        losses.append(values[least])
        inside.append(is_inside)
    return np.array(places), np.array(losses), np.array(inside)


def _draw_losses(
    curves: Mapping[tuple[float, Hashable], Curve],
    logs: Mapping[Any, np.ndarray],
    skew: float,
    coefficients: Mapping[Any, np.ndarray],
    rng: np.random.Generator,
) -> dict[Any, np.ndarray]:
    """Losses [n, DRAWS] of each curve: its line, and residuals drawn from those of all curves of its budget."""
    lines = {key: _design(x_n, skew) @ coefficients[key][:, 0] for key, x_n in logs.items()}
    pools: dict[float, list[np.ndarray]] = {}
    for key, curve in curves.items():
        n = len(curve.losses)
        pools.setdefault(key[0], []).append((curve.losses - lines[key]) * np.sqrt(n / (n - 3)))
    pooled = {budget: np.concatenate(parts) for budget, parts in pools.items()}
    return {
        key: lines[key][:, None] + rng.choice(pooled[key[0]], size=(len(curve.losses), DRAWS))
        for key, curve in curves.items()
    }


def _interval(draws: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(low), float(high)
