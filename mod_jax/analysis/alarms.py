"""What is wrong with a block although the loss looks normal: one sentence each, from a row of metrics.

A row of training steps holds the size of each routed block's update, and what experts were given; the row of an
evaluation holds how the causal selections agree with top-k. A quantity that is not in the row, or NaN, raises no alarm.
"""

import math
from typing import Any, NamedTuple

from mod_jax.analysis.expert_stats import DEAD_LOAD
from mod_jax.analysis.routing_stats import HEALTHY_UPDATE_RATIO, block_name
from mod_jax.config import Config
from mod_jax.models.moe import expected_mlps

FAR_FROM_TARGET = 2.0  # factor between realised and intended capacity
LOWEST_RECALL_LIFT = 0.05  # 0: no better than choosing as many tokens at random
HIGHEST_POSITION_R2 = 0.5
MOST_DROPPED = 0.2  # of the claims of experts, beyond those that their slots make inevitable
LEAST_COMPUTED = 0.25  # of the tokens that experts are expected to compute on
MIN_STEPS, MIN_SHARE = 50, 0.25  # steps, and share of the run, to wait for: an untrained router is no news


class Alarm(NamedTuple):
    """`group` ("routing" or "experts"), `kind` and `depth` say what it is about; `text` what it means and to try."""

    kind: str
    depth: int
    text: str
    group: str = "routing"


def is_early(step: int, num_steps: int) -> bool:
    """Whether it is too early for alarms."""
    return step < max(MIN_STEPS, MIN_SHARE * num_steps)


def find_alarms(metrics: dict[str, Any], config: Config) -> list[Alarm]:
    """The alarms of one row of metrics, in order of depth; those of experts behind the others."""
    of_routing = [alarm for depth in config.routed_depths for alarm in _of_block(metrics, config, depth)]
    return of_routing + [alarm for depth in config.expert_depths for alarm in _of_experts(metrics, config, depth)]


def alarm_metrics(alarms: list[Alarm], config: Config) -> dict[str, int]:
    """How many there are in each routed block, `routing/block03/alarms`, and in each with experts."""
    groups = {"routing": config.routed_depths, "experts": config.expert_depths}
    return {
        f"{group}/{block_name(depth)}/alarms": sum((a.group, a.depth) == (group, depth) for a in alarms)
        for group, depths in groups.items()
        for depth in depths
    }


def _of_block(metrics: dict[str, Any], config: Config, depth: int) -> list[Alarm]:
    alarms = []

    def value(name: str) -> float:
        return metrics.get(f"routing/{block_name(depth)}/{name}", math.nan)

    def add(kind: str, text: str) -> None:
        alarms.append(Alarm(kind, depth, f"{block_name(depth)}: {text}"))

    low, high = HEALTHY_UPDATE_RATIO
    ratio = value("update_ratio")
    if ratio < low:
        add("low update", f"update/residual norm {ratio:.3g}, it has died; try a lower optimizer.learning_rate")
    if ratio > high:
        add("high update", f"update/residual norm {ratio:.3g}, it drowns the other blocks; try routing.gate=sigmoid")

    explained = value("position_r2")
    if explained > HIGHEST_POSITION_R2 and config.routing.score != "position":
        what = f"the place in the row explains {explained:.0%} of what is selected, content hardly counts"
        add("position", f"{what}; try a lower optimizer.router_learning_rate_scale")

    target = value("topk_fraction")
    for selection in config.causal_selections:
        realised, lift = value(f"realised_capacity/{selection}"), value(f"recall_lift/{selection}")
        advice = "try another selection, or train longer"
        if realised > FAR_FROM_TARGET * target or realised < target / FAR_FROM_TARGET:
            what = f"{selection} selects {realised:.1%} of tokens where top-k selects {target:.1%}"
            add(f"capacity of {selection}", f"{what}, so its loss is of another budget; {advice}")
        elif lift < LOWEST_RECALL_LIFT:
            what = f"{selection} finds the tokens of top-k no better than chance"
            add(f"recall of {selection}", f"{what} (recall beyond chance {lift:.2f}); {advice}")
    return alarms


def _of_experts(metrics: dict[str, Any], config: Config, depth: int) -> list[Alarm]:
    """Of experts that tokens choose. Where experts choose, the load is even and nothing is dropped."""
    if config.experts_choose:
        return []
    alarms, e = [], config.experts

    def value(name: str) -> float:
        return metrics.get(f"experts/{block_name(depth)}/{name}", math.nan)

    def add(kind: str, text: str) -> None:
        advice = "try a higher experts.balance_weight"
        alarms.append(Alarm(kind, depth, f"{block_name(depth)}: {text}; {advice}", "experts"))

    if (dead := value("dead")) >= 1:
        add(
            "dead experts",
            f"dead experts: {dead:.0f} of {e.count}, with less than {DEAD_LOAD:.0%} of an even load",
        )
    share = e.count / (e.count + e.noop)  # of the claims that experts are expected to get
    inevitable = max(0.0, 1 - e.capacity / share)
    if (dropped := value("dropped")) > inevitable + MOST_DROPPED:
        add("dropped", f"{dropped:.0%} of the claims of experts find no slot; {inevitable:.0%} at an even load")
    expected = min(1.0, expected_mlps(config))
    if (computed := value("computed")) < LEAST_COMPUTED * expected:
        add("computed", f"experts compute on {computed:.1%} of the tokens, {expected:.0%} at an even load")
    return alarms
