"""Small untrained models whose routers are anything but untrained: every causal selection decides, and differently.

Programs are compiled once per config and shared by the tests; parameters are arguments.
"""

import dataclasses
import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from mod_jax.config import Config, make_config, to_flat_dict
from mod_jax.data import tokenizers
from mod_jax.data.tokenizers import ByteTokenizer
from mod_jax.models.blocks import Choice
from mod_jax.models.model import make_model
from mod_jax.sampling import cache as cache_lib
from mod_jax.sampling import stack as stack_lib
from mod_jax.trained import TrainedModel
from mod_jax.training.checkpoint import Checkpointer
from mod_jax.training.step import TrainState

SMALL = {
    "model.width": 16,
    "model.depth": 4,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "data.source": "synthetic",
    "data.seq_len": 32,
    "routing.capacity": 0.25,
    "routing.aux_weight": 0.1,  # so that all three causal selections count as trained
    "train.steps": 4,
}


def build_model(**changes) -> TrainedModel:
    """A model of this config that never was trained."""
    config = make_config(**{**SMALL, **changes})
    model = _model(config)
    rng = np.random.default_rng(0)
    params = jax.tree_util.tree_map_with_path(functools.partial(_draw, rng), model.abstract_params)
    cutoffs_L = jnp.asarray(np.linspace(0.3, -0.2, max(config.num_routed, 1))[: config.num_routed], jnp.float32)
    return TrainedModel(
        config, model, params, cutoffs_L, ByteTokenizer(), step=4, metadata={}, expert_cutoffs_LE=expert_cutoffs(config)
    )


def expert_cutoffs(config: Config) -> jax.Array | None:
    """Cut-offs at which each expert takes about half of the tokens."""
    shape = len(config.expert_depths), config.experts.count
    return jnp.full(shape, 1 / config.experts.count, jnp.float32) if config.experts_choose else None


def choice_of(config: Config, selection: str, cutoffs_L) -> Choice:
    return Choice(selection, cutoffs_L, expert_cutoffs_LE=expert_cutoffs(config))


def _draw(rng: np.random.Generator, path, leaf) -> jax.Array:
    """Parameters by NumPy, which compiles nothing. Scores are of order 1, and predictors say yes as well as no."""
    name, shape = jax.tree_util.keystr(path), leaf.shape
    if "scale_D" in name:
        return jnp.asarray(rng.uniform(0.5, 1.5, shape), leaf.dtype)
    if "bias" in name:
        return jnp.full(shape, -0.3, leaf.dtype)
    stacked = "units" in name
    fan_in = math.prod(shape[stacked:-1]) if len(shape) - stacked > 1 else shape[-1]
    fan_in = shape[stacked] if any(part in name for part in ("q_DNH", "k_DKH", "v_DKH")) else fan_in
    return jnp.asarray(rng.normal(size=shape) * fan_in**-0.5, leaf.dtype)


def save_run(model: TrainedModel, workdir: pathlib.Path) -> pathlib.Path:
    """Makes `workdir` that of a run whose one checkpoint is this model. Returns it."""
    state = TrainState(jnp.int32(model.step), model.params, (), model.cutoffs_L, jnp.int32(0))
    with Checkpointer(workdir / "checkpoints") as checkpointer:
        checkpointer.save(model.step, state, {"config": to_flat_dict(model.config), "corpus_digest": ""})
    tokenizers.save(model.tokenizer, workdir / "tokenizer")
    return workdir


@functools.cache
def _model(config: Config):
    return make_model(config, config.model.vocab_size or ByteTokenizer().vocab_size)


def stack_of(config: Config, params, platform: str = "cpu") -> stack_lib.Stack:
    return stack_lib.split(_model(config).merge(params), platform)


def random_tokens(num_rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 257, (num_rows, length)).astype(np.int32)


