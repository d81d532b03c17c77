"""Values that no key can use, from a hand that slipped or meant it: one typed line at once, and nothing allocated."""

import contextlib
import itertools
import math
import subprocess
import sys
import time
import tracemalloc

import pytest
from harness import ROOT

from mod_jax import config as config_lib
from mod_jax.config import FIELDS, LENGTH_KEYS, from_flat_dict
from mod_jax.errors import ConfigError

WRONG = {
    "nothing": None,
    "nan": math.nan,
    "infinity": math.inf,
    "minus infinity": -math.inf,
    "huge": 1e308,
    "hundreds of digits": 10**400,
    "thousands of digits": 10**5000,
    "below any bound": -(10**30),
    "bytes": b"\0\xff",
    "a list": [[[]]],
    "a long list": [0.5] * 100_000,
    "an empty dict": {},
    "a nested dict": {"value": {"value": {}}},
    "a function": len,
}
TEXTS = {
    "NUL": "text:a\0b",
    "a line end": "text:a\nerror: b",
    "a terminal's escape": "text:\x1b[2J",
    "a lone surrogate": "text:\udcff",
    "a million letters": "text:" + "a" * 10**6,
}
BASE = {"train.steps": 10}


class Strange:
    def __repr__(self):
        raise ZeroDivisionError


def refusal(changes) -> str:
    """The message of the refusal; checks that it is one line, soon, and without much memory."""
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(ConfigError) as refused:
            from_flat_dict({**BASE, **changes})
        seconds, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    message = str(refused.value)
    assert message.isprintable(), message
    assert len(message) < 400
    assert seconds < 0.5
    assert peak < 16 * 2**20
    return message


@pytest.mark.parametrize("name", FIELDS)
def test_a_wrong_value_of_any_key_is_one_line_that_names_it(name):
    for value in (*WRONG.values(), Strange()):
        if name == "routing.capacity" and isinstance(value, list):
            value = [*value, None]  # a list may be right here
        if FIELDS[name].type is float and isinstance(value, int | float) and abs(value) <= 1e300:
            continue  # below any bound of an integer; floats have theirs in the next test
        assert refusal({name: value}).startswith(f"config.{name}"), value


@pytest.mark.parametrize("name", [n for n, f in FIELDS.items() if f.type is not str and f.type is not bool])
def test_numbers_out_of_range_are_refused(name):
    allowed = FIELDS[name].metadata
    outside = [] if allowed["high"] is None else [allowed["high"] * 2, allowed["high"] + 1]
    outside.append(allowed["low"] - 1 if allowed["low"] is not None else allowed["above"])
    if FIELDS[name].type is float and name != "train.flops":
        outside += [1e39, 1e-39]  # no float32
    for value in outside:
        message = refusal({"train.steps": 0, name: value} if name in LENGTH_KEYS else {name: value})
        assert message.startswith(f"config.{name} = "), message


@pytest.mark.parametrize("name", [n for n, f in FIELDS.items() if f.type is str])
def test_texts_that_cannot_be_shown_or_kept_are_refused(name):
    for value in TEXTS.values():
        assert refusal({name: value}).startswith(f"config.{name} = "), value[:20]
    if FIELDS[name].metadata["choices"]:
        assert refusal({name: ""}).startswith(f"config.{name} = ''")


@pytest.mark.parametrize("name", FIELDS)
def test_the_largest_value_that_is_allowed_costs_no_memory(name):
    """Sizes are numbers until the state is made: see `prepare.check_memory`."""
    high = FIELDS[name].metadata["high"]
    if high is None or FIELDS[name].type is not int:
        return
    tracemalloc.start()
    with contextlib.suppress(ConfigError):  # of another key that does not go with it
        config_lib.fingerprint(from_flat_dict({**BASE, "model.context": 2**24, "model.head_dim": 64, name: high}))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 2**20


def test_a_config_that_is_none_or_lies_too_deep():
    deep: dict = {}
    for _ in range(100_000):
        deep = {"a": deep}
    for tree in (None, 3, [], "text", {"model": deep}, {"model": {3: 1}}, {"\0" * 10_000: 1}):
        with pytest.raises(ConfigError) as refused:
            config_lib.from_config_dict(tree)
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 400
    while deep:  # taken apart level by level, or its end would overflow the stack
        deep = deep["a"]


CONFIGS = {
    "number": "def get_config():\n    return 3\n",
    "digits": "from mod_jax.config import default_config\n\ndef get_config():\n    config = default_config()\n"
    "    config.model.width = 10**5000\n    return config\n",
}


def test_the_command_ends_with_one_line(tmp_path):
    for name, text in CONFIGS.items():
        (tmp_path / f"{name}.py").write_text(text)
    outside = ["--config=configs/smoke.py", "--config.train.steps=1", "--config.data.source=text:../../../nowhere"]
    commands = [
        *([f"--config={tmp_path / name}.py"] for name in CONFIGS),
        [f"--config={tmp_path}/../no/such.py"],
        outside,
        ["--config=configs/smoke.py", "--config.train.steps=1", "--config.model.width=1048576"],
    ]
    program = "import sys; from absl import app; from mod_jax import cli, train; sys.argv[0] = 'train'\n"
    program += "app.run(train.main, flags_parser=cli.parse_flags)"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, *command, f"--workdir={tmp_path}/in/../run{i}"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, command in enumerate(commands)
    ]
    for process, command in itertools.zip_longest(running, commands):
        _, stderr = process.communicate()
        assert process.returncode in (2, 5), (command, stderr)
        assert stderr.startswith("error: "), (command, stderr)
        assert len(stderr.splitlines()) == 1, (command, stderr)
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}  # Python's own, beside what it imports
    assert left == {f"{name}.py" for name in CONFIGS}
