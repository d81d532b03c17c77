"""What a resumed run may change, what it is told, and what it is refused."""

import re

import pytest

from mod_jax import config as config_lib
from mod_jax.config import make_config
from mod_jax.errors import ResumeRefused
from mod_jax.training.resume import check_length, check_same_run, describe_extension

STEPS = {"train.steps": 100}


def saved_by(config, digest="abc", num_steps=100):
    return dict(config=config_lib.to_flat_dict(config), corpus_digest=digest, num_steps=num_steps, mod_jax="0.1.0")


OLD = saved_by(make_config(**STEPS))


def check(changes, digest="abc", num_steps=100, extend=False):
    return check_same_run(OLD, make_config(**{**STEPS, **changes}), digest, num_steps, extend)


def test_free_keys_may_change_without_a_word():
    assert check({"train.log_every": 7, "mesh.fsdp": 2, "data.eval_windows": 9, "model.context": 512}) == []


def test_another_run_is_refused_with_every_difference():
    with pytest.raises(ResumeRefused) as refused:
        check({"model.width": 64, "model.mlp_dim": 1024, "seed": 1, "optimizer.b1": 0.8}, digest="def", extend=True)
    assert str(refused.value).splitlines()[1:-1] == [
        "  model.width: 256 -> 64",
        "  model.head_dim: 64 -> 16",
        "  seed: 0 -> 1",
        "  optimizer.b1: 0.9 -> 0.8",
        "  corpus digest: 'abc' -> 'def'",
    ]


def test_the_digest_decides_about_the_corpus_and_not_how_it_is_spelled():
    spelled = {"data.source": "text:/abs/corpus", "data.text_key": "content"}
    assert check(spelled) == [
        "data.source: 'python_stdlib' -> 'text:/abs/corpus': the same text, corpus digest abc",
        "data.text_key: 'text' -> 'content': the same text, corpus digest abc",
    ]
    with pytest.raises(ResumeRefused, match=r"data.source: .*\n.*\n  corpus digest: 'abc' -> 'def'"):
        check(spelled, digest="def")


def test_the_number_of_steps_decides_about_the_length_and_not_how_it_is_spelled():
    tokens = {"train.steps": 0, "train.tokens": 100 * 8 * 256}
    assert check(tokens)[0] == "train.steps: 100 -> 0: the same 100 steps"
    with pytest.raises(ResumeRefused, match=r"train\.tokens: 0 -> 204800  \(allowed with --extend\)"):
        check(tokens, num_steps=101)
    with pytest.raises(ResumeRefused, match=r"train\.steps: 100 -> 200  \(allowed with --extend\)"):
        check({"train.steps": 200}, num_steps=200)
    assert check({"train.steps": 200}, num_steps=200, extend=True) == []


def test_a_length_that_the_run_has_passed_is_refused():
    check_length(OLD, step=60, num_steps=60)
    with pytest.raises(ResumeRefused, match="the run has done 60 of 100 steps, and is now asked for 59"):
        check_length(OLD, step=60, num_steps=59)


def test_an_extension_says_what_the_learning_rate_does():
    config = make_config(**STEPS, **{"optimizer.learning_rate": 1.0, "optimizer.warmup_fraction": 0.0})
    # After 100 of 100 steps the cosine stands at its end, 0.05. After 100 of 199 it is half way: 0.05 + 0.95 / 2
    # is reached at step index 99 of 0 .. 198, the next lies 1/198 of a half turn lower: 0.525 - 0.475 sin(pi / 198).
    line = describe_extension(OLD, config, step=100, num_steps=199)
    assert re.fullmatch(
        r"EXTENDED from 100 to 199 steps: the learning rate was 5\.00e-02 at step 100, is 5\.17e-01 at step 101 and "
        r"5\.00e-02 at step 199",
        line,
    )
    assert describe_extension(OLD, config, step=50, num_steps=100) is None
