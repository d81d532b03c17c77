"""Figures of an isoFLOP study: loss against size, against forward FLOPs and step time, and optima against the budget.

Vocabulary as in `isoflop`. A *panel* is one kind of loss, "top-k" or "causal": each figure shows both side by side. A
variant keeps its colour, marker and line from figure to figure, so that it is known in grey too.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from mod_jax.analysis.isoflop import Curve, Optimum, PowerLaw, Refused
from mod_jax.analysis.plots import INK, MUTED, PALETTE, add_title, styled

LOOKS = [
    dict(color=PALETTE[0], marker="o", linestyle="-"),
    dict(color=PALETTE[1], marker="s", linestyle=(0, (6, 2))),
    dict(color=PALETTE[2], marker="^", linestyle=(0, (1, 1.5))),
    dict(color=PALETTE[3], marker="D", linestyle=(0, (5, 1.5, 1, 1.5))),
]

Key = tuple[float, Hashable]  # (budget, variant)


class Panel(NamedTuple):
    """One kind of loss: its name, the runs, and the optimum of each curve, or why it has none."""

    name: str
    curves: Mapping[Key, Curve]
    optima: Mapping[Key, Optimum | Refused]


@styled
def loss_against_size(panels: Sequence[Panel], variants: Sequence[str], size_name: str) -> Figure:
    """The paper's figure 3: every run, a line per budget and variant, and each optimum with its intervals."""
    fig = Figure(figsize=(4.4 * len(panels) + 1.8, 4.4))
    axes = fig.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    looks = look_of(variants)
    for ax, panel in zip(axes, panels, strict=True):
        for (budget, variant), curve in panel.curves.items():
            look = looks[variant]
            ax.plot(
                curve.sizes, curve.losses, look["marker"], color=look["color"], markersize=4, markerfacecolor="none"
            )
            optimum = panel.optima[budget, variant]
            if isinstance(optimum, Optimum):
                _draw_line(ax, optimum, look)
            else:
                _join(ax, curve, look)
        ax.set_xscale("log")
        ax.set(xlabel=size_name, title=f"{panel.name} loss")
        _name_budgets(ax, panel)
        _size_ticks(ax)
    axes[0].set_ylabel("held-out loss, nats per token")
    _legend(fig, looks, variants)
    add_title(fig, f"Loss at equal training FLOPs against {size_name}")
    return fig


@styled
def loss_against_cost(
    budget: float,
    panels: Sequence[Panel],
    variants: Sequence[str],
    seconds: Mapping[Key, np.ndarray] | None = None,
    dense: str = "dense",
) -> Figure:
    """The paper's figure 4: loss at one budget against forward FLOPs, and step time, relative to the best dense model.

    Args:
      panels: with forward FLOPs per token as sizes.
      seconds: by curve, the measured seconds per token of each run, NaN where not known; None: no step times.
      dense: the variant whose optimum all is relative to; it must have one in every panel.
    """
    num_columns = 1 if seconds is None else 2
    fig = Figure(figsize=(4.4 * num_columns + 1.8, 3.6 * len(panels) + 0.3))
    rows = fig.subplots(len(panels), num_columns, sharey="row", squeeze=False)
    looks = look_of(variants)
    for axes, panel in zip(rows, panels, strict=True):
        best = panel.optima[budget, dense]
        dense_seconds = (
            None if seconds is None else _seconds_of_best(best, panel.curves[budget, dense], seconds[budget, dense])
        )
        for (at, variant), curve in panel.curves.items():
            if at != budget:
                continue
            look, optimum, losses = looks[variant], panel.optima[at, variant], curve.losses - best.loss
            dots = dict(
                color=look["color"], marker=look["marker"], markersize=4, markerfacecolor="none", linestyle="none"
            )
            axes[0].plot(curve.sizes / best.size, losses, **dots)
            if isinstance(optimum, Optimum):
                _draw_line(axes[0], optimum, look, best.size, best.loss)
            else:
                _join(axes[0], Curve(curve.sizes / best.size, losses), look)
            if seconds is not None:
                axes[1].plot(seconds[at, variant] / dense_seconds, losses, **dots)
                _join(axes[1], Curve(seconds[at, variant] / dense_seconds, losses), look)
        for ax in axes:
            ax.axhline(0, color=MUTED, linewidth=0.8)
            ax.axvline(1, color=MUTED, linewidth=0.8)
            _ratio_ticks(ax)
            if best.loss_interval:
                ax.axhspan(*(np.array(best.loss_interval) - best.loss), color="#e8e8e8", zorder=0)
        axes[0].set_ylabel(f"{panel.name} loss minus that of\nthe best dense model, nats per token")
    names = (
        "forward FLOPs per token, relative\nto the best dense model",
        "measured step time per token,\nrelative to it",
    )
    for ax, name in zip(rows[-1], names, strict=False):
        ax.set_xlabel(name)
    _legend(fig, looks, variants)
    add_title(fig, f"{budget_name(budget)} training FLOPs: loss against the cost of a pass")
    return fig


def _seconds_of_best(best: Optimum, curve: Curve, seconds: np.ndarray) -> float:
    """Those of the optimum, by straight lines in logarithms between the runs beside it; NaN where none is known."""
    order = np.argsort(curve.sizes)
    known = order[np.isfinite(seconds[order])]
    if not len(known):
        return np.nan
    return float(np.exp(np.interp(np.log(best.size), np.log(curve.sizes[known]), np.log(seconds[known]))))


