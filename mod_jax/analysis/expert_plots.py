"""Figures of blocks with experts: who is chosen how often, which tokens go where, and who finds no slot.

An expert keeps its colour in every figure; no-ops are grey. Vocabulary: L blocks with experts, E experts, N choices
(experts, then no-ops), A claims per token.
"""

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from mod_jax.analysis.expert_stats import Explained
from mod_jax.analysis.plots import MARKERS, PALETTE, add_title, block_colours, selection_name, styled
from mod_jax.analysis.routing_stats import NUM_DECILES
from mod_jax.analysis.text_map import FAINT, INK, MUTED, TextMap, visible

NO_OP = "#9a9a9a"


def expert_colours(num_experts: int) -> list:
    """Named colours for a few experts, a ramp for many."""
    if num_experts <= len(PALETTE):
        return list(PALETTE[:num_experts])
    return [matplotlib.colormaps["turbo"](x) for x in np.linspace(0.05, 0.95, num_experts)]


def choice_names(num_experts: int, num_choices: int) -> list[str]:
    """Experts by number, then no-ops."""
    return [str(n) for n in range(num_experts)] + [f"no-op {n}" for n in range(num_choices - num_experts)]


@styled
def expert_token_map(
    pieces: Sequence[str], choice_LTA, has_slot_LTA, depths: Sequence[int], num_experts: int, selection: str = "topk"
) -> Figure:
    """A text, and under each token one cell per block with experts, in the colours of the experts that computed on it.

    A token that several experts took has as many parts; a dropped one has an empty box; a grey line is a no-op, or a
    block that the token bypassed, or a token that no expert took.
    """
    choice_LTA, has_slot_LTA = np.asarray(choice_LTA), np.asarray(has_slot_LTA, bool)
    colours = expert_colours(num_experts)
    text = TextMap(pieces, len(depths), "Which expert computes on each token")
    about = f"{_rule(selection)}, {len(pieces)} tokens. Colour: expert, empty box: dropped, line: no expert"
    text.write(about, ~has_slot_LTA.any(axis=(0, 2)))
    for t in range(len(pieces)):
        for block, (choice_A, has_slot_A) in enumerate(zip(choice_LTA[:, t], has_slot_LTA[:, t], strict=True)):
            wanted = (choice_A >= 0) & (choice_A < num_experts)
            if not wanted.any():
                text.add_cell(t, block, FAINT, is_box=False)
            for part, (choice, has_slot) in enumerate(zip(choice_A[wanted], has_slot_A[wanted], strict=True)):
                fill, edge = (colours[choice], "none") if has_slot else ("white", colours[choice])
                text.add_cell(t, block, fill, is_box=True, edge=edge, part=(part, int(wanted.sum())))
    computed_L = has_slot_LTA.any(axis=-1).mean(axis=-1)
    text.finish([f"block {depth}" for depth in depths], [f"{share:.1%}" for share in computed_L])
    if num_experts <= len(PALETTE):
        legend = text.header_axes(0.32 * num_experts)
        legend.set(xlim=(0, num_experts), ylim=(0, 1))
        legend.axis("off")
        for n, colour in enumerate(colours):
            legend.add_patch(matplotlib.patches.Rectangle((n + 0.05, 0), 0.4, 1, facecolor=colour))
            legend.text(n + 0.55, 0.5, str(n), va="center", fontsize=7.5, color=MUTED)
    return text.fig


