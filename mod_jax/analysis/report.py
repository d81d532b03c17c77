"""The report of a run: a folder of plots, drawn from its metric rows and what was done with one held-out batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mod_jax.analysis import expert_stats
from mod_jax.analysis.routing_stats import NUM_DECILES, block_name
from mod_jax.config import Config
from mod_jax.models.blocks import RoutingRecord
from mod_jax.models.moe import ExpertTokens
from mod_jax.paths import Folder

FREQUENT = 32  # tokens shown beside the experts that they go to
MOST_BLOCKS = 4  # likewise


class Seen(NamedTuple):
    """A batch of tokens, which of them are real, the text of each id, and what was done with them by selection, "topk"
    among them: by routed blocks, arrays [L, B, T]; by blocks with experts, [L, B, T, A]. All NumPy."""

    tokens_BT: np.ndarray
    valid_BT: np.ndarray
    texts: dict[int, str]
    routing: dict[str, RoutingRecord]
    experts: dict[str, ExpertTokens]

    @property
    def pieces(self) -> list[str]:
        """The text of each token of the first row."""
        return [self.texts[int(token)] for token in self.tokens_BT[0]]


def write_report(
    directory: Folder, rows: list[dict[str, Any]], seen: Seen, cutoffs_L: np.ndarray, config: Config, caption: str
) -> None:
    """Writes the plots `loss` and, where blocks are routed, `routed_tokens_<selection>`, `scores` and two more; where
    blocks have experts, `expert_tokens_<selection>`, `experts_of_tokens` and two more.

    Each as png and as pdf.

    Args:
      rows: of metrics.jsonl.
      caption: the small print of every plot.
    """
    from mod_jax.analysis import plots  # matplotlib, in the one process that draws, once it draws

    def save(figure, name: str) -> None:
        plots.add_caption(figure, caption)
        for ending in ("png", "pdf"):
            plots.save(figure, directory / f"{name}.{ending}")

    directory.mkdir(parents=True, exist_ok=True)
    save(plots.loss_curves(rows), "loss")
    if seen.routing:
        _draw_routing(save, rows, seen, cutoffs_L, config)
    if seen.experts:
        _draw_experts(save, rows, seen, config)


def _draw_routing(save: Callable, rows: list[dict[str, Any]], seen: Seen, cutoffs_L: np.ndarray, config: Config):
    from mod_jax.analysis import plots

    depths = config.routed_depths
    weights = [record.gate_BT[:, 0][record.selected_BT[:, 0]] for record in seen.routing.values()]
    same_colours = plots.range_of_weights(np.concatenate(weights))
    for selection, record in seen.routing.items():
        selected_LT, gate_LT = record.selected_BT[:, 0], record.gate_BT[:, 0]
        figure = plots.routed_token_map(
            seen.pieces, selected_LT, depths, gate_LT, selection=selection, weight_range=same_colours
        )
        save(figure, f"routed_tokens_{selection}")

    topk = seen.routing["topk"]
    scores = [block.ravel() for block in topk.router_logits_BT]
    selected = [block.ravel() for block in topk.selected_BT]
    save(plots.score_histograms(scores, cutoffs_L, depths, selected), "scores")
    save(plots.block_health(rows), "block_health")
    share_L10 = _by_position(rows, "routing", "position_share", depths)
    if share_L10 is not None:
        save(plots.routing_by_position(share_L10, depths), "positions")


def _draw_experts(save: Callable, rows: list[dict[str, Any]], seen: Seen, config: Config):
    from mod_jax.analysis import expert_plots

    depths, num_experts = config.expert_depths, config.experts.count
    num_choices = num_experts + config.experts.noop
    for selection, (choice_LBTA, has_slot_LBTA) in seen.experts.items():
        figure = expert_plots.expert_token_map(
            seen.pieces, choice_LBTA[:, 0], has_slot_LBTA[:, 0], depths, num_experts, selection
        )
        save(figure, f"expert_tokens_{selection}")

    choice_LBTA, _ = seen.experts["topk"]
    load_LN = [np.bincount(block[block >= 0], minlength=num_choices) for block in choice_LBTA]
    save(expert_plots.expert_loads(load_LN, depths, num_experts), "expert_loads")

    places = np.unique(np.linspace(0, len(depths) - 1, min(len(depths), MOST_BLOCKS)).round().astype(int))
    names = expert_plots.choice_names(num_experts, num_choices)
    names += ["none"] if config.experts_choose else []
    tables, explained = [], []
    for place in places:
        choice_M, token_M = claims(seen, place, config)
        explained.append(expert_stats.explained_by_token(choice_M, token_M))
        ids, share = expert_stats.choices_of_tokens(choice_M, token_M, len(names), FREQUENT)
        tables.append(([seen.texts[int(i)] for i in ids], share))
    chosen_depths = [depths[place] for place in places]
    save(expert_plots.experts_of_tokens(tables, explained, chosen_depths, names), "experts_of_tokens")

    shares = [_by_position(rows, "experts", f"{name}_by_position", depths) for name in ("computed", "dropped")]
    if all(share is not None for share in shares):
        save(expert_plots.experts_by_position(*shares, depths), "expert_positions")


def claims(seen: Seen, place: int, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """(the choice, the token) of each claim in one block with experts under the training rule, of tokens that came to
    the block. Where experts choose, a token that none of them took has one claim, of a choice N of its own."""
    depth, num_choices = config.expert_depths[place], config.experts.count + config.experts.noop
    there_BT = seen.valid_BT
    if config.blocks[depth].routed:
        there_BT = there_BT & seen.routing["topk"].selected_BT[config.routed_depths.index(depth)]
    choice_MA, token_M = seen.experts["topk"].choice_BTA[place][there_BT], seen.tokens_BT[there_BT]
    if config.experts_choose:
        nobody_M1 = np.where((choice_MA < 0).all(axis=1), num_choices, -1)[:, None]
        choice_MA = np.concatenate([choice_MA, nobody_M1], axis=1)
    row, column = np.nonzero(choice_MA >= 0)
    return choice_MA[row, column], token_M[row]


def _by_position(rows: list[dict[str, Any]], group: str, name: str, depths: tuple[int, ...]) -> np.ndarray | None:
    """[L, 10] of the last evaluation; None if there was none."""
    keys = [[f"{group}/{block_name(depth)}/{name}/{i}" for i in range(NUM_DECILES)] for depth in depths]
    found = [row for row in rows if keys[0][0] in row]
    return np.array([[found[-1].get(key, np.nan) for key in block] for block in keys]) if found else None