@styled
def optima_against_budget(
    panels: Sequence[Panel],
    laws: Sequence[Mapping[tuple[str, str], PowerLaw | Refused]],
    variants: Sequence[str],
    size_name: str,
) -> Figure:
    """Optimal size, and the loss there, against the budget; intervals, and the power law of each variant.

    Args:
      laws: of each panel, by (variant, "size" or "loss").
    """
    fig = Figure(figsize=(10.6, 3.4 * len(panels) + 0.3))
    rows = fig.subplots(len(panels), 2, squeeze=False)
    looks = look_of(variants)
    for axes, panel, law in zip(rows, panels, laws, strict=True):
        for place, variant in enumerate(variants):
            found = {b: o for (b, v), o in panel.optima.items() if v == variant and isinstance(o, Optimum)}
            if not found:
                continue
            look, budgets = looks[variant], np.array(list(found))
            shown = budgets * 1.04 ** (place - (len(variants) - 1) / 2)  # beside each other, not on top
            for ax, what in zip(axes, ("size", "loss"), strict=True):
                values = np.array([getattr(o, what) for o in found.values()])
                intervals = [getattr(o, f"{what}_interval") or (getattr(o, what),) * 2 for o in found.values()]
                spread = np.abs(np.array(intervals).T - values)
                style = {**look, "linestyle": "none"}
                ax.errorbar(shown, values, yerr=spread, **style, markersize=5, capsize=2, linewidth=1)
                line = law.get((variant, what))
                if isinstance(line, PowerLaw):
                    span = np.array([budgets.min(), budgets.max()])
                    ax.plot(span, line.factor * span**line.exponent, color=look["color"], linestyle=look["linestyle"])
        for ax in axes:
            _budget_ticks(ax, sorted({budget for budget, _ in panel.optima}))
            ax.set(yscale="log", xlabel="training FLOPs")
        for kind in ("major", "minor"):
            getattr(axes[1].yaxis, f"set_{kind}_formatter")(lambda value, _: f"{value:g}")
        axes[0].set(ylabel=f"optimal {size_name}", title=f"by {panel.name} loss")
        axes[1].set(ylabel=f"{panel.name} loss there,\nnats per token")
    _legend(fig, looks, variants, with_runs=False)
    add_title(fig, "Optima against the budget")
    return fig


def look_of(variants: Sequence[str]) -> dict[str, dict]:
    return {variant: LOOKS[i % len(LOOKS)] for i, variant in enumerate(variants)}


def _draw_line(ax, optimum: Optimum, look: dict, size: float = 1.0, loss: float = 0.0) -> None:
    """The fitted line over its reach, and the optimum with its intervals; relative to (size, loss)."""
    sizes = np.geomspace(*optimum.reach, 100)
    ax.plot(sizes / size, optimum.line(sizes) - loss, color=look["color"], linestyle=look["linestyle"], linewidth=1.3)
    bars = {}
    if optimum.size_interval:
        bars["xerr"] = np.abs(np.array(optimum.size_interval)[:, None] - optimum.size) / size
        bars["yerr"] = np.abs(np.array(optimum.loss_interval)[:, None] - optimum.loss)
    style = dict(color=look["color"], marker=look["marker"], markersize=7, markeredgecolor=INK, linewidth=1, capsize=2)
    ax.errorbar([optimum.size / size], [optimum.loss - loss], **bars, **style, zorder=3)


def _join(ax, curve: Curve, look: dict) -> None:
    """Thin straight lines between the means of the sizes: of runs without a fitted line."""
    sizes = np.unique(curve.sizes[np.isfinite(curve.sizes)])
    means = [curve.losses[curve.sizes == size].mean() for size in sizes]
    ax.plot(sizes, means, color=look["color"], linestyle=look["linestyle"], linewidth=0.6)


def _name_budgets(ax, panel: Panel) -> None:
    """Each budget beside the end of its lowest curve at the right."""
    for budget in dict.fromkeys(b for b, _ in panel.curves):
        ends = [
            (curve.sizes.max(), curve.losses[np.argmax(curve.sizes)])
            for (at, _), curve in panel.curves.items()
            if at == budget and len(curve.sizes)
        ]
        if ends:
            place = min(ends, key=lambda end: (-end[0], end[1]))
            ax.annotate(
                budget_name(budget),
                place,
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=MUTED,
            )
    ax.margins(x=0.12)


def _size_ticks(ax) -> None:
    """Sizes on a logarithmic axis: 50k, 100k, 200k; over more than two powers of ten, those only."""
    low, high = ax.get_xlim()
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.xaxis.set_minor_formatter(NullFormatter())


def _ratio_ticks(ax) -> None:
    """Ratios on a logarithmic axis: powers of two, as decimal numbers."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _budget_ticks(ax, budgets: Sequence[float]) -> None:
    ax.set_xscale("log")
    ax.set_xticks(list(budgets), [budget_name(budget) for budget in budgets])
    ax.set_xticks([], minor=True)


def budget_name(budget: float) -> str:
    """3e12, 1.5e13: as short as it can be said."""
    mantissa, exponent = f"{budget:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _legend(fig: Figure, looks: dict[str, dict], variants: Sequence[str], with_runs: bool = True) -> None:
    handles = [Line2D([], [], **looks[variant], markersize=5, linewidth=1.3, label=variant) for variant in variants]
    if with_runs:
        handles.append(Line2D([], [], color=MUTED, marker="o", markerfacecolor="none", linestyle="none", label="a run"))
    best = dict(color=MUTED, marker="o", markeredgecolor=INK, markersize=7, linestyle="none")
    handles.append(Line2D([], [], **best, label="optimum,\n95 % interval"))
    fig.legend(handles=handles, loc="outside right upper", fontsize=8)
