"""Each alarm fires on a built case, and none on a healthy one."""

import numpy as np
import pytest

from mod_jax.analysis.alarms import alarm_metrics, find_alarms, is_early
from mod_jax.analysis.routing_stats import RoutingStats

HEALTHY = {
    "routing/block01/update_ratio": 0.3,
    "routing/block01/topk_fraction": 0.25,
    "routing/block01/position_r2": 0.02,
    "routing/block01/realised_capacity/predictor": 0.27,
    "routing/block01/recall_lift/predictor": 0.8,
}


@pytest.fixture
def config(tiny_config):
    return tiny_config(**{"model.depth": 2})


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("update_ratio", 0.001, "low update"),
        ("update_ratio", 34.0, "high update"),
        ("position_r2", 0.9, "position"),
        ("realised_capacity/predictor", 0.0, "capacity of predictor"),
        ("realised_capacity/predictor", 0.6, "capacity of predictor"),
        ("recall_lift/predictor", 0.0, "recall of predictor"),
        ("recall_lift/predictor", -0.2, "recall of predictor"),
    ],
)
def test_each_alarm_fires_alone(config, name, value, kind):
    assert find_alarms(HEALTHY, config) == []
    (alarm,) = alarms = find_alarms(HEALTHY | {f"routing/block01/{name}": value}, config)
    assert (alarm.kind, alarm.depth) == (kind, 1)
    assert alarm.text.startswith("block01: ")
    assert "; try " in alarm.text
    assert alarm_metrics(alarms, config) == {"routing/block01/alarms": 1}


def test_what_is_not_measured_raises_no_alarm(config):
    assert find_alarms({}, config) == []
    assert find_alarms(dict.fromkeys(HEALTHY, float("nan")), config) == []


def test_a_router_of_positions_is_meant_to_follow_them(tiny_config):
    config = tiny_config(**{"model.depth": 2, "routing.score": "position"})
    assert find_alarms(HEALTHY | {"routing/block01/position_r2": 1.0}, config) == []


def test_an_alarm_waits_for_fifty_steps_and_a_quarter_of_the_run():
    assert [is_early(step, 60) for step in (49, 50)] == [True, False]
    assert [is_early(step, 1000) for step in (249, 250)] == [True, False]
    assert is_early(20, 20)


def metrics_of(topk_LBT, decided_LBT):
    stats = RoutingStats([1])
    stats.update(np.zeros(topk_LBT.shape), decided_LBT, topk_LBT, np.ones(topk_LBT.shape[1:], bool))
    return stats.metrics("topk") | stats.metrics("predictor")


def test_the_cases_that_the_alarms_are_for(config):
    """64 rows of 16 tokens, a quarter selected: by content; by place; and by a predictor that guesses, or sleeps."""
    rng = np.random.default_rng(0)
    by_content_LBT = rng.random((1, 64, 16)).argsort(axis=-1) < 4
    by_place_LBT = np.broadcast_to(np.arange(16) % 4 == 1, (1, 64, 16))
    guessed_LBT = rng.random((1, 64, 16)) < 0.25

    def kinds(topk_LBT, decided_LBT):
        return [alarm.kind for alarm in find_alarms(metrics_of(topk_LBT, decided_LBT), config)]

    assert kinds(by_content_LBT, by_content_LBT) == []
    assert kinds(by_place_LBT, by_place_LBT) == ["position"]
    assert kinds(by_content_LBT, guessed_LBT) == ["recall of predictor"]
    assert kinds(by_content_LBT, np.zeros_like(guessed_LBT)) == ["capacity of predictor"]
