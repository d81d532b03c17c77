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


EXPERTS = {f"experts/block00/{name}": value for name, value in dict(dead=0, dropped=0.05, computed=0.98).items()}


@pytest.fixture
def experts(tiny_config):
    """A function of changes to the experts of one full block."""

    def make(**changes):
        return tiny_config(**{"model.layout": "E", "model.depth": 1, "experts.count": 4, **changes})

    return make


@pytest.mark.parametrize(("name", "value", "kind"), [("dead", 1, "dead experts"), ("dropped", 0.3, "dropped")])
def test_each_alarm_of_experts_fires_alone(experts, name, value, kind):
    assert find_alarms(EXPERTS, experts()) == []
    (alarm,) = alarms = find_alarms(EXPERTS | {f"experts/block00/{name}": value}, experts())
    assert (alarm.group, alarm.kind, alarm.depth) == ("experts", kind, 0)
    assert alarm.text.startswith("block00: ")
    assert alarm.text.endswith("; try a higher experts.balance_weight")
    assert alarm_metrics(alarms, experts()) == {"experts/block00/alarms": 1}


def test_what_slots_make_inevitable_is_no_alarm(experts):
    """Slots for half of the tokens drop half of them; with as many no-ops as experts they suffice."""
    half = EXPERTS | {"experts/block00/dropped": 0.55, "experts/block00/computed": 0.45}
    assert find_alarms(half, experts(**{"experts.capacity": 0.5})) == []
    integrated = experts(**{"experts.capacity": 0.5, "experts.noop": 4})
    assert [alarm.kind for alarm in find_alarms(half, integrated)] == ["dropped"]


def test_no_ops_that_take_everything_are_an_alarm(experts):
    """As happens without a balance loss."""
    config = experts(**{"experts.noop": 4})
    asleep = EXPERTS | {"experts/block00/computed": 0.01}
    (alarm,) = find_alarms(asleep, config)
    assert alarm.text.startswith("block00: experts compute on 1.0% of the tokens, 50% at an even load; try")
    assert find_alarms(EXPERTS | {"experts/block00/computed": 0.3}, config) == []  # loads swing


def test_experts_that_choose_have_an_even_load(experts):
    config = experts(**{"experts.choice": "expert", "experts.capacity": 0.5})
    assert find_alarms(EXPERTS | {"experts/block00/dead": 1}, config) == []
    assert find_alarms({}, experts()) == find_alarms(dict.fromkeys(EXPERTS, float("nan")), experts()) == []


def test_a_routed_block_with_experts_can_have_both_kinds(tiny_config):
    config = tiny_config(**{"model.layout": "Fe", "model.depth": 2})
    dead = {"routing/block01/update_ratio": 0.001, "experts/block01/dead": 2}
    alarms = find_alarms(dead, config)
    assert [alarm.group for alarm in alarms] == ["routing", "experts"]
    assert alarm_metrics(alarms, config) == {"routing/block01/alarms": 1, "experts/block01/alarms": 1}
