"""Every refusal names key, value and range; a config survives JSON; the fingerprint moves exactly when it must."""

import ast
import dataclasses
import inspect
import json
import math
import pathlib
import re

import ml_collections
import pytest

import mod_jax
from mod_jax import config as config_lib
from mod_jax.config import FIELDS, Config, default_config, make_config, may_change
from mod_jax.errors import ConfigError
from mod_jax.layout import BlockSpec
from mod_jax.sharding import AXES

STEPS = {"train.steps": 10}

# One other valid value for every key.
ALTERED = {
    "seed": 1,
    "model.vocab_size": 300,
    "model.width": 128,
    "model.depth": 6,
    "model.num_heads": 8,
    "model.num_kv_heads": 2,
    "model.head_dim": 32,
    "model.mlp_dim": 512,
    "model.activation": "gelu",
    "model.gated_mlp": True,
    "model.layout": "FFR",
    "model.context": 512,
    "model.rope_base": 5e5,
    "model.rope_factors": (2.0,) * 32,
    "model.qkv_bias": True,
    "model.norm_eps": 1e-5,
    "model.embed_scale": False,
    "model.qk_norm": not FIELDS["model.qk_norm"].default,
    "model.tie_embedding": True,
    "model.dtype": "bfloat16",
    "model.remat": "full",
    "model.scan": False,
    "routing.capacity": 0.5,
    "routing.score": "position",
    "routing.gate": "sigmoid",
    "routing.skipped_keys": "kept",
    "routing.router_input": "raw",
    "routing.router_init_scale": 0.2,
    "routing.topk_per": "document",
    "routing.predictor": False,
    "routing.predictor_weight": 0.5,
    "routing.aux_weight": 0.1,
    "routing.cutoff_decay": 0.9,
    "experts.count": 4,
    "experts.chosen": 2,
    "experts.hidden": 32,
    "experts.capacity": 0.5,
    "experts.noop": 2,
    "experts.choice": "expert",
    "experts.overflow": "paced",
    "experts.balance_weight": 0.01,
    "experts.z_weight": 0.1,
    "data.source": "synthetic",
    "data.shards": 1,
    "data.text_key": "content",
    "data.tokenizer": "bpe:512",
    "data.seq_len": 128,
    "data.eval_windows": 64,
    "data.workers": 2,
    "data.cache_dir": "/somewhere",
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup_fraction": 0.1,
    "optimizer.final_fraction": 0.0,
    "optimizer.b1": 0.8,
    "optimizer.b2": 0.99,
    "optimizer.eps": 1e-6,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_norm": 0.5,
    "optimizer.router_learning_rate_scale": 0.1,
    "optimizer.train": "routing",
    "optimizer.lora_rank": 4,
    "optimizer.lora_alpha": 32.0,
    "optimizer.router_weight_decay": 0.1,
    "train.batch_size": 16,
    "train.accumulation": 2,
    "train.steps": 20,
    "train.tokens": 4096,
    "train.flops": 1e12,
    "train.z_loss": 1e-4,
    "train.teacher": "runs/dense",
    "train.teacher_weight": 0.5,
    "train.teacher_dtype": "bfloat16",
    "train.loss_chunk": 64,
    "train.max_bad_steps": 3,
    "train.log_every": 1,
    "train.eval_every": 100,
    "train.save_every": 100,
    "train.keep": 3,
    "train.tracker": "tensorboard",
    "mesh.data": 1,
    "mesh.fsdp": 2,
    "mesh.tensor": 2,
    "mesh.expert": 2,
}


def alter(name) -> Config:
    length = {"train.steps": 0} if name in ("train.tokens", "train.flops") else {}
    return make_config(**{**STEPS, **length, name: ALTERED[name]})


def test_the_altered_values_cover_every_key():
    assert set(ALTERED) == set(FIELDS)
    assert [name for name in FIELDS if ALTERED[name] == FIELDS[name].default] == []


# What is refused: the changes, and what the message must hold beside the first key


