"""The report of a run: a folder of plots, drawn from its metric rows and the routing of one held-out batch."""

from typing import Any

import numpy as np

from mod_jax.analysis.routing_stats import NUM_DECILES, block_name
from mod_jax.config import Config
from mod_jax.models.blocks import RoutingRecord
from mod_jax.paths import Folder


def write_report(
    directory: Folder,
    rows: list[dict[str, Any]],
    pieces: list[str],
    records: dict[str, RoutingRecord],
    cutoffs_L: np.ndarray,
    config: Config,
    caption: str,
) -> None:
    """Writes the plots `loss` and, where blocks are routed, `routed_tokens_<selection>`, `scores` and two more.

    Each as png and as pdf.

    Args:
      rows: of metrics.jsonl.
      pieces: text of each token of the batch's first row.
      records: by selection, "topk" among them; arrays [L, B, T].
      caption: the small print of every plot.
    """
    from mod_jax.analysis import plots  # matplotlib, in the one process that draws, once it draws

    def save(figure, name: str) -> None:
        plots.add_caption(figure, caption)
        for ending in ("png", "pdf"):
            plots.save(figure, directory / f"{name}.{ending}")

    save(plots.loss_curves(rows), "loss")
    if not records:
        return
    depths = config.routed_depths
    weights = [record.gate_BT[:, 0][record.selected_BT[:, 0]] for record in records.values()]
    same_colours = plots.range_of_weights(np.concatenate(weights))
    for selection, record in records.items():
        selected_LT, gate_LT = record.selected_BT[:, 0], record.gate_BT[:, 0]
        figure = plots.routed_token_map(
            pieces, selected_LT, depths, gate_LT, selection=selection, weight_range=same_colours
        )
        save(figure, f"routed_tokens_{selection}")

    topk = records["topk"]
    scores = [block.ravel() for block in topk.router_logits_BT]
    selected = [block.ravel() for block in topk.selected_BT]
    save(plots.score_histograms(scores, cutoffs_L, depths, selected), "scores")
    save(plots.block_health(rows), "block_health")
    evals = [row for row in rows if f"routing/{block_name(depths[0])}/position_share/0" in row]
    if evals:
        share_L10 = [
            [evals[-1][f"routing/{block_name(depth)}/position_share/{i}"] for i in range(NUM_DECILES)]
            for depth in depths
        ]
        save(plots.routing_by_position(share_L10, depths), "positions")
