"""What is wrong with a routed block although the loss looks normal: one sentence each, from a row of metrics.

A row of training steps holds the size of each block's update; the row of an evaluation holds how the causal selections
agree with top-k. A quantity that is not in the row, or NaN, raises no alarm.
"""

import math
from typing import Any, NamedTuple

from mod_jax.analysis.routing_stats import HEALTHY_UPDATE_RATIO, block_name
from mod_jax.config import Config

FAR_FROM_TARGET = 2.0  # factor between realised and intended capacity
LOWEST_RECALL_LIFT = 0.05  # 0: no better than choosing as many tokens at random
HIGHEST_POSITION_R2 = 0.5
MIN_STEPS, MIN_SHARE = 50, 0.25  # steps, and share of the run, to wait for: an untrained router is no news


class Alarm(NamedTuple):
    """`kind` and `depth` say what it is about; `text` what it means and what to try."""

    kind: str
    depth: int
    text: str


def is_early(step: int, num_steps: int) -> bool:
    """Whether it is too early for alarms."""
    return step < max(MIN_STEPS, MIN_SHARE * num_steps)


def find_alarms(metrics: dict[str, Any], config: Config) -> list[Alarm]:
    """The alarms of one row of metrics, in order of depth."""
    return [alarm for depth in config.routed_depths for alarm in _of_block(metrics, config, depth)]


def alarm_metrics(alarms: list[Alarm], config: Config) -> dict[str, int]:
    """How many there are in each routed block: `routing/block03/alarms`."""
    return {
        f"routing/{block_name(depth)}/alarms": sum(alarm.depth == depth for alarm in alarms)
        for depth in config.routed_depths
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