REFUSALS = [
    # no single value: wrong type, wrong range, not finite, unknown choice
    ({"model.width": 0}, "0", "[1, 1048576]"),
    ({"model.width": 2.5}, "2.5", "integer", "[1, "),
    ({"model.width": "wide"}, "'wide'", "integer", "[1, "),
    ({"model.width": True}, "True", "integer"),
    ({"model.width": None}, "None", "integer"),
    ({"model.width": math.nan}, "nan", "integer", "[1, "),
    ({"model.width": math.inf}, "inf", "integer", "[1, "),
    ({"model.width": {}}, "{}", "integer"),
    ({"model.depth": -1}, "-1", "[1, 4096]"),
    ({"model.rope_base": 1.0}, "1.0", "> 1"),
    ({"model.scan": 1}, "1", "True or False"),
    ({"model.rope_factors": 2.0}, "2.0", "a list of numbers > 0"),
    ({"model.rope_factors": (1.0, 0.0)}, "(1.0, 0.0)", "> 0"),
    ({"model.rope_factors": (1.0, 2.0)}, "(1.0, 2.0)", "model.head_dim / 2 = 32", "found 2"),
    ({"model.gated_mlp": True, "model.layout": "FE"}, "True", "'FE'", "experts"),
    ({"model.norm_eps": 0}, "0", "> 0"),
    ({"model.dtype": "float16"}, "'float16'", "float32, bfloat16"),
    ({"model.remat": None}, "None", "none, dots, full"),
    ({"model.activation": "swish"}, "'swish'", "relu_squared, gelu, silu"),
    ({"routing.score": "random"}, "'random'", "learned, stochastic, position, frozen"),
    ({"routing.gate": "relu"}, "'relu'", "raw, sigmoid, tanh, one, softmax"),
    ({"routing.aux_weight": -0.1}, "-0.1", ">= 0"),
    ({"routing.router_init_scale": 0}, "0", "> 0"),  # R17: every score would tie
    ({"routing.cutoff_decay": 1.0}, "1.0", "[0, 0.9999]"),
    ({"data.source": 3}, "3", "a string"),
    ({"data.seq_len": 1}, "1", "[2, "),
    ({"data.workers": 65}, "65", "[0, 64]"),
    ({"optimizer.learning_rate": 0.0}, "0.0", "> 0"),
    ({"optimizer.warmup_fraction": 1.5}, "1.5", "[0, 1]"),
    ({"train.keep": 0}, "0", ">= 1"),
    ({"mesh.data": -2}, "-2", ">= -1"),
    ({"seed": -1}, "-1", "[0, "),
    ({"seed": 2**31}, str(2**31), "[0, "),
    # relations between keys
    ({"model.num_heads": 3}, "3", "model.width = 256"),
    ({"model.num_kv_heads": 3}, "3", "model.num_heads = 4"),
    ({"model.head_dim": 7}, "7", "even"),
    ({"model.layout": "FRX"}, "'FRX'", "F (full) and R (routed)"),
    ({"model.layout": ""}, "''", "F (full) and R (routed)"),
    ({"model.layout": "fr"}, "'fr'", "F (full) and R (routed)"),
    ({"data.seq_len": 512, "model.context": 256}, "512", "model.context = 256"),
    ({"routing.capacity": (0.5, 0.5), "model.depth": 8}, "(0.5, 0.5)", "4, one per routed block"),
    ({"routing.aux_weight": 0.1, "model.layout": "F"}, "0.1", "no routed block"),
    ({"routing.predictor": True, "routing.score": "stochastic"}, "True", "noise"),
    ({"routing.aux_weight": 0.1, "routing.score": "frozen"}, "0.1", "'frozen'"),
    ({"routing.gate": "sigmoid", "routing.score": "frozen"}, "'sigmoid'", "'raw'"),
    ({"optimizer.train": "routing", "model.layout": "F"}, "'routing'", "'all'"),
    ({"optimizer.router_weight_decay": 0.1, "routing.score": "frozen"}, "0.1", "not trained"),
    ({"train.accumulation": 3}, "3", "train.batch_size = 8"),
    ({"mesh.fsdp": -1, "mesh.data": -1}, "-1", "at most one"),
    ({"mesh.fsdp": 0}, "0", ">= 1"),
    ({"mesh.tensor": 3}, "3", "model.num_kv_heads = 4"),
]