@functools.cache
def _prefill_program(config: Config, selection: str, slots: int | None, kept: int):
    @jax.jit
    def run(params, cutoffs_L, tokens_BT, valid_BT):
        stack = stack_of(config, params)
        B, T = tokens_BT.shape
        sizes = tuple(slots or T if block.routed else T for block in config.blocks)
        cache = cache_lib.init_cache(config, B, sizes)
        kept_L = (kept,) * config.num_routed
        output = stack_lib.prefill(stack, tokens_BT, valid_BT, cache, choice_of(config, selection, cutoffs_L), kept_L)
        return stack.logits(output.x_BTD), output.selected_LBT, output.cache

    return run


@functools.cache
def _decode_program(config: Config, selection: str, rows: int):
    @jax.jit
    def run(params, cutoffs_L, tokens_BT, lengths_B, cache):
        stack = stack_of(config, params)
        B, T = tokens_BT.shape

        def step(cache, offset):
            positions_B = lengths_B + offset
            tokens_B1 = jnp.take_along_axis(tokens_BT, jnp.minimum(positions_B, T - 1)[:, None], axis=1)
            rows_L = (min(rows, B),) * config.num_routed
            live_B = positions_B < T
            choice = choice_of(config, selection, cutoffs_L)
            output = stack_lib.decode(stack, tokens_B1[:, 0], positions_B, live_B, cache, choice, rows_L)
            return output.cache, (positions_B, stack.logits(output.x_BTD)[:, 0], output.selected_LBT[..., 0])

        cache, steps = jax.lax.scan(step, cache, jnp.arange(T, dtype=jnp.int32))
        return cache, *steps

    return run


@functools.cache
def _uncached_program(config: Config, selection: str):
    def run(params, cutoffs_L, tokens_BT):
        return _model(config).run(params, tokens_BT, choice=choice_of(config, selection, cutoffs_L))

    return jax.jit(run)


def prefill(model: TrainedModel, selection: str, tokens_BT, valid_BT=None, *, slots=None, kept=3):
    """(logits, selected, cache) of `stack.prefill`."""
    valid_BT = np.ones(tokens_BT.shape, bool) if valid_BT is None else valid_BT
    run = _prefill_program(model.config, selection, slots, kept)
    logits_BTV, selected_LBT, cache = run(model.params, model.cutoffs_L, tokens_BT, valid_BT)
    return np.asarray(logits_BTV), np.asarray(selected_LBT), cache


def replay(model: TrainedModel, selection: str, tokens_BT, lengths_B, *, slots=None, kept=3, rows=1):
    """(logits, selected, cache) of: prefill each row's first `lengths_B` tokens, then decode the others one by one,
    every row at its own position."""
    T = tokens_BT.shape[1]
    lengths_B = np.asarray(lengths_B, np.int32)
    valid_BT = np.arange(T)[None] < lengths_B[:, None]
    logits_BTV, selected_LBT, cache = prefill(model, selection, tokens_BT, valid_BT, slots=slots, kept=kept)
    run = _decode_program(model.config, selection, rows)
    cache, *steps = run(model.params, model.cutoffs_L, tokens_BT, lengths_B, cache)
    logits_BTV, selected_LBT = logits_BTV.copy(), selected_LBT.copy()
    for positions_B, logits_BV, selected_LB in zip(*map(np.asarray, steps), strict=True):
        for row in np.flatnonzero(positions_B < T):
            logits_BTV[row, positions_B[row]] = logits_BV[row]
            selected_LBT[:, row, positions_B[row]] = selected_LB[:, row]
    return logits_BTV, selected_LBT, cache


def uncached(model: TrainedModel, selection: str, tokens_BT):
    """(logits, selected) of the Decoder itself."""
    output = _uncached_program(model.config, selection)(model.params, model.cutoffs_L, jnp.asarray(tokens_BT))
    selected = output.routing.selected_BT if output.routing is not None else np.zeros((0, *tokens_BT.shape), bool)
    return np.asarray(output.logits_BTV), np.asarray(selected)


def changed(model: TrainedModel, name: str, value) -> TrainedModel:
    """The model with every parameter of this name filled with `value`."""
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.full_like(x, value) if name in jax.tree_util.keystr(path) else x, model.params
    )
    return dataclasses.replace(model, params=params)
