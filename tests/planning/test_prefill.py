"""Plans of prefill: that they are of the sampler's program, and counts by hand."""

import json
from types import MappingProxyType

import jax
import numpy as np
import pytest

from mod_jax import sampling
from mod_jax.config import make_config
from mod_jax.data.tokenizers import ByteTokenizer
from mod_jax.errors import ConfigError
from mod_jax.models import flops
from mod_jax.planning import prefill as plan

CHANGES = {
    "model.width": 16,
    "model.depth": 2,
    "model.num_heads": 2,
    "model.vocab_size": 64,
    "model.context": 64,
    "data.seq_len": 32,
    "routing.capacity": 0.25,
    "train.steps": 4,
}


@pytest.fixture
def report(tmp_path, devices_here):
    """A function of config changes that plans for v5e:2x2, by default for one of its chips."""

    def make(batch=4, context=None, prompt=None, mesh=MappingProxyType({}), **changes):
        config = make_config(**{**CHANGES, "data.cache_dir": str(tmp_path), **changes})
        return plan.make_report(config, "v5e-4", batch, context, prompt, mesh)

    return make


def test_what_is_planned_is_what_the_sampler_runs(build, watched):
    """The program that a sampler runs here, word for word, if the plan is for a CPU."""
    model = build(**{"model.vocab_size": ByteTokenizer().vocab_size, "model.dtype": "bfloat16", "model.depth": 2})
    sampler = sampling.Sampler(model)
    programs = watched(sampler, "_prefill")
    sampler.generate(["a"] * 4, max_new_tokens=8)
    traced, given = plan.trace_prefill(model.config, sampler.selection, 4, 32, 32, jax.devices()[0])
    assert str(traced.jaxpr) == programs[0]
    assert [(leaf.shape, leaf.dtype) for leaf in sampler._weights] == [(w.shape, w.dtype) for w in given.weights]


def test_the_flops_of_a_prefill_by_hand(report):
    """A full block attends to all pairs, masked or not; a routed one takes passes of 24 tokens, which look at 24 slots;
    logits of the last token alone."""
    found, config = report(), make_config(**CHANGES)
    full, routed = config.blocks
    assert found["tokens_per_pass"] == [64, 24]
    passes = found["passes"][1]
    by_hand = sum(flops.block_flops(config, full, 64)) + passes * sum(flops.part_flops(config, routed, 24, 24 * 24))
    by_hand += sum(flops.head_flops(config, 64)) + 2 * 16 * 64
    assert found["flops"]["compiled"] == pytest.approx(4 * by_hand, rel=0.02)
    # 64 tokens enter by chance 1/4: almost never more than 48 of a row, and one of four rows has more than 24 at times.
    draws = np.random.default_rng(0).binomial(64, 0.25, (20_000, 4))
    assert passes == pytest.approx(np.ceil(draws / 24).max(axis=1).mean(), rel=0.01)


def test_a_report_over_all_chips(report):
    found = json.loads(json.dumps(report(batch=3, prompt=20, mesh=None)))
    assert (found["program"], found["batch"], found["prompt"], found["context"]) == ("prefill", 4, 32, 64)
    assert found["topology"]["mesh"] == {"data": 2, "fsdp": 1, "tensor": 2, "expert": 1}
    assert "--prompt=20 is rounded up to 32, as the sampler does" in found["notes"]
    assert {tuple(entry["axes"]) for entry in found["collectives"]} == {("data",), ("tensor",)}
    text = plan.describe(found)
    assert max(map(len, text.splitlines())) <= 120
    assert text.splitlines()[-1].startswith("verdict   FITS on v5e:2x2: 15.7")
    flat = " ".join(text.split())
    for part in ("4 prompts of 32 tokens, in caches for 64", "to the first token of all rows", "no TPU ran it"):
        assert part in flat


def test_a_prompt_beyond_the_context_is_refused(report):
    for prompt in (0, 65):
        with pytest.raises(ConfigError, match=rf"--prompt={prompt}: must be in \[1, 64\], the positions of a row"):
            report(prompt=prompt)


@pytest.mark.slow
def test_experts_count_as_often_as_they_are_used(report):
    """4 rows of 64 tokens to 4 experts: one MLP a token, in blocks of 128 claims, so half as much again at most."""
    found = report(**{"model.layout": "E", "experts.count": 4, "routing.predictor": False})
    assert 1.0 < found["flops"]["compiled"] / found["flops"]["model"] < 3.0