@pytest.mark.parametrize(("changes", "fragments"), [(c, f) for c, *f in REFUSALS], ids=lambda v: str(v)[:60])
def test_a_refusal_names_key_value_and_range(changes, fragments):
    key = next(iter(changes))
    with pytest.raises(ConfigError) as refusal:
        config_lib.from_flat_dict({**STEPS, **changes})
    message = str(refusal.value)
    assert message.startswith(f"config.{key} = {fragments[0]}: ")
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize("capacity", [0, 0.0, -0.5, 1.5, math.nan, "half", None, True, (), (0.5, 0.0, 0.5, 0.5)])
def test_a_capacity_outside_its_range_is_refused_by_name(capacity):
    with pytest.raises(ConfigError, match=r"^config\.routing\.capacity = .*: must be .*number"):
        make_config(**STEPS, **{"routing.capacity": capacity})


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, "none"),
        ({"train.steps": 3, "train.tokens": 99}, "train.steps = 3, train.tokens = 99"),
        ({"train.tokens": 99, "train.flops": 1e9}, "train.tokens = 99, train.flops = 1e+09"),
    ],
)
def test_exactly_one_run_length(changes, found):
    with pytest.raises(ConfigError, match=re.escape(f"exactly one of steps, tokens, flops must be > 0; found {found}")):
        make_config(**changes)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"model": {"widht": 64}}, "config.model.widht: unknown key; did you mean config.model.width?"),
        ({"capacity": 0.5}, "config.capacity: unknown key; did you mean config.routing.capacity?"),
        ({"model": {"width": {"value": 64}}}, "config.model.width.value: unknown key"),
        ({"modle": {}}, "config.modle: unknown key"),
        ({"model": 3}, "config.model = 3: must be a section"),
    ],
)
def test_unknown_keys_and_shapes_of_tree(tree, message):
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        config_lib.from_config_dict({"train": {"steps": 1}, **tree})
    if "did you mean" in message:
        (name,) = config_lib._flatten(tree)
        with pytest.raises(ConfigError, match="^" + re.escape(message)):
            make_config(**{name: 1})


# What is accepted, and what it becomes


def test_the_default_starts_with_a_full_block():
    blocks = make_config(**STEPS).blocks
    assert [block.kind for block in blocks] == list("FRFRFRFR")
    assert {block.capacity for block in blocks if block.kind == "R"} == {0.125}


@pytest.mark.parametrize(
    ("capacity", "stored"), [(0.5, 0.5), (1, 1.0), ([0.25, 1], (0.25, 1.0)), ((0.5, 0.5), (0.5, 0.5))]
)
def test_capacity_is_one_number_or_one_per_routed_block(capacity, stored):
    config = make_config(**STEPS, **{"model.depth": 4, "routing.capacity": capacity})
    assert config.routing.capacity == stored
    assert type(config.routing.capacity) is type(stored)
    first, second = stored if isinstance(stored, tuple) else (stored, stored)
    assert config.blocks == (
        BlockSpec("F", 1.0),
        BlockSpec("R", first),
        BlockSpec("F", 1.0),
        BlockSpec("R", second),
    )


def test_a_list_of_one_capacity_is_that_number():
    one = make_config(**STEPS, **{"routing.capacity": [0.5]})
    assert one == make_config(**STEPS, **{"routing.capacity": 0.5})


def test_blocks_follow_the_layout_cycled_over_depth():
    config = make_config(**STEPS, **{"model.layout": "FFR", "model.depth": 7})
    assert "".join(block.kind for block in config.blocks) == "FFRFFRF"
    assert config.num_routed == 2
    assert config.routed_depths == (2, 5)


def test_zeros_are_derived():
    config = make_config(**STEPS, **{"model.width": 96, "model.num_heads": 6, "data.seq_len": 40})
    assert config.model.num_kv_heads == 6
    assert config.model.head_dim == 16  # 96 / 6
    assert config.model.mlp_dim == 384  # 4 * 96
    assert config.model.context == 40
    free_head = make_config(**STEPS, **{"model.width": 100, "model.num_heads": 3, "model.head_dim": 64})
    assert free_head.model.head_dim == 64


def test_whole_floats_become_integers_and_integers_floats():
    config = make_config(**{"train.steps": 1e3, "optimizer.clip_norm": 2})
    assert (config.train.steps, type(config.train.steps)) == (1000, int)
    assert (config.optimizer.clip_norm, type(config.optimizer.clip_norm)) == (2.0, float)


@pytest.mark.parametrize(
    ("changes", "selections"),
    [
        ({}, ("predictor", "threshold")),
        ({"routing.aux_weight": 0.1, "routing.predictor": False}, ("router", "threshold")),
        ({"routing.gate": "softmax"}, ()),
        ({"model.layout": "F"}, ()),
    ],
)
def test_the_causal_selections_are_those_that_training_prepares(changes, selections):
    assert make_config(**STEPS, **changes).causal_selections == selections


