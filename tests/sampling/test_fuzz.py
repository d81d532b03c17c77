"""Requests that nobody thought of: each gives completions within the vocabulary, or one message that says why not.

For many more of them than the tests run: python tests/sampling/test_fuzz.py --requests=10000
"""

import argparse
import random

import numpy as np

from mod_jax.errors import RequestError
from mod_jax.sampling import Options, Sampler

CONTEXT = 32
ALPHABET = ["a", "\n", "\x00", "é", "日", "🦊", "\N{ZERO WIDTH JOINER}", "\N{RIGHT-TO-LEFT MARK}", "\ud800", "\uffff"]
NUMBERS = [0, 1, 2, 5, 0.3, 1e-30, 1e30, -1, 1.5, True, None, "1", float("nan"), float("inf"), 10**30]


def draw_prompt(rng: random.Random):
    length = rng.choice([0, 1, 3, 10, 25, CONTEXT - 1, CONTEXT, 100])
    kind = rng.random()
    if kind < 0.5:
        return "".join(rng.choice(ALPHABET[: rng.choice([3, len(ALPHABET)])]) for _ in range(length))
    if kind < 0.75:
        return rng.randbytes(length)
    return [rng.randrange(0 if rng.random() < 0.1 else 1, 400 if rng.random() < 0.1 else 257) for _ in range(length)]


def draw_request(rng: random.Random) -> dict:
    """Mostly sensible; each option is absent half of the time, and one in five of the others is anything at all."""
    sensible = dict(
        temperature=lambda: rng.choice([0, 0.1, 1, 1.0, 5, 1e-20, 1e20]),
        top_k=lambda: rng.choice([None, 1, 2, 40, 257, 10**9]),
        top_p=lambda: rng.choice([1, 1.0, 0.9, 0.1, 1e-30]),
        seed=lambda: rng.randrange(2**31),
        max_new_tokens=lambda: rng.choice([None, 1, 2, 8, CONTEXT - 1]),
        stop_tokens=lambda: [rng.randrange(257) for _ in range(rng.randrange(4))],
        stop_strings=lambda: rng.choice([[], ["\n"], ["a", "aa"], ["日"], [" "]]),
        truncate=lambda: rng.random() < 0.5,
    )
    request = {}
    for name, draw in sensible.items():
        if rng.random() < 0.5:
            request[name] = draw() if rng.random() < 0.9 else rng.choice([*NUMBERS, [], [""], [None], [300], "x"])
    return request


def fuzz(sampler: Sampler, num_requests: int, seed: int = 0) -> dict[str, int]:
    """Sends requests and checks what comes back. Returns how many were answered, and how many refused."""
    rng = random.Random(seed)
    counts = dict(answered=0, refused=0)
    for _ in range(num_requests):
        prompts, request = [draw_prompt(rng) for _ in range(rng.choice([1, 1, 2]))], draw_request(rng)
        message = ""
        try:
            completions = sampler.generate(prompts, **request)
        except RequestError as error:
            message = str(error)
        counts["refused" if message else "answered"] += 1
        if message:
            assert message.startswith(("prompt", *Options.__dataclass_fields__)), (message, prompts, request)
            continue
        assert len(completions) == len(prompts)
        for prompt, completion in zip(prompts, completions, strict=True):
            check(sampler, prompt, completion, request)
    return counts


def check(sampler, prompt, completion, request) -> None:
    about = (prompt, request, completion)
    assert isinstance(completion.text, str), about
    assert all(1 <= token < sampler.tokenizer.vocab_size for token in completion.tokens), about
    assert completion.num_prompt_tokens + len(completion.tokens) <= CONTEXT, about
    assert len(completion.tokens) <= (request.get("max_new_tokens") or CONTEXT), about
    assert completion.finish_reason in ("end", "stop", "length"), about
    assert 0 <= completion.routed_fraction <= 1, about
    assert not any(stop in completion.text for stop in request.get("stop_strings", ())), about
    log_p = sampler.log_likelihoods([completion.tokens])[0] if completion.tokens else np.zeros(0)
    assert np.isfinite(log_p).all(), about


def test_a_few_hundred_requests(build):
    sampler = Sampler(build(**{"model.depth": 2}), "predictor", capacity_L=(1.0,))
    counts = fuzz(sampler, 250)
    assert min(counts.values()) > 50
    assert sampler.num_programs <= 2 * 2 + 1  # one or two prompts; one bucket; and the log-likelihoods


if __name__ == "__main__":
    from conftest import build_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(fuzz(Sampler(build_model(**{"model.depth": 2}), "predictor"), arguments.requests, arguments.seed))
