"""Which plots a report has, for a routed model, a dense one, and a run that ended before its first evaluation."""

import numpy as np

from mod_jax.analysis.report import write_report
from mod_jax.analysis.routing_stats import RoutingStats
from mod_jax.models.blocks import RoutingRecord

SHAPE = (2, 3, 16)  # routed blocks, rows, positions
PNG = b"\x89PNG"


def make_record(rng):
    scores_LBT = rng.standard_normal(SHAPE, np.float32)
    selected_LBT = scores_LBT > np.sort(scores_LBT, axis=-1)[..., -5:-4]
    return RoutingRecord(scores_LBT, None, selected_LBT, scores_LBT, None, None, None)


def make_rows(record):
    train = {"train/loss": 3.0} | {f"routing/block{d:02d}/update_ratio": 0.5 for d in (1, 3)}
    stats = RoutingStats((1, 3))
    stats.update(record.router_logits_BT, record.selected_BT, record.selected_BT, np.ones(SHAPE[1:], bool))
    evaluated = (
        {"eval/topk_loss": 2.9, "eval/causal_loss/threshold": 3.1} | stats.metrics("topk") | stats.metrics("threshold")
    )
    return [{"step": 1} | train, {"step": 2} | train, {"step": 2} | evaluated]


def names(directory):
    starts = {path.name: path.read_bytes()[:4] for path in directory.iterdir()}
    stems = {path.stem for path in directory.iterdir()}
    assert starts == {f"{stem}.png": PNG for stem in stems} | {f"{stem}.pdf": b"%PDF" for stem in stems}
    return stems


def test_a_routed_model(tiny_config, tmp_path):
    record = make_record(np.random.default_rng(0))
    records = {"topk": record, "threshold": record}
    pieces = [*"def f(x):", "\n", "\t", "\x00", "é", "\ufffd", "  ", "$"]
    write_report(
        tmp_path / "a" / "report", make_rows(record), pieces, records, np.zeros(2), tiny_config(), "run, seed 0"
    )
    maps = {"routed_tokens_topk", "routed_tokens_threshold"}
    assert names(tmp_path / "a" / "report") == maps | {"loss", "scores", "block_health", "positions"}


def test_without_an_evaluation_there_is_no_plot_of_positions(tiny_config, tmp_path):
    record = make_record(np.random.default_rng(0))
    write_report(
        tmp_path, make_rows(record)[:2], list("a" * 16), {"topk": record}, np.zeros(2), tiny_config(), "run, seed 0"
    )
    assert names(tmp_path) == {"routed_tokens_topk", "loss", "scores", "block_health"}


def test_a_dense_model_has_one_plot(tiny_config, tmp_path):
    config = tiny_config(**{"model.layout": "F", "routing.predictor": False})
    rows = [{"step": 1, "train/loss": 3.0}, {"step": 1, "eval/topk_loss": 3.0}]
    write_report(tmp_path, rows, [], {}, np.zeros(0), config, "run, seed 0")
    write_report(tmp_path, rows, [], {}, np.zeros(0), config, "run, seed 0")  # again, over the old one
    assert names(tmp_path) == {"loss"}
