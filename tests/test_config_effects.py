"""Every key does what it declares: a free one leaves start and batches as they are, any other changes the run.

Nothing is compiled: a program is compared as JAX's own text of it, with its constants.
"""

import functools
import json

import jax
import numpy as np
import pytest
from tiny import TINY

from mod_jax import sharding
from mod_jax.config import FIELDS, Config, make_config, may_change
from mod_jax.data import preparation
from mod_jax.data.batches import MODEL_INPUTS, train_batches
from mod_jax.data.corpus import prepare_corpus
from mod_jax.models import flops
from mod_jax.models.model import make_model
from mod_jax.training.inherit import Source
from mod_jax.training.language import Language
from mod_jax.training.step import init_state, make_train_step
from mod_jax.training.teacher import Teacher

VOCAB_SIZE = 300
BASE = {**TINY, "model.depth": 2, "model.scan": False}
ALTERED = {
    "seed": 1,
    "model.vocab_size": 400,
    "model.width": 32,
    "model.depth": 4,
    "model.num_heads": 4,
    "model.num_kv_heads": 1,
    "model.head_dim": 16,
    "model.mlp_dim": 32,
    "model.activation": "gelu",
    "model.gated_mlp": True,
    "model.layout": "F",
    "model.context": 64,
    "model.rope_base": 500.0,
    "model.rope_factors": (1.0, 2.0, 3.0, 4.0),
    "model.qkv_bias": True,
    "model.norm_eps": 1e-5,
    "model.embed_scale": False,
    "model.qk_norm": False,
    "model.tie_embedding": True,
    "model.dtype": "bfloat16",
    "model.remat": "full",
    "model.scan": True,
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
    "data.source": "SOURCE",  # a file of the test
    "data.shards": 1,
    "data.text_key": "other",
    "data.tokenizer": "bpe:300",
    "data.seq_len": 8,
    "data.eval_windows": 4,
    "data.workers": 1,
    "data.cache_dir": "CACHE",
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup_fraction": 0.9,
    "optimizer.final_fraction": 0.5,
    "optimizer.b1": 0.8,
    "optimizer.b2": 0.99,
    "optimizer.eps": 1e-6,
    "optimizer.weight_decay": 0.3,
    "optimizer.clip_norm": 0.5,
    "optimizer.router_learning_rate_scale": 0.1,
    "optimizer.train": "routing",
    "optimizer.lora_rank": 4,
    "optimizer.lora_alpha": 8.0,
    "optimizer.router_weight_decay": 0.1,
    "train.batch_size": 4,
    "train.accumulation": 2,
    "train.steps": 20,
    "train.tokens": 4096,
    "train.flops": 1e12,
    "train.z_loss": 1e-4,
    "train.teacher": "TEACHER",
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


@functools.cache
def program(config: Config) -> str:
    """The training step."""
    model = make_model(config, config.model.vocab_size or VOCAB_SIZE)
    state = jax.eval_shape(lambda: init_state(config, model))
    batch = jax.ShapeDtypeStruct((config.train.batch_size, config.data.seq_len), "int32")
    task = Language(config, model, teacher_of(config))
    teacher = (
        () if task.teacher is None else (task.teacher.abstract_params(sharding.make_mesh(config, jax.devices()[:1])),)
    )
    step = make_train_step(task, flops.train_steps(config, VOCAB_SIZE))
    return text(jax.make_jaxpr(step)(state, dict.fromkeys(MODEL_INPUTS, batch), *teacher))


def teacher_of(config: Config) -> Teacher | None:
    """A dense model of the same shape, as `teacher.find` would give it."""
    if not config.train.teacher:
        return None
    dtype = config.train.teacher_dtype
    dense = make_config(**{**BASE, "model.layout": "F", "routing.predictor": False, "model.dtype": dtype})
    model = make_model(dense, VOCAB_SIZE)
    return Teacher(Source(config.train.teacher, 0, dense, model), dense, None, model, jax.numpy.dtype(dtype))


@functools.cache
def start(config: Config) -> str:
    """How the state before the first step is made."""
    model = make_model(config, config.model.vocab_size or VOCAB_SIZE)
    return text(jax.make_jaxpr(lambda: init_state(config, model))())


def text(closed) -> str:
    constants = [
        np.asarray(constant)
        for constant in closed.consts
        if not jax.dtypes.issubdtype(constant.dtype, jax.dtypes.extended)
    ]
    return f"{closed}\n{[constant.tolist() for constant in constants]}"


@functools.cache
def batches(config: Config) -> bytes:
    """The first steps of the training stream."""
    shape = dict(seq_len=config.data.seq_len, batch_size=config.train.batch_size, seed=config.seed)
    stream = train_batches(prepare_corpus(config.data), **shape)
    return b"".join(batch["tokens_BT"].tobytes() for _, batch in zip(range(2), stream, strict=False))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A file of two texts a line, an empty cache folder, and a prepared corpus of two shards."""
    folder = tmp_path_factory.mktemp("source")
    lines = [json.dumps({"text": f"the first text {i} " * 20, "other": f"another {i} " * 30}) for i in range(40)]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    (folder / "more.jsonl").write_text("\n".join(reversed(lines)))
    preparation.prepare(f"jsonl:{folder}", folder / "prepared", one_in=3)
    return f"jsonl:{folder / 'texts.jsonl'}", str(folder / "cache"), f"tokens:{folder / 'prepared'}"


def test_every_key_is_here():
    assert ALTERED.keys() == FIELDS.keys()


@pytest.mark.parametrize("name", FIELDS)
def test_a_key_does_what_it_declares(name, source):
    base = BASE | ({"data.source": source[0]} if name in ("data.text_key", "data.tokenizer") else {})
    base |= {"data.source": source[2]} if name == "data.shards" else {}
    base |= {"optimizer.train": "lora"} if name.startswith("optimizer.lora_") else {}
    base |= {"train.teacher": "TEACHER"} if name.startswith("train.teacher_") else {}
    base |= {"model.layout": "Ee", "experts.capacity": 0.75} if name.startswith("experts.") else {}
    value = {"SOURCE": source[0], "CACHE": source[1]}.get(ALTERED[name], ALTERED[name])
    change = {name: value} | ({"train.steps": 0} if name in ("train.tokens", "train.flops") else {})
    change |= {"routing.predictor": False} if name == "model.layout" else {}
    old, new = make_config(**base), make_config(**{**base, **change})
    if may_change(name, "free"):
        assert start(new) == start(old)
        assert batches(new) == batches(old)
    else:
        observed = batches, start, program
        assert any(observe(new) != observe(old) for observe in observed)


def test_what_is_compared_does_not_change_by_itself():
    one, other = (make_config(**{**BASE, "train.log_every": every}) for every in (1, 2))
    assert program(one) == program(other)
