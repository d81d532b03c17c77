"""Generation end to end on small models: what comes out equals the uncached model's choice, however it was run."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec, SingleDeviceSharding

from mod_jax import sharding
from mod_jax.errors import CacheOverflowError, ConfigError, RequestError
from mod_jax.sampling import Options, Sampler, generate
from mod_jax.sampling.generate import batch_bucket
from mod_jax.sampling.programs import Programs
from mod_jax.trained import causal_selection

PROMPTS = ["def f(x):", "x", ""]
SHALLOW = {"model.depth": 2}
SMALL_CACHE = (0.5,)  # capacity_L that gives 24 slots for 32 positions


@pytest.fixture(scope="module")
def shared():
    return {}


@pytest.fixture
def sampler(build, shared):
    """One sampler for the tests of this file: programs are compiled once."""
    if "sampler" not in shared:
        shared["sampler"] = Sampler(build(**SHALLOW), "threshold")
    return shared["sampler"]


def ids_of(sampler, prompt, completion):
    return np.concatenate([[0], sampler.tokenizer.encode(prompt), completion.tokens]).astype(np.int32)


def test_greedy_is_the_uncached_models_choice_at_every_step(build, tools, sampler):
    completions = sampler.generate(PROMPTS, temperature=0, max_new_tokens=12)
    model = build(**SHALLOW)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.finish_reason == "length"
        ids = ids_of(sampler, prompt, completion)
        padded_1T = np.pad(ids, (0, 32 - ids.size))[None]
        logits_1TV, selected_L1T = tools.uncached(model, "threshold", padded_1T)
        start = completion.num_prompt_tokens
        assert np.argmax(logits_1TV[0, start - 1 : ids.size - 1], axis=-1).tolist() == completion.tokens
        fed = ids.size - 1  # the last token was not run
        assert completion.routed_fraction == pytest.approx(selected_L1T[:, 0, :fed].mean())


def test_alone_streamed_or_in_a_batch_a_prompt_gets_the_same_completion(sampler):
    for options in (dict(temperature=0), dict(temperature=0.9, top_k=50, top_p=0.95, seed=3)):
        together = sampler.generate(PROMPTS, max_new_tokens=12, **options)
        alone = sampler.generate(PROMPTS[0], max_new_tokens=12, **options)[0]
        assert alone.tokens == together[0].tokens
        assert "".join(sampler.stream(PROMPTS[0], max_new_tokens=12, **options)) == alone.text
        pieces = [[], [], []]
        sampler.generate(PROMPTS, max_new_tokens=12, on_text=lambda row, text, p=pieces: p[row].append(text), **options)
        assert ["".join(texts) for texts in pieces] == [completion.text for completion in together]


def test_as_a_tpu_keeps_weights_and_caches_nothing_changes(build, monkeypatch):
    """Weights in one stack, more rows per pass, caches in a layout of their own, which lives through every program."""
    model = build(**SHALLOW, **{"model.head_dim": 128})
    sizes = dict(capacity_L=(0.1,), cutoffs_L=[-1.0])  # too few slots for so low a cut-off
    expected = Sampler(model, "threshold", **sizes).generate(PROMPTS, temperature=0, max_new_tokens=20)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    sampler, layouts, pieces = Sampler(model, "threshold", **sizes), [], ["", "", ""]

    def watch(run):
        def watched(*args, **kwargs):
            out = run(*args, **kwargs)
            layouts.append([leaf.format.layout.major_to_minor for leaf in jax.tree.leaves(out)])
            return out

        return watched

    def take(row, text):
        pieces[row] += text

    for name in ("_prefill", "_advance", "_grow"):
        monkeypatch.setattr(sampler, name, watch(getattr(sampler, name)))
    actual = sampler.generate(PROMPTS, temperature=0, max_new_tokens=20, on_text=take)
    assert [(c.tokens, c.routed_fraction) for c in actual] == [(c.tokens, c.routed_fraction) for c in expected]
    assert pieces == [completion.text for completion in expected]
    assert len(layouts) >= 20
    assert sampler._growth
    assert all(found[:2] == [(0, 2, 1, 3)] * 2 for found in layouts)


def test_on_a_mesh_caches_keep_the_layout_of_a_tpu(build):
    model = build(**SHALLOW, **{"model.head_dim": 128})
    programs = Programs(model.config, None, (0.25,), 257, 0, "tpu")
    assert programs.state_shardings(jax.devices()[0]).done_B == SingleDeviceSharding(jax.devices()[0])
    mesh = sharding.mesh_of((2, 1, 2, 1), jax.devices())
    lies = programs.state_shardings(mesh)
    assert lies.cache[0].items[0].layout.major_to_minor == (0, 2, 1, 3)
    assert lies.cache[0].items[0].sharding.spec == PartitionSpec(("data", "fsdp", "expert"), "tensor", None, None)
    assert (lies.done_B, lies.steps) == (sharding.batch_sharding(mesh), sharding.replicated(mesh))


def test_seeds_matter_and_repeat(sampler):
    first, again, other = (sampler.generate("x", max_new_tokens=12, seed=seed)[0].tokens for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_stop_tokens_and_stop_strings_end_a_completion_before_themselves(sampler):
    whole = sampler.generate("x", max_new_tokens=12, seed=5)[0]
    stop = whole.tokens[4]
    first = whole.tokens.index(stop)
    stopped = sampler.generate("x", max_new_tokens=12, seed=5, stop_tokens=[stop])[0]
    assert (stopped.tokens, stopped.finish_reason) == (whole.tokens[:first], "stop")

    text = next(c for c in whole.text if c != "\N{REPLACEMENT CHARACTER}")
    both = sampler.generate(["x", "y"], max_new_tokens=12, seed=5, stop_strings=[text])
    assert both[0].text == whole.text[: whole.text.index(text)]
    assert both[0].finish_reason == "stop"
    assert sampler.tokenizer.decode(both[0].tokens).decode(errors="replace") == both[0].text  # none of the stop string


def test_no_limit_means_up_to_the_context_row_by_row(sampler):
    completions = sampler.generate(PROMPTS, temperature=0)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.num_prompt_tokens == 1 + len(prompt)
        assert completion.num_prompt_tokens + len(completion.tokens) == 32


def test_a_cache_that_is_too_small_grows_and_changes_nothing(build):
    all_selected = dict(selection="threshold", cutoffs_L=[-100.0])
    roomy = Sampler(build(**SHALLOW), **all_selected, capacity_L=(1.0,))
    small = Sampler(build(**SHALLOW), **all_selected, capacity_L=SMALL_CACHE)
    assert small.describe(1) != roomy.describe(1)
    assert small.generate(PROMPTS, temperature=0) == roomy.generate(PROMPTS, temperature=0)  # grows while decoding:
    assert small._grow._cache_size() == 1  # 24 -> 32 slots
    small = Sampler(build(**SHALLOW), **all_selected, capacity_L=SMALL_CACHE)
    long = ["a prompt of 25 characters", "x", ""]
    assert small.generate(long, max_new_tokens=3, seed=1) == roomy.generate(long, max_new_tokens=3, seed=1)
    assert small._prefill._cache_size() == 2  # grew for the prompt
    assert small._grow._cache_size() == 0
    assert small.describe(1) == roomy.describe(1)  # and remembers


def test_a_cache_that_must_not_grow_says_so(build):
    small = Sampler(build(**SHALLOW), "threshold", cutoffs_L=[-100.0], capacity_L=SMALL_CACHE, overflow="error")
    for prompts in (["a prompt of 25 characters", "x", ""], PROMPTS):  # while reading it, while decoding
        with pytest.raises(CacheOverflowError, match=r"needs more slots than its routed blocks have \(24 for 32"):
            small.generate(prompts, temperature=0)
    assert len(small.generate(["x", "y", ""], max_new_tokens=6)) == 3  # no reason to refuse
    with pytest.raises(RequestError, match="overflow"):
        Sampler(build(**SHALLOW), overflow="drop")


def test_log_likelihood_by_prefill_equals_the_sum_over_decode_steps(build, tools, sampler):
    texts = ["print(1)\n", "", "class A: pass"]
    at_once, stepwise = (sampler.log_likelihoods(texts, stepwise=by_step) for by_step in (False, True))
    model = build(**SHALLOW)
    for text, one, other in zip(texts, at_once, stepwise, strict=True):
        assert one.shape == other.shape == (len(text),)
        assert abs(one.sum() - other.sum()) < 1e-4
        ids = np.concatenate([[0], sampler.tokenizer.encode(text)])
        logits_TV = tools.uncached(model, "threshold", np.pad(ids, (0, 32 - ids.size))[None].astype(np.int32))[0][0]
        log_p_TV = logits_TV - np.log(np.sum(np.exp(logits_TV), axis=-1, keepdims=True))
        expected = sum(log_p_TV[t, ids[t + 1]] for t in range(len(text)))
        assert abs(one.sum() - expected) < 1e-4


def test_beyond_the_context_is_a_clear_error_or_the_end_of_the_prompt(sampler):
    with pytest.raises(RequestError, match=r"31 tokens with the separator, at most 27 fit"):
        sampler.generate("a" * 30, max_new_tokens=5)
    with pytest.raises(RequestError, match=r"max_new_tokens = 32: must be < 32, the model's context"):
        sampler.generate("", max_new_tokens=32)
    kept = sampler.generate("b" * 10 + "a" * 26, max_new_tokens=5, temperature=0, truncate=True)[0]
    assert kept == sampler.generate("a" * 26, max_new_tokens=5, temperature=0)[0]


def test_a_selection_that_was_not_trained_is_refused(build):
    trained = build().config
    assert trained.causal_selections == ("router", "predictor", "threshold")
    assert causal_selection(trained) == "predictor"
    for selection, changes, message in (
        ("router", {"routing.aux_weight": 0.0}, "not trained.*aux_weight = 0.*this run has predictor, threshold"),
        ("predictor", {"routing.predictor": False}, "not trained"),
        ("topk", {}, "looks at the future"),
        ("best", {}, "does not exist"),
        (None, {"routing.gate": "softmax"}, "softmax"),
        ("router", {"model.layout": "F", "routing.aux_weight": 0.0}, "no routed blocks"),
    ):
        with pytest.raises(ConfigError, match=message):
            Sampler(build(**changes), selection)
    assert causal_selection(build(**{"routing.predictor": False}).config) == "router"


def test_programs_are_bounded_by_buckets_not_by_prompts(build):
    sampler = Sampler(build(**{"model.context": 64, **SHALLOW}), "threshold", capacity_L=(1.0,))
    for length in range(1, 60, 3):
        sampler.generate("a" * length, max_new_tokens=4, temperature=length % 3, top_k=1 + length % 7, seed=length)
    # Prompts and positions round up to 32 or 64: (32, 32), (32, 64), (64, 64); one loop for 32 positions, one for 64.
    assert sampler.num_programs == 3 + 2
    for length in range(2, 60, 3):
        list(sampler.stream("b" * length, max_new_tokens=3, top_p=0.5, stop_strings=["\n"]))
    assert sampler.num_programs == 3 + 2
    sampler.generate(["", ""], max_new_tokens=4)  # the count sees another shape
    assert sampler.num_programs == 3 + 2 + 2
    for prompts in ([""] * 5, ["a", "b"] * 3, ["long" * 5] * 6):  # five fill up to six
        sampler.generate(prompts, max_new_tokens=4)
    assert sampler.num_programs == 3 + 2 + 2 + 2


def test_what_was_warmed_up_compiles_nothing_later(build):
    sampler = Sampler(build(**SHALLOW), "threshold", capacity_L=(1.0,))
    assert sampler.warm_up(batch_sizes=[1, 3], prompt_lengths=[20]) == 4
    sampler.generate("x")
    list(sampler.stream("a longer prompt", temperature=0.5))
    sampler.generate(["x", "y", ""], [Options(seed=1), Options(stop_strings=["a"]), Options(max_new_tokens=3)])
    assert sampler.num_programs == 4
    assert sampler.warm_up(batch_sizes=[3]) == 0
    for bad in (dict(batch_sizes=[0]), dict(prompt_lengths=[32]), dict(prompt_lengths=[True])):
        with pytest.raises(RequestError, match=next(iter(bad))):
            sampler.warm_up(**bad)


def test_a_prompts_completion_depends_on_its_own_options_alone_wherever_it_sits(sampler):
    """Alone, among mates, first or last, in a batch that is filled up or not; and equal prompts give equal texts."""
    mine = Options(seed=7, temperature=0.8, top_k=40, max_new_tokens=10)
    alone = sampler.generate("def f(x):", mine)[0]
    mates = [Options(seed=1), Options(temperature=0, max_new_tokens=3), Options(top_p=0.2), Options(stop_tokens=[70])]
    for place in range(5):
        prompts, options = ["x", "", "yy", "y"], list(mates)
        prompts.insert(place, "def f(x):")
        options.insert(place, mine)
        assert sampler.generate(prompts, options)[place] == alone
    assert len(sampler.generate(["x", ""], mates[:2])[1].tokens) == 3
    same = sampler.generate(["x"] * 3, seed=5, max_new_tokens=10)
    assert same[0] == same[1] == same[2]
    several = sampler.generate(["x"] * 3, [Options(seed=seed, max_new_tokens=10) for seed in (5, 6, 7)])
    assert several[0] == same[0]
    assert len({completion.text for completion in several}) == 3
    # At such a temperature nothing but chance decides: one seed is not one text for all prompts.
    chances = sampler.generate(["x", "y"], temperature=1e9, max_new_tokens=10)
    assert chances[0].tokens != chances[1].tokens


def test_stop_strings_and_stop_tokens_are_of_one_prompt(sampler):
    free = sampler.generate(["x", "x"], max_new_tokens=12, seed=5)[0]
    options = [Options(max_new_tokens=12, seed=5, stop_tokens=[free.tokens[4]]), Options(max_new_tokens=12, seed=5)]
    stopped, whole = sampler.generate(["x", "x"], options)
    assert (stopped.finish_reason, whole) == ("stop", free)
    text = next(c for c in free.text if c != "\N{REPLACEMENT CHARACTER}")
    stopped, whole = sampler.generate(["x", "x"], [Options(max_new_tokens=12, seed=5, stop_strings=[text]), options[1]])
    assert (stopped.finish_reason, whole) == ("stop", free)


def test_batch_sizes_round_up_by_a_third_at_most():
    assert [batch_bucket(n) for n in (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 64, 65)] == [
        1,
        2,
        3,
        4,
        6,
        8,
        12,
        16,
        24,
        32,
        64,
        96,
    ]
    assert all(n <= batch_bucket(n) <= 1.5 * n for n in range(1, 500))


def test_paths_models_and_samplers_are_told_apart(build, sampler):
    model = build(**SHALLOW)
    expected = sampler.generate("x", temperature=0, max_new_tokens=3)
    assert generate(model, "x", temperature=0, max_new_tokens=3, selection="threshold") == expected
    assert generate(sampler, "x", temperature=0, max_new_tokens=3) == expected
    with pytest.raises(RequestError, match="this sampler was made for 'threshold'"):
        generate(sampler, "x", selection="router")
    for bad in (3, None, model.params):
        with pytest.raises(RequestError, match="model: must be a workdir or what restore"):
            Sampler(bad)
    assert sampler.log_likelihoods([]) == []
    for sizes in (
        *(dict(cutoffs_L=bad) for bad in ([0.1, 0.2], 0.5, [math.nan], ["a"])),
        *(dict(capacity_L=bad) for bad in ((0.5, 0.5), [-3.0], [9.0], [math.nan], ["a"])),
    ):
        with pytest.raises(RequestError, match=f"{next(iter(sizes))} = .*must be 1 numbers.*, one per routed block"):
            Sampler(model, "threshold", **sizes)
    with pytest.raises(ConfigError, match=r"selection = \['router'\]: does not exist"):
        Sampler(model, ["router"])
    for sizes in (dict(batch_size=0), dict(batch_size=1.5), dict(batch_size=1, num_positions=-5)):
        with pytest.raises(RequestError, match=f"{list(sizes)[-1]} = .*: must be .*an integer >= 1"):
            sampler.describe(**sizes)
    with pytest.raises(RequestError, match="batch_sizes = 3: must be a list of integers"):
        sampler.warm_up(3)


def test_ids_that_stand_for_nothing_are_never_chosen(build):
    model = build(**{"model.vocab_size": 2000, **SHALLOW})
    completions = Sampler(model).generate(["", "x"], temperature=1e9)
    assert all(0 <= token < 257 for completion in completions for token in completion.tokens)


def test_half_precision_rounds_the_weights_once_and_gives_the_same_numbers(build, tools):
    model = build(**{"model.dtype": "bfloat16", **SHALLOW})
    sampler = Sampler(model, "threshold")
    assert {leaf.dtype.name for leaf in sampler._weights} == {"bfloat16", "float32"}
    text = "print(1)\n"
    ids = np.concatenate([[0], sampler.tokenizer.encode(text)]).astype(np.int32)
    logits_TV = tools.uncached(model, "threshold", np.pad(ids, (0, 32 - ids.size))[None])[0][0]
    log_p_TV = logits_TV - np.log(np.sum(np.exp(logits_TV), axis=-1, keepdims=True))
    expected = [log_p_TV[t, ids[t + 1]] for t in range(len(text))]
    np.testing.assert_allclose(sampler.log_likelihoods(text)[0], expected, atol=0.1)


def test_a_dense_model_generates_too(build):
    model = build(**{"model.layout": "F", "model.depth": 1, "routing.aux_weight": 0.0})
    sampler = Sampler(model)
    assert "1.000 of a dense model's" in sampler.describe(1)
    assert sampler.generate("", temperature=0)[0].routed_fraction == 1.0


def test_the_selection_and_the_memory_are_told(sampler):
    text = sampler.describe(batch_size=2, num_positions=32)
    assert "selection threshold (trained: router, predictor, threshold)" in text
    assert "cache for 2 x 32 positions" in text


def test_requests_without_prompts_or_with_odd_ones(sampler):
    assert sampler.generate([]) == []
    assert len(sampler.generate([5, 6, 7], max_new_tokens=2)) == 1  # ids of one prompt
    assert len(sampler.generate([[5, 6], "x"], max_new_tokens=2)) == 2
    for bad, message in (
        (None, "prompts = None"),
        (3, "prompts = 3"),
        ([None], "prompt = None"),
        (["x", 3], r"prompts\[1\] = 3"),
        (np.array("x"), "prompt = array"),
    ):
        with pytest.raises(RequestError, match=message):
            sampler.generate(bad)
    with pytest.raises(RequestError, match="stop_tokens"):
        sampler.generate("x", stop_tokens=[257])
    with pytest.raises(RequestError, match="temprature: no such option; did you mean temperature"):
        sampler.generate("x", temprature=1.0)


def test_models_differ_by_their_parameters_not_by_their_programs(build, sampler):
    model = build(**SHALLOW)
    other = dataclasses.replace(model, params={**model.params}, cutoffs_L=model.cutoffs_L + 100.0)
    completion = Sampler(other, "threshold").generate("x", temperature=0, max_new_tokens=12)[0]
    assert completion.routed_fraction == 0.0
    assert sampler.generate("x", temperature=0, max_new_tokens=12)[0].routed_fraction > 0.0
