"""What is asked of an upgrade, and the configs that it gives: of the model as it was trained, and of its tuning."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mod_jax import config as config_lib
from mod_jax.config import Config
from mod_jax.errors import ConfigError
from mod_jax.pretrained import families
from mod_jax.pretrained.source import Source

# What an upgraded model is, unless a key says otherwise.
DEFAULTS = {
    "routing.skipped_keys": "kept",
    "model.context": 2048,
}
# What it always is. Scores of its routers rank tokens and nothing else, so that only cut-offs can select.
FIXED = {
    "routing.gate": "one",
    "routing.score": "learned",
    "routing.predictor": False,
    "routing.aux_weight": 0.0,
    "routing.topk_per": "row",
    "train.steps": 1,
    "train.tokens": 0,
    "train.flops": 0.0,
}
MAX_STEPS = 2**31 - 1  # as config.train.steps
GRID = (0.9, 0.75, 0.5, 0.25)


# How a run begins that tunes the upgraded model, by what it trains (`optimizer.train`).
TUNING = {
    "lora": {"optimizer.learning_rate": 1e-3, "optimizer.router_learning_rate_scale": 3.0},
    "routing": {"optimizer.learning_rate": 3e-3},
    "all": {"optimizer.learning_rate": 1e-4},
}
LOSSES = ("kl", "ce")
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked of an upgrade; see the flags of `python -m mod_jax.upgrade`."""

    source: str
    workdir: str | os.PathLike
    layout: str = "auto"
    capacity: float = 0.75
    grid: Sequence[float] = GRID
    tokenizer: str = ""
    calibration_rows: int = 16
    block_rows: int = 3
    check: bool | None = None
    steps: int = 0
    train: str = "lora"
    loss: str = "kl"
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)


def check(request: Request) -> None:
    """Refuses a bad value before anything is read."""
    for name, value in (("--capacity", [request.capacity]), ("--grid", request.grid)):
        if not all(isinstance(x, int | float) and 0 < x <= 1 for x in value):
            raise ConfigError(f"{name} = {', '.join(map(str, value))}: must be in (0, 1]")
    if not 0 <= request.steps <= MAX_STEPS:
        raise ConfigError(f"--steps = {request.steps}: must be in [0, {MAX_STEPS}]")
    for name, value, allowed in (("--train", request.train, TUNING), ("--loss", request.loss, LOSSES)):
        if value not in allowed:
            raise ConfigError(f"{name} = {value!r}: must be one of {', '.join(allowed)}")
    if request.calibration_rows < 1:
        raise ConfigError(f"--calibration_rows = {request.calibration_rows}: must be >= 1")
    if not 1 <= request.block_rows <= request.calibration_rows:
        raise ConfigError(
            f"--block_rows = {request.block_rows}: must be in [1, {request.calibration_rows}], of --calibration_rows"
        )


def dense_config(source: Source, request: Request) -> Config:
    """The config of the model as it was trained, in layout "F", with the keys that say how it will be routed.

    Raises:
      ConfigError: a key was asked for that the model, or another flag, decides.
    """
    keys = families.model_keys(source)
    longest = keys.pop("model.context")
    tokenizer = request.tokenizer or source.name
    decided = {**keys, **FIXED, "data.tokenizer": tokenizer if ":" in tokenizer else f"hf:{tokenizer}"}
    instead = {"model.layout": "--layout", "routing.capacity": "--capacity", "data.tokenizer": "--tokenizer"}
    instead |= {"optimizer.train": "--train", "train.teacher": "--loss"}
    for name, value in request.changes.items():
        if name in instead:
            raise ConfigError(f"config.{name} = {value!r}: is given by {instead[name]} here")
        if name in decided and value != decided[name]:
            raise ConfigError(f"config.{name} = {value!r}: is {decided[name]!r} of this model; leave it out")
    # Two batches of held-out windows, so that a budget can be calibrated on one and judged on the other.
    rows = -(-4 // jax.device_count()) * jax.device_count()
    sizes = {"train.batch_size": rows, "data.eval_windows": 2 * rows}
    context = min(longest, DEFAULTS["model.context"])
    values = {**DEFAULTS, **sizes, "model.context": context, **request.changes, **decided}
    if values["model.context"] > longest:
        raise ConfigError(f"config.model.context = {values['model.context']}: this model allows {longest}")
    return config_lib.make_config(**values)


def tuning_keys(request: Request) -> dict[str, Any]:
    """What a run that tunes the upgraded model sets, beside its teacher."""
    steps = request.steps or 200
    keys = {"train.steps": steps, "train.save_every": 50, "optimizer.train": request.train, **TUNING[request.train]}
    return keys | {"optimizer.weight_decay": 0.0}


def layout_of(asked: str, config: Config, order: Sequence[int] | None) -> str:
    """One letter per block: as spelt out, or R for the first of `order` (None: only check what was asked).

    Raises:
      ConfigError: it is none of auto, auto:N and letters, or is for more blocks than there are.
    """
    depth = config.model.depth
    name, colon, number = asked.partition(":")
    if name == "auto":
        if colon and not (number.isascii() and number.isdigit() and int(number) > 0):
            raise ConfigError(f"--layout = {asked!r}: must be auto, auto:N with N >= 1, or letters F and R")
        count = int(number) if colon else max(1, (depth - 2) // 2)
        if count > depth - 2:
            raise ConfigError(f"--layout = {asked!r}: of {depth} blocks at most {max(0, depth - 2)} can be routed so")
        return "".join("R" if i in (order or [])[:count] else "F" for i in range(depth))
    if not 0 < len(asked) <= depth or set(asked) - set("FRf"):
        raise ConfigError(f"--layout = {asked!r}: must be auto, auto:N, or up to {depth} letters F and R")
    return "".join(asked[i % len(asked)] for i in range(depth))


def with_keys(config: Config, changes: dict[str, Any]) -> Config:
    """The config with these keys changed, checked again."""
    return config_lib.from_flat_dict(config_lib.to_flat_dict(config) | changes)
