"""Figures from plain arrays and from the rows of metrics.jsonl. Each function returns a Figure; `save` writes it.

Vocabulary. A *row* is one line of metrics.jsonl as a dict. A block is named by its depth in the stack and keeps its
colour from figure to figure. Figures are built without pyplot: nothing here depends on a display or on global state.
"""

import functools
import io
import os
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib import cm, colors
from matplotlib.figure import Figure

from mod_jax.analysis.routing_stats import HEALTHY_UPDATE_RATIO, NUM_DECILES
from mod_jax.analysis.text_map import FAINT, INK, MUTED, TITLE, TextMap
from mod_jax.paths import as_folder, make_folder

# Okabe and Ito's colours, which colour-blind readers tell apart.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("o", "s", "^", "D")
# A selection has one colour and one marker in every figure; in grey the markers tell them apart.
SELECTIONS = {
    "topk": dict(color=PALETTE[0], marker="o"),
    "router": dict(color=PALETTE[4], marker="s"),
    "predictor": dict(color=PALETTE[1], marker="D"),
    "threshold": dict(color=PALETTE[2], marker="^"),
    "all": dict(color=PALETTE[3], marker="v"),
}
_STYLE = {
    "figure.dpi": 120,
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": "#aaaaaa",
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.use_mathtext": True,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eeeeee",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
}
styled = matplotlib.rc_context(_STYLE)  # decorates each function that draws


def add_caption(fig: Figure, text: str) -> None:
    """Small print below the figure: which run, step, data and commit it is of."""
    style = dict(ha="left", va="bottom", fontsize=6, color=MUTED)
    if fig.get_layout_engine() is None:
        width, height = fig.get_size_inches()
        fig.text(0.1 / width, 0.05 / height, text, **style)
    else:
        fig.supxlabel(text, x=0.01, **style)  # constrained layout makes room for it


def save(fig: Figure, path: str | os.PathLike) -> None:
    """Writes the figure in the format of the path's ending (png, svg, pdf)."""
    path = as_folder(path)
    make_folder(path.parent)
    image = io.BytesIO()
    fig.savefig(image, format=path.suffix[1:], dpi=150, facecolor="white")
    path.write_bytes(image.getvalue())


@styled
def loss_curves(rows: Sequence[dict[str, Any]], title: str = "Loss") -> Figure:
    """Training loss, held-out loss under top-k and under each causal selection, and the gap between the last two."""
    steps, loss = _series(rows, "train/loss")
    topk_steps, topk = _series(rows, "eval/topk_loss")
    selections = sorted({m[1] for row in rows for key in row if (m := re.fullmatch(r"eval/causal_loss/(.+)", key))})
    mode = "top-k" if selections or any(key.startswith("routing/") for row in rows for key in row) else "no routing"

    fig = Figure(figsize=(7.5, 5.6 if selections else 4.2))
    ratios = [3, 1] if selections else [1]
    top, *below = fig.subplots(len(ratios), sharex=True, height_ratios=ratios, squeeze=False).ravel()
    smoothed, is_short = smooth(loss), len(loss) < 100
    if is_short:  # too few values to smooth
        top.plot(steps, loss, color=INK, label=f"training, {mode}")
    else:
        top.plot(steps, loss, color="#bdbdbd", linewidth=0.8, label=f"training, {mode}")
        top.plot(steps, smoothed, color=INK, label=f"training, {mode}, smoothed")
    top.plot(topk_steps, topk, label=f"held out, {mode}", linewidth=1, **SELECTIONS["topk"])
    for selection in selections:
        style = SELECTIONS[selection] | dict(markerfacecolor="white", linewidth=1)
        causal_steps, causal = _series(rows, f"eval/causal_loss/{selection}")
        top.plot(causal_steps, causal, label=f"held out, causal: {selection}", **style | dict(linestyle="none"))
        both, at_causal, at_topk = np.intersect1d(causal_steps, topk_steps, return_indices=True)
        below[0].plot(both, causal[at_causal] - topk[at_topk], **style)
    if len(loss):  # the first moments of a run would flatten all that follows
        settled = smoothed[steps >= steps[-1] * (1 / 5 if is_short else 1 / 30)]
        shown = np.concatenate([settled, topk])
        low, high = min(shown.min(), np.quantile(loss, 0.01)), shown.max()
        pad = 0.05 * (high - low) or 0.05
        top.set_ylim(low - pad, high + pad)
    top.set(ylabel="loss, nats per token")
    top.legend(loc="upper right")
    for ax in below:
        ax.axhline(0, color=PALETTE[0], linewidth=1)
        ax.set(ylabel="gap to top-k")
        ax.margins(y=0.25)
    fig.axes[-1].set_xlabel("step")
    _add_cost_axis(top, rows)
    add_title(fig, title)
    return fig


