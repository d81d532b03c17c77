"""Tokens per second of a routed model against a dense one of the same depth, beside what FLOPs and bytes promise.

    python experiments/sampling_speed.py                            # about ten minutes on two idle cores
    python experiments/sampling_speed.py --workdir=runs/mod         # a trained model's size and routing decisions

Both models run the decoding loop of `sampling.generate` (one compiled, donated program; no stopping), interleaved A B A
B in one process; times are medians, with minima in brackets. Without --workdir the weights are random, and the cut-offs
are calibrated so that 12.5 % of random tokens are selected; what was really selected is counted, and gives the ratios.

`FLOPs` and `bytes` are routed / dense per step: FLOPs at the lengths really attended to; bytes of the weights and cache
slots that the program reads (a routed block's weights once per pass). `time / ideal` is the time ratio over the FLOP
ratio: 1 means that routing itself costs nothing.
"""

import dataclasses
import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from flax import nnx

from mod_jax import host, sampling
from mod_jax.config import make_config
from mod_jax.data.tokenizers import ByteTokenizer
from mod_jax.evaluation import budget
from mod_jax.models import flops
from mod_jax.models.model import make_model
from mod_jax.sampling import cache, causal
from mod_jax.sampling.choice import Options, choose, make_knobs, row_keys

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a trained run; default: random weights.")
WIDTH = flags.DEFINE_integer("width", 512, "D, without --workdir.")
DEPTH = flags.DEFINE_integer("depth", 12, "L, without --workdir.")
CAPACITY = flags.DEFINE_float("capacity", 0.125, "Fraction selected, without --workdir.")
CONTEXT = flags.DEFINE_integer("context", 512, "Positions of the cache, without --workdir.")
PROMPT = flags.DEFINE_integer("prompt", 64, "Prompt tokens.")
NEW = flags.DEFINE_integer("new", 64, "Tokens decoded per timing.")
BATCHES = flags.DEFINE_list("batches", ["1", "8", "64"], "Batch sizes.")
ROUNDS = flags.DEFINE_integer("rounds", 7, "Interleaved timings.")
ROWS = flags.DEFINE_integer("rows", 0, "Rows per pass of a routed block; 0: as `generate` chooses.")


class Timed(NamedTuple):
    seconds: list[float]
    selected_SLB: np.ndarray  # per decoding step


def main(_) -> None:
    host.prepare_cpu()
    logging.set_verbosity(logging.ERROR)
    routed, capacity_L = routed_model()
    dense = untrained(dataclasses.replace(routed.config, model=dataclasses.replace(routed.config.model, layout="F")))
    m = routed.config.model
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}; D {m.width}, {m.depth} blocks {m.layout}, context "
        f"{m.context}, {PROMPT.value} + {NEW.value} tokens; "
        + (f"step {routed.step} of {WORKDIR.value}" if WORKDIR.value else "random weights, calibrated cut-offs")
    )
    print("| batch | selected | passes | dense tok/s | routed tok/s | time ratio | FLOPs | bytes | time / ideal |")
    print("|---|---|---|---|---|---|---|---|---|")
    for batch_size in map(int, BATCHES.value):
        rows_L = tuple(ROWS.value or causal.rows_per_pass(batch_size, c, jax.default_backend()) for c in capacity_L)
        rows_L = tuple(min(rows, batch_size) for rows in rows_L)
        a, b = decoder(dense, batch_size, (), ()), decoder(routed, batch_size, rows_L, capacity_L)
        timed_a, timed_b = Timed([], a()[1]), Timed([], b()[1])
        for _ in range(ROUNDS.value):
            timed_a.seconds.append(a()[0])
            timed_b.seconds.append(b()[0])
        print(row(routed, batch_size, rows_L, capacity_L, timed_a, timed_b), flush=True)


