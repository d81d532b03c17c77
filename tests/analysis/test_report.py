"""Which plots a report has, for a routed model, a dense one, one with experts, and a run that ended before its first
evaluation."""

import numpy as np
import pytest

from mod_jax.analysis.expert_stats import ExpertPositions
from mod_jax.analysis.report import Seen, claims, write_report
from mod_jax.analysis.routing_stats import RoutingStats
from mod_jax.models.blocks import RoutingRecord
from mod_jax.models.moe import ExpertTokens

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


def make_seen(pieces="a", routing=None, experts=None):
    pieces = (list(pieces) * 16)[:16]
    texts = dict(enumerate(sorted(set(pieces))))
    ids = {text: token for token, text in texts.items()}
    tokens_BT = np.broadcast_to([ids[piece] for piece in pieces], SHAPE[1:])
    return Seen(tokens_BT, np.ones(SHAPE[1:], bool), texts, routing or {}, experts or {})


def test_a_routed_model(tiny_config, tmp_path):
    record = make_record(np.random.default_rng(0))
    seen = make_seen([*"def f(x):", "\n", "\t", "\x00", "é", "\ufffd", "  ", "$"], dict(topk=record, threshold=record))
    write_report(tmp_path / "a" / "report", make_rows(record), seen, np.zeros(2), tiny_config(), "run, seed 0")
    maps = {"routed_tokens_topk", "routed_tokens_threshold"}
    assert names(tmp_path / "a" / "report") == maps | {"loss", "scores", "block_health", "positions"}


def test_without_an_evaluation_there_is_no_plot_of_positions(tiny_config, tmp_path):
    record = make_record(np.random.default_rng(0))
    seen = make_seen(routing={"topk": record})
    write_report(tmp_path, make_rows(record)[:2], seen, np.zeros(2), tiny_config(), "run, seed 0")
    assert names(tmp_path) == {"routed_tokens_topk", "loss", "scores", "block_health"}


def test_a_dense_model_has_one_plot(tiny_config, tmp_path):
    config = tiny_config(**{"model.layout": "F", "routing.predictor": False})
    rows = [{"step": 1, "train/loss": 3.0}, {"step": 1, "eval/topk_loss": 3.0}]
    write_report(tmp_path, rows, make_seen(), np.zeros(0), config, "run, seed 0")
    write_report(tmp_path, rows, make_seen(), np.zeros(0), config, "run, seed 0")  # again, over the old one
    assert names(tmp_path) == {"loss"}


@pytest.mark.parametrize("num_experts", [4, 9])  # colours by name, and of a ramp
def test_a_model_with_experts(tiny_config, tmp_path, num_experts):
    config = tiny_config(
        **{"model.layout": "E", "model.depth": 2, "experts.count": num_experts, "experts.noop": 2, "experts.chosen": 2}
    )
    rng = np.random.default_rng(0)
    choice_LBTA = rng.integers(0, num_experts + 2, (*SHAPE, 2))
    of_tokens = ExpertTokens(choice_LBTA, (choice_LBTA < num_experts) & (rng.random(choice_LBTA.shape) < 0.8))
    seen = make_seen("def f(x):\n\t$", experts={"topk": of_tokens, "all": of_tokens})
    places = ExpertPositions((0, 1), num_experts)
    places.update(*of_tokens, seen.valid_BT)
    rows = [{"step": 1, "train/loss": 3.0}, {"step": 1, "eval/topk_loss": 3.0} | places.metrics()]
    write_report(tmp_path, rows, seen, np.zeros(0), config, "run, seed 0")
    others = {"expert_loads", "experts_of_tokens", "expert_positions"}
    assert names(tmp_path) == {"loss", "expert_tokens_topk", "expert_tokens_all"} | others


def test_claims_are_of_tokens_that_came_to_the_block(tiny_config):
    """A row of three tokens and padding; the routed block passes by the second."""
    choice_BTA = np.array([[[0], [2], [1], [-1]]])
    selected_BT = np.array([[1, 0, 1, 0]], bool)
    record = RoutingRecord(None, None, selected_BT[None], None, None, None, None)

    def seen(choice_LBTA):
        tokens_BT, valid_BT = np.array([[7, 8, 9, 0]]), np.array([[1, 1, 1, 0]], bool)
        of_tokens = ExpertTokens(np.array(choice_LBTA), np.array(choice_LBTA) >= 0)
        return Seen(tokens_BT, valid_BT, {}, {"topk": record}, {"topk": of_tokens})

    config = tiny_config(**{"model.layout": "Ee", "model.depth": 2, "experts.count": 2, "experts.noop": 1})
    both = seen([choice_BTA, choice_BTA])
    assert [x.tolist() for x in claims(both, 0, config)] == [[0, 2, 1], [7, 8, 9]]
    assert [x.tolist() for x in claims(both, 1, config)] == [[0, 1], [7, 9]]
    # Two experts that choose: both take the first token, nobody the second.
    choosing = tiny_config(**{"model.layout": "E", "model.depth": 1, "experts.count": 2, "experts.choice": "expert"})
    taken = seen([[[[0, 1], [-1, -1], [0, -1], [-1, -1]]]])
    assert [x.tolist() for x in claims(taken, 0, choosing)] == [[0, 1, 2, 0], [7, 7, 8, 9]]
