"""The report of a run: a folder of plots, drawn from its metric rows and the routing of one held-out batch."""

import pathlib
from typing import Any

import numpy as np

from mod_jax.analysis import plots
from mod_jax.analysis.routing_stats import NUM_DECILES, block_name
from mod_jax.config import Config
from mod_jax.models.blocks import RoutingRecord


def write_report(
    directory: pathlib.Path,
    rows: list[dict[str, Any]],
    pieces: list[str],
    records: dict[str, RoutingRecord],
    cutoffs_L: np.ndarray,
    config: Config,
) -> None:
    """Writes loss.png and, for a model with routed blocks, routed_tokens_<selection>.png, scores.png and two more.

    Args:
      rows: of metrics.jsonl.
      pieces: text of each token of the batch's first row.
      records: by selection, "topk" among them; arrays [L, B, T].
    """
    directory.mkdir(parents=True, exist_ok=True)
    plots.save(plots.loss_curves(rows), directory / "loss.png")
    if not records:
        return
    depths = config.routed_depths
    for selection, record in records.items():
        figure = plots.routed_token_map(
            pieces, record.selected_BT[:, 0], depths, record.gate_BT[:, 0], selection=selection
        )
        plots.save(figure, directory / f"routed_tokens_{selection}.png")

    topk = records["topk"]
    scores = [block.ravel() for block in topk.router_logits_BT]
    selected = [block.ravel() for block in topk.selected_BT]
    plots.save(plots.score_histograms(scores, cutoffs_L, depths, selected), directory / "scores.png")
    plots.save(plots.block_health(rows), directory / "block_health.png")
    evals = [row for row in rows if f"routing/{block_name(depths[0])}/position_share/0" in row]
    if evals:
        share_L10 = [
            [evals[-1][f"routing/{block_name(depth)}/position_share/{i}"] for i in range(NUM_DECILES)]
            for depth in depths
        ]
        plots.save(plots.routing_by_position(share_L10, depths), directory / "positions.png")