def test_a_config_is_frozen_and_hashable():
    config = make_config(**STEPS)
    assert hash(config) == hash(make_config(**STEPS))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.width = 3


def test_the_config_dict_takes_any_literal_and_is_judged_at_the_door():
    config = default_config()
    assert isinstance(config, ml_collections.ConfigDict)
    config.routing.capacity = "much"  # what a command line may hand over
    config.train.steps = 3
    with pytest.raises(ConfigError, match=r"config\.routing\.capacity = 'much'"):
        config_lib.from_config_dict(config)
    config.routing.capacity = 0.5
    config.model.widht = 64
    with pytest.raises(ConfigError, match=r"config\.model\.widht: unknown key; did you mean config\.model\.width"):
        config_lib.from_config_dict(config)


# Identity


@pytest.mark.parametrize("name", FIELDS)
def test_round_trip_through_json_and_the_fingerprint_moves_exactly_with_what_is_learned(name):
    base, config = make_config(**STEPS), alter(name)
    again = config_lib.from_flat_dict(json.loads(json.dumps(config_lib.to_flat_dict(config))))
    assert again == config
    assert again != base
    assert config_lib.fingerprint(again) == config_lib.fingerprint(config)
    assert name in config_lib.difference(base, config)
    assert config_lib.difference(config, again) == {}
    assert (config_lib.fingerprint(config) == config_lib.fingerprint(base)) is may_change(name, "free")


def test_free_keys_say_how_a_run_is_computed_or_watched():
    free = {name: field.metadata["why"] for name, field in FIELDS.items() if may_change(name, "free")}
    assert sorted(free) == [
        "data.cache_dir",
        "data.eval_windows",
        "data.workers",
        "mesh.data",
        "mesh.expert",
        "mesh.fsdp",
        "mesh.tensor",
        "model.context",
        "model.remat",
        "model.scan",
        "train.accumulation",
        "train.eval_every",
        "train.keep",
        "train.log_every",
        "train.loss_chunk",
        "train.max_bad_steps",
        "train.save_every",
        "train.tracker",
    ]
    assert all(free.values())
    assert not any(field.metadata["why"] for name, field in FIELDS.items() if name not in free)


def test_each_verb_lets_change_what_those_before_it_do():
    of_interest = ("train.log_every", "data.source", "train.steps", "optimizer.b1", "model.width")
    assert [[may_change(name, change) for name in of_interest] for change in config_lib.CHANGES] == [
        [True, False, False, False, False],
        [True, True, False, False, False],
        [True, True, True, False, False],
        [True, True, True, True, False],
        [True, True, True, True, True],
    ]


def test_a_new_key_at_its_default_leaves_every_fingerprint_as_it_was(monkeypatch):
    """A made-up key: what a later version of this program will do."""
    old = {name: alter(name) for name in FIELDS}
    old_prints = {name: config_lib.fingerprint(config) for name, config in old.items()}
    saved = {name: json.loads(json.dumps(config_lib.to_flat_dict(config))) for name, config in old.items()}

    made_up = ("made_up", int, config_lib._key(7, "a key of a later version", low=0))
    later = dataclasses.make_dataclass("ModelConfig", [made_up], bases=(config_lib.ModelConfig,), frozen=True)
    monkeypatch.setitem(config_lib._SECTIONS, "model", later)
    monkeypatch.setitem(config_lib.FIELDS, "model.made_up", dataclasses.fields(later)[-1])
    for name, flat in saved.items():
        config = config_lib.from_flat_dict(flat)
        assert config.model.made_up == 7
        assert config_lib.fingerprint(config) == old_prints[name]
    changed = make_config(**STEPS, **{"model.made_up": 8})
    assert config_lib.fingerprint(changed) != config_lib.fingerprint(make_config(**STEPS))