@styled
def loss_against_flops(
    dense: tuple[float, float],
    series: dict[str, Sequence[tuple[float, float, str]]],
    title: str = "A pretrained model that computes less, without training",
) -> Figure:
    """Held-out loss against forward FLOPs, one line for each way to spend fewer, all from the dense model on.

    Args:
      dense: (share of the dense model's FLOPs, which is 1; its loss).
      series: for each way its points, (share of the FLOPs, loss, what stands beside the point).
    """
    fig = Figure(figsize=(7.5, 4.2))
    ax = fig.subplots()
    for (name, points), color, marker in zip(series.items(), PALETTE, MARKERS, strict=False):
        ordered = sorted(points, reverse=True)
        shares, losses = [dense[0], *(p[0] for p in ordered)], [dense[1], *(p[1] for p in ordered)]
        ax.plot([100 * share for share in shares], losses, color=color, marker=marker, label=name)
        below = color != PALETTE[0]
        for share, loss, text in ordered:
            place = dict(xytext=(-4, -11) if below else (4, 4), textcoords="offset points", fontsize=7, color=color)
            ax.annotate(text, (100 * share, loss), **place)
    ax.plot(100 * dense[0], dense[1], color=INK, marker="*", markersize=9, linestyle="none", label="dense")
    ax.set(xlabel="forward FLOPs per token, % of the dense model's", ylabel="held-out loss, nats per token")
    ax.invert_xaxis()
    ax.legend(loc="upper left")
    add_title(fig, title)
    return fig


@styled
def routed_token_map(
    pieces: Sequence[str],
    selected_LT,
    depths: Sequence[int],
    weights_LT=None,
    capacity: float | None = None,
    columns: int | None = None,
    selection: str = "topk",
    weight_range: tuple[float, float] | None = None,
) -> Figure:
    """A text, and under each token one cell per routed block: a box where it computes, a line where it is bypassed.

    A token is as wide as its piece, so that the text reads as text; it is grey where every routed block is bypassed. A
    box has the colour of its block, or of the gate's weight if `weights_LT` is given. `columns`: characters per line;
    default 64 for single characters, 96 for longer pieces. `weight_range`: of the colours, for maps that are to be
    compared; default that of the weights shown.
    """
    selected_LT = np.asarray(selected_LT, bool)
    about = f"{selection_name(selection)} selection, {len(pieces)} tokens"
    about += f", capacity {capacity:.1%}" if capacity else ""
    text = TextMap(pieces, len(depths), "Where each routed block computes", columns)
    text.write(f"{about}. Box: selected, line: bypassed", ~selected_LT.any(axis=0))
    palette = block_colours(depths)
    if weights_LT is not None:
        weights_LT = np.asarray(weights_LT, np.float64)
        norm, cmap = _weight_scale(*(weight_range or range_of_weights(weights_LT[selected_LT])))
    for t in range(len(pieces)):
        for block, selected in enumerate(selected_LT[:, t]):
            by_weight = selected and weights_LT is not None
            fill = cmap(norm(weights_LT[block, t])) if by_weight else palette[block] if selected else FAINT
            text.add_cell(t, block, fill, is_box=selected)
    text.finish([f"block {depth}" for depth in depths], [f"{block.mean():.1%}" for block in selected_LT])
    if weights_LT is not None:
        bar = text.header_axes(1.5)
        text.fig.colorbar(cm.ScalarMappable(norm, cmap), cax=bar, orientation="horizontal").outline.set_visible(False)
        bar.tick_params(labelsize=7.5, length=2)
        bar.set_ylabel("gate weight ", rotation=0, ha="right", va="center", fontsize=8, color=MUTED)
    return text.fig


