"""What values a config key takes, alone and beside others. Each refusal names key, value and what is allowed."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from mod_jax.errors import ConfigError
from mod_jax.layout import LETTERS, ROUTED, is_routed

LONGEST_TEXT = 4096  # of a value; the paths of a file system are no longer
MOST_BLOCKS = 2**12
MOST_FACTORS = 2**10


def checked(name: str, field: dataclasses.Field, value: Any) -> Any:
    """Returns the value in the declared type, or raises ConfigError."""
    allowed = field.metadata

    def refuse(expected):
        raise ConfigError(f"config.{name} = {shown(value)}: must be {expected}")

    def number(value, integral):
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse(f"{'an integer' if integral else 'a number'} {_range_text(allowed)}".rstrip())
        if abs(value) > 1e300 or not math.isfinite(value) or (integral and value != int(value)):
            refuse(f"{'an integer' if integral else 'a finite number'} {_range_text(allowed)}".rstrip())
        if not integral and name != "train.flops" and not (value == 0 or 1e-37 < abs(value) < 1e38):
            refuse(f"a number {_range_text(allowed)} that a float32 can hold")
        if (
            (allowed["low"] is not None and value < allowed["low"])
            or (allowed["above"] is not None and value <= allowed["above"])
            or (allowed["high"] is not None and value > allowed["high"])
        ):
            refuse(f"{'an integer' if integral else 'a number'} {_range_text(allowed)}")
        return int(value) if integral else float(value)

    if field.type is bool:
        return value if isinstance(value, bool) else refuse("True or False")
    if field.type is str:
        if not isinstance(value, str):
            refuse("a string" if allowed["choices"] is None else f"one of {', '.join(allowed['choices'])}")
        if allowed["choices"] is not None and value not in allowed["choices"]:
            refuse(f"one of {', '.join(allowed['choices'])}")
        if len(value) > LONGEST_TEXT or not value.isprintable():
            refuse(f"at most {LONGEST_TEXT} characters, all of which can be printed")
        return value
    if isinstance(value, list | tuple) and name == "routing.capacity" and len(value) <= MOST_BLOCKS:
        return tuple(number(v, integral=False) for v in value) or refuse("one number, or one per routed block")
    if name == "model.rope_factors":
        is_list = isinstance(value, list | tuple) and len(value) <= MOST_FACTORS
        return tuple(number(v, integral=False) for v in value) if is_list else refuse("a list of numbers > 0")
    return number(value, integral=field.type is int)


def shown(value: Any) -> str:
    """A value in a message: on one line, and never long."""
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits has no repr, and another's may do anything
        text = f"a {type(value).__name__} that cannot be shown"
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return text if len(text) <= 100 else f"{text[:60]}... ({len(text):,} characters)"


def _range_text(allowed) -> str:
    low, above, high = (
        f"{bound:g}" if isinstance(bound, float) else bound
        for bound in (allowed["low"], allowed["above"], allowed["high"])
    )
    if high is None:
        return f"> {above}" if above is not None else f">= {low}"
    return f"in {f'({above}' if above is not None else f'[{low}'}, {high}]"


def check_relations(values: dict[str, Any], length_keys: Sequence[str]) -> None:
    """Checks what no single key can know. Of `length_keys` exactly one says how long a run is."""

    def refuse(name, why):
        raise ConfigError(f"config.{name} = {shown(values[name])}: {why}")

    if values["model.num_heads"] % values["model.num_kv_heads"]:
        refuse("model.num_kv_heads", f"must divide model.num_heads = {values['model.num_heads']}")
    if values["model.head_dim"] % 2:
        refuse("model.head_dim", "must be even (rotary angles turn pairs)")
    known = {*LETTERS, *ROUTED, *(letter.lower() for letter in LETTERS)}
    if not values["model.layout"] or not known.issuperset(values["model.layout"]):
        alone = "E has experts, A is attention alone, M an MLP alone; a lower-case letter is routed, f is R"
        refuse("model.layout", f"must be letters F (full) and R (routed), such as FR, FFR, R or F; {alone}")
    if values["data.seq_len"] > values["model.context"]:
        refuse("data.seq_len", f"must not exceed model.context = {values['model.context']}")

    factors = values["model.rope_factors"]
    if factors and len(factors) != values["model.head_dim"] // 2:
        pairs = f"model.head_dim / 2 = {values['model.head_dim'] // 2}"
        refuse("model.rope_factors", f"must be () or {pairs} numbers, one per rotary frequency; found {len(factors)}")

    layout, depth = values["model.layout"], values["model.depth"]
    if values["model.gated_mlp"] and "E" in layout[:depth].upper():
        refuse("model.gated_mlp", f"must be False with layout {layout!r}: experts (E, e) have no gate")
    routed = sum(is_routed(layout[i % len(layout)]) for i in range(depth))
    capacity = values["routing.capacity"]
    if isinstance(capacity, tuple) and len(capacity) == 1:
        values["routing.capacity"] = capacity = capacity[0]
    if isinstance(capacity, tuple) and len(capacity) != routed:
        refuse("routing.capacity", f"must be one number or {routed}, one per routed block of {depth} x {layout!r}")
    if not routed and values["routing.aux_weight"]:
        refuse("routing.aux_weight", f"must be 0: layout {layout!r} at depth {depth} has no routed block")
    score = values["routing.score"]
    if score == "stochastic" and values["routing.predictor"]:
        refuse("routing.predictor", "must be False with routing.score = 'stochastic': noise cannot be predicted")
    if score in ("stochastic", "frozen"):
        if values["routing.aux_weight"]:
            refuse("routing.aux_weight", f"must be 0 with routing.score = {score!r}: its router is not trained")
        if values["routing.gate"] != "raw":
            refuse("routing.gate", f"must be 'raw' (and is 1) with routing.score = {score!r}")
    if values["optimizer.train"] == "routing":
        has_router = score not in ("stochastic", "frozen") or values["routing.predictor"]
        if not routed or not has_router:
            refuse("optimizer.train", "must be 'all': this model has no router and no predictor that is trained")
    if values["train.teacher"] and values["train.flops"]:
        refuse("train.flops", "must be 0 with train.teacher, whose FLOPs are its own; give train.steps or train.tokens")
    if score == "frozen" and values["optimizer.router_weight_decay"]:
        refuse("optimizer.router_weight_decay", "must be 0 with routing.score = 'frozen': its router is not trained")

    if values["experts.chosen"] > values["experts.count"] + values["experts.noop"]:
        refuse("experts.chosen", "must not exceed experts.count + experts.noop")
    if values["experts.choice"] == "expert":
        for name, without in (("experts.chosen", 1), ("experts.noop", 0), ("experts.overflow", "position")):
            if values[name] != without:
                refuse(name, f"must be {without!r} with experts.choice = 'expert': experts fill their slots themselves")
        if values["experts.capacity"] > values["experts.count"]:
            refuse("experts.capacity", "must not exceed experts.count with experts.choice = 'expert'")

    if values["train.batch_size"] % values["train.accumulation"]:
        refuse("train.accumulation", f"must divide train.batch_size = {values['train.batch_size']}")
    given = {name: values[name] for name in length_keys if values[name]}
    if len(given) != 1:
        found = ", ".join(f"{name} = {value:g}" for name, value in given.items()) or "none"
        hint = "; set the others to 0" if given else ""
        raise ConfigError(f"config.train: exactly one of steps, tokens, flops must be > 0; found {found}{hint}")
    free_axes = [name for name in ("mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.expert") if values[name] == -1]
    if len(free_axes) > 1:
        refuse(free_axes[1], "at most one mesh axis can be -1 (all that are left)")
    for name in ("mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.expert"):
        if values[name] == 0:
            refuse(name, "must be -1 (all that are left) or a number of devices >= 1")
    if values["mesh.tensor"] > 0 and values["model.num_kv_heads"] % values["mesh.tensor"]:
        refuse("mesh.tensor", f"must divide model.num_kv_heads = {values['model.num_kv_heads']}")