# Not to be edited but by additions: where a default changed, one fingerprint would stand for two runs.
DEFAULTS = {
    "seed": 0,
    "model.vocab_size": 0,
    "model.width": 256,
    "model.depth": 8,
    "model.num_heads": 4,
    "model.num_kv_heads": 0,
    "model.head_dim": 0,
    "model.mlp_dim": 0,
    "model.activation": "relu_squared",
    "model.gated_mlp": False,
    "model.layout": "FR",
    "model.rope_base": 10_000.0,
    "model.rope_factors": (),
    "model.qkv_bias": False,
    "model.norm_eps": 1e-6,
    "model.embed_scale": True,
    "model.qk_norm": True,
    "model.tie_embedding": False,
    "model.dtype": "float32",
    "routing.capacity": 0.125,
    "routing.score": "learned",
    "routing.gate": "raw",
    "routing.skipped_keys": "none",
    "routing.router_input": "normed",
    "routing.router_init_scale": 0.1,
    "routing.topk_per": "row",
    "routing.predictor": True,
    "routing.predictor_weight": 1.0,
    "routing.aux_weight": 0.0,
    "routing.cutoff_decay": 0.98,
    "experts.count": 8,
    "experts.chosen": 1,
    "experts.hidden": 0,
    "experts.capacity": 1.25,
    "experts.noop": 0,
    "experts.choice": "token",
    "experts.overflow": "position",
    "experts.balance_weight": 0.1,
    "experts.z_weight": 1e-3,
    "data.source": "python_stdlib",
    "data.shards": 0,
    "data.text_key": "text",
    "data.tokenizer": "bytes",
    "data.seq_len": 256,
    "optimizer.learning_rate": 3e-3,
    "optimizer.warmup_fraction": 0.05,
    "optimizer.final_fraction": 0.05,
    "optimizer.b1": 0.9,
    "optimizer.b2": 0.95,
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.1,
    "optimizer.clip_norm": 1.0,
    "optimizer.router_learning_rate_scale": 1.0,
    "optimizer.train": "all",
    "optimizer.lora_rank": 16,
    "optimizer.lora_alpha": 16.0,
    "optimizer.router_weight_decay": 0.0,
    "train.batch_size": 8,
    "train.steps": 0,
    "train.tokens": 0,
    "train.flops": 0.0,
    "train.z_loss": 0.0,
    "train.teacher": "",
    "train.teacher_weight": 1.0,
    "train.teacher_dtype": "float32",
}


def test_a_default_that_is_learned_from_never_changes():
    assert {n: f.default for n, f in FIELDS.items() if not may_change(n, "free")} == DEFAULTS
    derived = make_config(**STEPS, **{"model.width": 96, "model.num_heads": 6}).model
    assert (derived.num_kv_heads, derived.head_dim, derived.mlp_dim) == (6, 16, 384)


def test_fingerprints_stay_between_versions():
    assert config_lib.fingerprint(make_config(**STEPS)) == "71556854b027"
    odd = {"train.flops": 1e12, "routing.capacity": (0.5, 0.25), "model.depth": 4, "model.dtype": "bfloat16", "seed": 3}
    assert config_lib.fingerprint(make_config(**odd)) == "cd494c8cc36f"


def test_two_spellings_of_one_config_have_one_fingerprint():
    spelled = make_config(**STEPS, **{"model.num_kv_heads": 4, "model.mlp_dim": 1024, "optimizer.clip_norm": 1})
    assert spelled == make_config(**STEPS)
    assert re.fullmatch("[0-9a-f]{12}", config_lib.fingerprint(spelled))
    per_block = make_config(**STEPS, **{"routing.capacity": [0.125] * 4})
    assert config_lib.fingerprint(per_block) != config_lib.fingerprint(make_config(**STEPS, **{"seed": 1}))


# T15


def read_attributes(sources) -> set[str]:
    """Every name that is read as `something.name`."""
    nodes = (node for source in sources for node in ast.walk(ast.parse(source)))
    return {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}


def test_every_key_is_read_somewhere():
    package = pathlib.Path(mod_jax.__file__).parent
    sources = [path.read_text() for path in package.rglob("*.py") if path.name != "config.py"]
    # The properties of Config (such as `blocks`, from layout and capacity) read for everybody.
    read = read_attributes([*sources, inspect.getsource(Config)])
    read |= set(AXES)  # read by name: getattr(config.mesh, axis)
    assert [name for name in FIELDS if name.split(".")[-1] not in read] == []


def test_a_key_that_is_only_declared_or_written_is_seen():
    assert read_attributes(["rate = config.optimizer.b1", "config.train.keep = 3; text_key = 'text'"]) == {
        "optimizer",
        "b1",
        "train",
    }
