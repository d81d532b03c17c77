"""Prompts and options that nobody should send: each is one RequestError naming the entry, at once, in little memory.

Nothing is compiled for a request that is refused. Through the command it is one line and exit code 2.
"""

import os
import re
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
from untrained import build_model, save_run

from mod_jax.errors import RequestError
from mod_jax.sampling import Sampler

HUGE, LONG = 10 * 2**20, 2**20

# Prompts, and what the message says. A prompt that is one of several is named by its place.
REFUSED = [
    (["x", "\ud800"], r"prompts\[1\]: bytes needs UTF-8 text"),
    (["a" * HUGE], r"prompt: at least 10485761 tokens with the separator, at most 27 fit"),
    (["x", b"\xff" * HUGE], r"prompts\[1\]: at least"),
    ([[1] * LONG], r"prompt: at least"),
    ([np.ones(LONG, np.int64)], r"prompt: at least"),
    ([[257]], r"prompt: token id 257 is outside the vocabulary \[0, 257\)"),
    ([[5, -1]], r"prompt: token id -1"),
    ([[5, 2**70]], r"prompt: token id 1180591620717411303424"),
    ([[5, 10**5000]], r"prompt: token id <int too large to show>"),
    ([np.array([5, 2**40])], r"prompt: token id 1099511627776"),
    ([[5, 0, 6]], r"prompt: the separator, 0, may stand only at its start"),
    ([[5, True]], r"prompt = \[5, True\]: must be text or a flat list of token ids"),
    ([np.array([True, False])], r"prompt = .*must be text or a flat list"),
    ([[5, 6.0]], r"prompt = \[5, 6.0\]"),
    ([[float("nan")]], r"prompt = \[nan\]"),
    ([[[5, 6], [7]]], r"prompt = \[\[5, 6\], \[7\]\]"),
    ([np.ones((2, 2), np.int32)], r"prompt = array"),
    ([np.array(5)], r"prompt = array\(5\)"),
    (["x", None], r"prompts\[1\] = None: must be text or a flat list of token ids"),
    (["x", {"a": 1}], r"prompts\[1\] = \{'a': 1\}"),
    (["x", 3], r"prompts\[1\] = 3"),
    ([[None] * 20], r"prompt = \[None, None"),
    ({"x"}, r"prompts = \{'x'\}: must be text, token ids, or a list of such"),
    ((text for text in "ab"), r"prompts = <generator"),
    (object(), r"prompts = <object"),
]

# Prompts that are odd, and how many tokens they have with the separator.
ANSWERED = [
    ("", 1),
    (b"", 1),
    ([], 1),
    ([0], 1),
    ("\x00\x00", 3),
    (b"\xff\xfe", 3),
    ([np.int64(5), np.int8(6)], 3),
    (np.array([5, 6], np.uint8), 3),
    (range(1, 4), 4),
    (np.array(["ab"])[0], 3),
]

OPTIONS = [
    dict(seed=-1),
    dict(seed=2**31),
    dict(seed=10**5000),
    dict(seed=1.0),
    dict(seed=True),
    dict(temperature=float("nan")),
    dict(temperature=-float("inf")),
    dict(temperature=np.float32("nan")),
    dict(temperature=10**5000),
    dict(temperature="1"),
    dict(top_p=np.nan),
    dict(top_k=0),
    dict(top_k=2.5),
    dict(max_new_tokens=32),
    dict(max_new_tokens=10**5000),
    dict(stop_strings="ab"),
    dict(stop_strings=b"ab"),
    dict(stop_strings=[""]),
    dict(stop_strings=[b"a"]),
    dict(stop_tokens=[257]),
    dict(stop_tokens=[-1]),
    dict(stop_tokens=[True]),
    dict(stop_tokens=5),
    dict(truncate="yes"),
    dict(stop=["a"]),
]


@pytest.fixture(scope="module")
def sampler():
    return Sampler(build_model(**{"model.depth": 2}), "threshold", capacity_L=(1.0,))


def refused(sampler: Sampler, prompts, **options) -> str:
    """The message of the refusal; fails if it takes long, takes memory, or compiles."""
    programs = sampler.num_programs
    tracemalloc.start()
    begin = time.process_time()  # of this process: others may keep the machine busy
    try:
        with pytest.raises(RequestError) as caught:
            sampler.generate(prompts, **options)
        seconds, (_, peak) = time.process_time() - begin, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert seconds < 0.2, message
    assert peak < 2**20, message
    assert len(message) < 400
    assert "\n" not in message
    assert sampler.num_programs == programs
    return message


@pytest.mark.parametrize(("prompts", "message"), REFUSED, ids=range(len(REFUSED)))
def test_a_prompt_that_cannot_be_used_is_named(sampler, prompts, message):
    assert re.match(message, refused(sampler, prompts, max_new_tokens=5))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_an_option_that_cannot_be_used_is_named(sampler, options):
    assert refused(sampler, "x", **options).startswith(next(iter(options)))


def test_odd_prompts_that_are_prompts_are_answered(sampler):
    prompts, lengths = zip(*ANSWERED, strict=True)
    completions = sampler.generate(prompts, max_new_tokens=4)
    assert [c.num_prompt_tokens for c in completions] == list(lengths)
    end = sampler.generate(b"\xff" * HUGE, max_new_tokens=5, truncate=True)[0]
    assert end.num_prompt_tokens == 27


def test_stop_strings_that_overlap_end_at_the_first_that_is_complete(sampler):
    options = dict(max_new_tokens=20, seed=3)
    free = sampler.generate("x", **options)[0]
    overlapping = [free.text[4:9], free.text[5:7], free.text[4:7], free.text[3:] + "never"]
    stopped = sampler.generate("x", **options, stop_strings=overlapping)[0]
    assert stopped.finish_reason == "stop"
    assert free.text.startswith(stopped.text)
    assert len(stopped.text) <= 4
    foxes = ["\N{FOX FACE}" * n for n in range(1, 500)]
    assert sampler.generate("x", **options, stop_strings=foxes)[0] == free


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A workdir with the checkpoint of a model that was never trained."""
    return save_run(build_model(**{"model.depth": 2}), tmp_path_factory.mktemp("hostile"))


def test_through_the_command_it_is_one_line_and_exit_code_2(workdir, tmp_path):
    (tmp_path / "long").write_bytes(os.urandom(LONG))
    command, running = [sys.executable, "-m", "mod_jax.sample", f"--workdir={workdir}"], {}
    for arguments, message in (
        ([f"--prompt_file={tmp_path / 'long'}"], "prompt: at least 1048577 tokens with the separator"),
        (["--prompt_file=/dev/zero"], "prompt_file = '/dev/zero': more than 16,777,216 bytes"),
        ([b"--prompt=a", b"--prompt=" + b"\xff" * 40], "prompts[1]: at least 41 tokens"),
    ):
        process = subprocess.Popen(command + arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running[process] = message
    for process, message in running.items():
        out, err = process.communicate()
        assert (process.returncode, out, err.count("\n")) == (2, "", 1), err
        assert err.startswith(f"error: {message}"), err