def routed_model() -> tuple[sampling.TrainedModel, tuple[float, ...]]:
    """The model, and the fraction that each routed block is expected to select."""
    if WORKDIR.value:
        model = sampling.restore(WORKDIR.value)
        return model, tuple(block.capacity for block in model.config.blocks if block.kind == "R")
    shape = {"model.width": WIDTH.value, "model.depth": DEPTH.value, "model.num_heads": max(1, WIDTH.value // 64)}
    config = make_config(
        **shape, **{"routing.capacity": CAPACITY.value, "data.seq_len": CONTEXT.value, "train.steps": 1}
    )
    model = untrained(config)
    shifted = budget.calibrate(model, CAPACITY.value, [random_batch(8, min(256, CONTEXT.value))])
    return dataclasses.replace(model, cutoffs_L=jnp.asarray(shifted.cutoffs_L)), shifted.capacity_L


def untrained(config) -> sampling.TrainedModel:
    tokenizer = ByteTokenizer()
    model = make_model(config, config.model.vocab_size or tokenizer.vocab_size)
    cutoffs_L = jnp.zeros(config.num_routed)
    return sampling.TrainedModel(config, model, jax.jit(model.init)(), cutoffs_L, tokenizer, step=0, metadata={})


def random_batch(num_rows: int, length: int) -> dict[str, np.ndarray]:
    tokens_BT = np.random.default_rng(0).integers(1, 257, (num_rows, length)).astype(np.int32)
    positions_BT = np.broadcast_to(np.arange(length, dtype=np.int32), tokens_BT.shape)
    return dict(tokens_BT=tokens_BT, positions_BT=positions_BT, segment_ids_BT=np.ones_like(tokens_BT))


def decoder(model: sampling.TrainedModel, batch_size: int, rows_L, capacity_L):
    """A function () -> (seconds of NEW decoding steps, what they selected); the prompt is run outside the clock."""
    config, layers = model.config, split(model)
    leaves, structure = jax.tree.flatten(layers)
    selection = "threshold" if config.num_routed else "none"
    slots = cache.slot_counts(config, config.model.context, capacity_L or None)
    knobs, keys_B = make_knobs([Options()] * batch_size), row_keys(range(batch_size))
    prompt_BT = random_batch(batch_size, PROMPT.value)["tokens_BT"]
    kept_L = tuple(cache.routed_slots(PROMPT.value, capacity) for capacity in capacity_L)

    @jax.jit
    def start(leaves):
        layers = jax.tree.unflatten(structure, leaves)
        empty, valid_BT = cache.init_cache(config, batch_size, slots), jnp.ones(prompt_BT.shape, bool)
        return causal.prefill(layers, prompt_BT, valid_BT, empty, selection, model.cutoffs_L, kept_L).cache

    def decode(leaves, block_caches):
        layers = jax.tree.unflatten(structure, leaves)

        def step(carry, position):
            tokens_B, block_caches = carry
            positions_B, live_B = jnp.full(batch_size, position, jnp.int32), jnp.ones(batch_size, bool)
            out = causal.decode_step(
                layers, tokens_B, positions_B, live_B, block_caches, selection, model.cutoffs_L, rows_L
            )
            logits_BV = layers.logits(out.x_BTD)[:, 0]
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys_B, position)
            return (choose(logits_BV, knobs, keys), out.cache), out.selected_LBT[..., 0]

        positions = PROMPT.value + jnp.arange(NEW.value, dtype=jnp.int32)
        return jax.lax.scan(step, (jnp.zeros(batch_size, jnp.int32), block_caches), positions)

    decode = jax.jit(decode, donate_argnums=1)

    def run() -> tuple[float, np.ndarray]:
        block_caches = jax.block_until_ready(start(leaves))
        begin = time.perf_counter()
        (_, block_caches), selected_SLB = jax.block_until_ready(decode(leaves, block_caches))
        seconds = time.perf_counter() - begin
        if cache.overflowed(block_caches):
            raise app.UsageError("a routed cache overflowed, so this would time a wrong result: raise --context")
        return seconds, np.asarray(selected_SLB)

    return run


def split(model: sampling.TrainedModel) -> causal.Layers:
    def run(params):
        return causal.split_layers(nnx.merge(model.model.graphdef, nnx.State(params)), jax.default_backend())

    return jax.jit(run)(model.params)


def row(model, batch_size: int, rows_L, capacity_L, dense: Timed, routed: Timed) -> str:
    """One line of the table."""
    config = model.config
    fraction_L = routed.selected_SLB.mean(axis=(0, 2))
    passes_L = np.ceil(routed.selected_SLB.sum(axis=2) / np.array(rows_L)).mean(axis=0)
    length = PROMPT.value + NEW.value / 2  # attended to, on average
    m, vocab_size = config.model, config.model.vocab_size or model.tokenizer.vocab_size

    linear = flops.block_flops(config, 1)[0]
    slot = 4 * m.num_heads * m.head_dim  # FLOPs of attending to one slot
    unembed = 2 * m.width * vocab_size
    full = linear + slot * length
    some = sum(f * (linear + slot * f * length) + 2 * m.width for f in fraction_L)
    num_full = config.model.depth - config.num_routed
    flop_ratio = (num_full * full + some + unembed) / (m.depth * full + unembed)

    weights, slot_bytes = linear / 2 * 4, 2 * m.num_kv_heads * m.head_dim * 4
    slots = cache.slot_counts(config, m.context, capacity_L)
    full = weights + batch_size * m.context * slot_bytes
    some = sum(
        p * (weights + rows * slots[depth] * slot_bytes)
        for p, rows, depth in zip(passes_L, rows_L, config.routed_depths, strict=True)
    )
    table = unembed / 2 * 4
    byte_ratio = (num_full * full + some + table) / (m.depth * full + table)

    tokens = batch_size * NEW.value
    a, b = statistics.median(dense.seconds), statistics.median(routed.seconds)
    least = min(routed.seconds) / min(dense.seconds)
    return (
        f"| {batch_size} | {fraction_L.mean():.3f} | {passes_L.mean():.2f} | {tokens / a:.0f} | {tokens / b:.0f} | "
        f"{b / a:.3f} ({least:.3f}) | {flop_ratio:.3f} | {byte_ratio:.3f} | {b / a / flop_ratio:.2f} "
        f"({least / flop_ratio:.2f}) |"
    )


if __name__ == "__main__":
    app.run(main)