@styled
def score_histograms(scores_per_block, cutoffs, depths: Sequence[int], selected, selection: str = "topk") -> Figure:
    """Per block, router scores of selected tokens on top of those of bypassed ones, and the cut-off as a line."""
    columns = min(len(depths), 2 if len(depths) <= 4 else 3)
    lines = -(-len(depths) // columns)
    fig = Figure(figsize=(3.8 * columns, 2.4 * lines + 0.3))
    axes = fig.subplots(lines, columns, squeeze=False).ravel()
    for ax in axes[len(depths) :]:
        ax.remove()
    for ax, scores, cutoff, depth, mask, colour in zip(
        axes[: len(depths)], scores_per_block, cutoffs, depths, selected, block_colours(depths), strict=True
    ):
        finite = np.isfinite(scores)
        scores, mask = np.asarray(scores, np.float64)[finite], np.asarray(mask, bool)[finite]
        low, high = np.quantile(scores, (0.001, 0.999))
        bins = np.linspace(low, high if high > low else low + 1, 41)
        inside = np.clip(scores, bins[0], bins[-1])
        kinds = dict(color=["#c9c9c9", colour], label=["bypassed", "selected"])
        ax.hist([inside[~mask], inside[mask]], bins, stacked=True, **kinds)
        ax.axvline(cutoff, color=INK, linewidth=1.2, linestyle=(0, (4, 2)), label=f"cut-off {cutoff:.3g}")
        ax.set_title(f"block {depth}   {mask.mean():.1%} selected")
        ax.set(xlabel="router score", ylabel="tokens")
        ax.grid(False, axis="x")
        ax.legend(fontsize=8, handlelength=1.4)
    add_title(fig, f"Router scores under {selection_name(selection)} selection")
    return fig


@styled
def routing_by_position(share_L10, depths: Sequence[int], selection: str = "topk") -> Figure:
    """Share of each block's selected tokens that lies in each tenth of the row; flat when positions do not matter."""
    share_L10 = np.asarray(share_L10)
    fig = Figure(figsize=(6.5, 3.6))
    ax = fig.subplots()
    ax.axhline(100 / NUM_DECILES, color=MUTED, linewidth=1, linestyle=(0, (4, 2)), label="no preference")
    middle = np.arange(NUM_DECILES) * 10 + 5
    for i, (share_10, colour) in enumerate(zip(share_L10, block_colours(depths), strict=True)):
        ax.plot(middle, 100 * share_10, color=colour, marker=MARKERS[i % len(MARKERS)], label=f"block {depths[i]}")
    ax.set(
        xlabel="position in the row, %", ylabel="share of selected tokens, %", xlim=(0, 100), xticks=range(0, 101, 10)
    )
    ax.set_ylim(0, max(20.0, 110 * np.nanmax(share_L10)))
    add_title(fig, f"Selected tokens by position under {selection_name(selection)} selection")
    _legend_at_right(ax)
    return fig


@styled
def block_health(rows: Sequence[dict[str, Any]]) -> Figure:
    """Norm of each routed block's update over that of the residual, per step; the healthy band is shaded."""
    depths = sorted(
        {int(m[1]) for row in rows for k in row if (m := re.fullmatch(r"routing/block(\d+)/update_ratio", k))}
    )
    fig = Figure(figsize=(6.5, 3.6))
    ax = fig.subplots()
    ax.axhspan(*HEALTHY_UPDATE_RATIO, color="#eef3ee", zorder=0)
    for depth, colour in zip(depths, block_colours(depths), strict=True):
        steps, ratio = _series(rows, f"routing/block{depth:02d}/update_ratio")
        ax.plot(steps, ratio, color=colour, label=f"block {depth}")
    ax.set(yscale="log", xlabel="step", ylabel="update norm / residual norm")
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, HEALTHY_UPDATE_RATIO[0] / 3), max(high, HEALTHY_UPDATE_RATIO[1] * 3))
    low, high = HEALTHY_UPDATE_RATIO
    add_title(fig, f"Size of each routed block's update (shaded: healthy, {low:g} to {high:g})")
    _legend_at_right(ax)
    return fig


def block_colours(depths: Sequence[int]) -> list[Any]:
    """One colour per routed block: named colours for a few blocks, a ramp over depth for many."""
    if len(depths) <= len(PALETTE):
        return list(PALETTE[: len(depths)])
    return [matplotlib.colormaps["viridis"](x) for x in np.linspace(0, 0.9, len(depths))]


def _series(rows: Sequence[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the rows that hold a finite `key`."""
    found = [(row["step"], row[key]) for row in rows if np.isfinite(row.get(key, np.nan))]
    return tuple(np.array(found, np.float64).reshape(-1, 2).T)


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred average over about a fiftieth of the run, narrow at its start: no lag where the loss falls fast."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    i = np.arange(len(values))
    first = i - np.minimum(i, len(values) // 100)
    last = np.minimum(2 * i - first, len(values) - 1)
    return (total[last + 1] - total[first]) / (last - first + 1)


def _add_cost_axis(ax, rows: Sequence[dict[str, Any]]) -> None:
    """A second x axis on top: training FLOPs, or tokens where FLOPs are not in the rows."""
    for key, label in (("train/flops", "training FLOPs"), ("train/tokens", "training tokens")):
        steps, cost = _series(rows, key)
        if len(steps) and steps[-1] > 0 and cost[-1] > 0:
            per_step = cost[-1] / steps[-1]
            functions = (functools.partial(np.multiply, per_step), functools.partial(np.multiply, 1 / per_step))
            ax.secondary_xaxis("top", functions=functions).set_xlabel(label)
            return


def add_title(fig: Figure, text: str) -> None:
    """The figure's title, above it on the left."""
    fig.suptitle(text, x=0.01, ha="left", **TITLE)


def _legend_at_right(ax) -> None:
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def range_of_weights(weights: np.ndarray) -> tuple[float, float]:
    """The range that colours should cover: all but the outermost hundredths."""
    low, high = np.quantile(weights, (0.01, 0.99)) if len(weights) else (0.0, 1.0)
    return float(low), float(high)


def _weight_scale(low: float, high: float):
    """Colours of gate weights: light to dark from zero up; two-sided about a grey zero where negative ones matter."""
    if -low > high / 10:  # a few that are hardly negative would take half of the colours
        ramp = ["#8c2d04", "#ec8f3e", "#c8c8c8", "#5ba3d0", "#08306b"]
        return colors.CenteredNorm(0, max(-low, high)), colors.LinearSegmentedColormap.from_list("weight", ramp)
    ramp = ["#a6cee3", "#2878b5", "#08204a"]
    return colors.Normalize(0, high or 1.0), colors.LinearSegmentedColormap.from_list("weight", ramp)


def selection_name(selection: str) -> str:
    return selection.replace("topk", "top-k")