@styled
def expert_loads(load_LN, depths: Sequence[int], num_experts: int, selection: str = "topk") -> Figure:
    """The share of the claims of each block that every choice takes; a dashed line is an even share."""
    load_LN = np.asarray(load_LN, np.float64)
    share_LN = 100 * load_LN / np.maximum(load_LN.sum(axis=1, keepdims=True), 1e-30)
    num_choices = share_LN.shape[1]
    columns = min(len(depths), 4)
    lines = -(-len(depths) // columns)
    fig = Figure(figsize=(max(3.0, 1.6 + 0.22 * num_choices) * columns, 2.1 * lines + 0.5))
    axes = fig.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    for ax in axes[len(depths) :]:
        ax.remove()
    colours = [*expert_colours(num_experts), *[NO_OP] * (num_choices - num_experts)]
    names = choice_names(num_experts, num_choices)
    shown = np.arange(0, num_choices, max(1, num_choices // 16))
    for ax, share_N, depth in zip(axes[: len(depths)], share_LN, depths, strict=True):
        ax.bar(range(num_choices), share_N, color=colours, width=0.8)
        ax.axhline(100 / num_choices, color=INK, linewidth=1, linestyle=(0, (4, 2)))
        ax.set_title(f"block {depth}")
        ax.set_xticks(shown, [names[n] for n in shown], rotation=45 if num_choices > num_experts else 0, fontsize=7.5)
        ax.grid(False, axis="x")
    for ax in axes[::columns][:lines]:
        ax.set_ylabel("share of claims, %")
    add_title(fig, f"What is chosen, {_rule(selection)}")
    return fig


@styled
def experts_by_position(computed_LP, dropped_LP, depths: Sequence[int]) -> Figure:
    """Per tenth of the row: tokens that an expert computed on, and claims of experts that found no slot."""
    fig = Figure(figsize=(8.5, 3.6))
    middle = np.arange(NUM_DECILES) * 10 + 5
    panels = ((computed_LP, "tokens computed on, %"), (dropped_LP, "claims of experts dropped, %"))
    for ax, (share_LP, label) in zip(fig.subplots(1, 2), panels, strict=True):
        for i, (share_P, colour) in enumerate(zip(np.asarray(share_LP), block_colours(depths), strict=True)):
            marker = MARKERS[i % len(MARKERS)]
            ax.plot(middle, 100 * share_P, color=colour, marker=marker, label=f"block {depths[i]}")
        ax.set(xlabel="place in the row, %", ylabel=label, xlim=(0, 100), ylim=(-2, 102))
    fig.axes[0].legend(loc="best", ncols=1 + len(depths) // 8)
    add_title(fig, f"Where in the row experts compute, {_rule('topk')}")
    return fig


@styled
def experts_of_tokens(
    tables: Sequence[tuple[Sequence[str], np.ndarray]],
    explained: Sequence[Explained],
    depths: Sequence[int],
    names: Sequence[str],
    selection: str = "topk",
) -> Figure:
    """Per block, frequent tokens against choices: of the claims of each token, the share that each choice takes.

    Args:
      tables: per block, the text of each token and its shares [tokens, N].
      explained: per block, how much of the choice the token alone explains.
      names: of the N choices.
    """
    most = max(len(pieces) for pieces, _ in tables)
    width = max(2.6, 1.3 + 0.2 * len(names))
    fig = Figure(figsize=(width * len(tables) + 0.8, 0.17 * most + 1.5))
    axes = fig.subplots(1, len(tables), squeeze=False)[0]
    for ax, (pieces, share), (by_token, shuffled), depth in zip(axes, tables, explained, depths, strict=True):
        image = ax.imshow(share, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        ax.set_yticks(range(len(pieces)), [visible(piece)[:12] for piece in pieces], fontsize=7.5)
        ax.tick_params(axis="y", length=0)
        for label in ax.get_yticklabels():
            label.set(family="DejaVu Sans Mono", parse_math=False)
        shown = np.arange(0, len(names), max(1, len(names) // 16))
        ax.set_xticks(shown, [names[n] for n in shown], rotation=45, fontsize=7.5)
        ax.grid(False)
        ax.set_title(f"block {depth}\nexplained by token {by_token:.0%} (shuffled {shuffled:.0%})", fontsize=8)
    bar = fig.colorbar(image, ax=axes, shrink=0.5, pad=0.02)
    bar.set_label("share of the token's claims", fontsize=8)
    bar.outline.set_visible(False)
    add_title(fig, f"Which tokens go to which expert, {_rule(selection)}")
    return fig


def _rule(selection: str) -> str:
    return "training rule" if selection == "topk" else f"causal: {selection_name(selection)}"
