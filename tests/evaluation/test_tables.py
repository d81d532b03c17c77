"""One evaluation as a line, as tables, and as warnings: every number with the selection that produced it."""

import pytest

from mod_jax.evaluation import tables

EVAL = {
    "eval/topk_loss": 2.0,
    "eval/topk_bits_per_byte": 2.9,
    "eval/forward_flops_per_token/topk": 1.0e6,
    "eval/forward_flops_per_token/dense": 2.0e6,
    "routing/block01/base_rate_accuracy": 0.875,
    "routing/block01/topk_fraction": 0.125,
    "routing/block03/topk_fraction": 0.125,
    "routing/block01/update_ratio/topk": 0.5,
    "routing/block03/update_ratio/topk": 0.4,
    "eval/causal_loss/predictor": 2.5,
    "eval/causal_bits_per_byte/predictor": 3.6,
    "eval/gap/predictor": 0.5,
    "eval/realised_capacity/predictor": 0.131,
    "eval/forward_flops_per_token/predictor": 1.1e6,
    "routing/block01/accuracy/predictor": 0.97,
    "routing/block01/precision/predictor": 0.9,
    "routing/block01/recall/predictor": 0.8,
    "routing/block01/f1/predictor": 0.85,
    "routing/block01/realised_capacity/predictor": 0.13,
    "routing/block03/realised_capacity/predictor": 0.132,
}
DENSE = {name: value for name, value in EVAL.items() if "topk" in name and not name.startswith("routing")}


def test_the_log_line_names_the_selection_of_every_loss():
    assert tables.log_line(EVAL) == "held out: top-k loss 2.0000, predictor 2.5000 (gap +0.5000, routed 13.1%)"


def test_the_table_has_one_line_per_selection():
    header, topk, predictor = tables.loss_table(EVAL)
    assert " ".join(header.split()) == "held out under nats/token bits/byte minus top-k routed FLOPs/token of dense"
    assert topk.split() == ["top-k", "2.0000", "2.9000", "12.5%", "1e+06", "50.0%"]
    assert predictor.split() == ["predictor", "2.5000", "3.6000", "+0.5000", "13.1%", "1.1e+06", "55.0%"]
    assert header.index("routed") + len("routed") == predictor.index("13.1%") + len("13.1%")
    assert tables.loss_table(DENSE)[1].split() == ["no", "routing", "2.0000", "2.9000", "1e+06"]
    without_flops = {name: value for name, value in EVAL.items() if "flops" not in name}  # rows of older runs
    assert tables.loss_table(without_flops)[2].split() == ["predictor", "2.5000", "3.6000", "+0.5000", "13.1%"]


def test_calibration_by_block_and_selection():
    header, line = tables.calibration_table(EVAL)
    assert " ".join(header.split()) == "block selection base rate accuracy precision recall f1 realised"
    assert line.split() == ["block01", "predictor", "0.875", "0.970", "0.900", "0.800", "0.850", "0.130"]
    assert tables.calibration_table(DENSE) == []


@pytest.mark.parametrize("realised", [(0.0, 0.0), (0.0, 0.25), (0.2, 0.2), (float("nan"), 0.1)])
def test_a_capacity_far_from_the_target_is_said_with_its_blocks(realised):
    """(0, 0.25) has the right mean, and one block that nobody enters."""
    names = [f"routing/block0{depth}/realised_capacity/predictor" for depth in (1, 3)]
    (line,) = tables.warnings({**EVAL, **dict(zip(names, realised, strict=True))})
    assert line.startswith("WARNING predictor routes far from")
    assert f"block03 {realised[1]:.1%} of 12.5%" in line
    assert tables.warnings(EVAL) == []
    assert tables.warnings({**EVAL, names[0]: 0.0}, ("threshold",)) == []  # nobody asked


def test_dead_and_drowning_blocks_are_said():
    lines = tables.warnings(
        {**EVAL, "routing/block01/update_ratio/topk": 0.001, "routing/block03/update_ratio/topk": 34.0}
    )
    assert [line.split(" (")[0] for line in lines] == [
        "WARNING block01: update/residual norm 0.001",
        "WARNING block03: update/residual norm 34",
    ]
    assert "dead" in lines[0]
    assert tables.warnings({}) == []


EXPERTS = {
    f"experts/block02/{name}/{selection}": value
    for selection, dropped in (("topk", 0.05), ("all", 0.0))
    for name, value in dict(computed=0.95, dropped=dropped, load_entropy=0.9, smallest_load=0.02, dead=1).items()
}


def test_experts_by_block_and_selection():
    header, topk, causal = tables.expert_table(EVAL | EXPERTS)
    assert " ".join(header.split()) == "experts selection computed dropped entropy smallest load dead"
    assert topk.split() == ["block02", "training", "rule", "95.0%", "5.0%", "0.900", "0.02", "1"]
    assert causal.split() == ["block02", "all", "95.0%", "0.0%", "0.900", "0.02", "1"]
    assert len(header) == len(topk) == len(causal)
    assert tables.expert_table(EVAL) == []


def test_dead_experts_are_said():
    assert tables.warnings(EXPERTS) == [
        "WARNING block02: dead experts: 1 (less than 5% of an even load); their parameters are lost"
    ]
    assert tables.warnings(EXPERTS | {"experts/block02/dead/topk": 0}) == []
