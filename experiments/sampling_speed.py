"""Tokens per second of a routed model against a dense one of the same depth, beside what FLOPs promise.

    python experiments/sampling_speed.py                            # about ten minutes on two idle cores
    python experiments/sampling_speed.py --workdir=runs/mod         # a trained model's size and routing decisions

Both models are timed through `Sampler.generate`: its loop, on the weights as it serves them. Decoding takes what a call
for N new tokens takes, less what a call for one takes, which runs the prompt alone. The two models take turns in one
process; times are medians, with minima in brackets. Rows are drawn with seeds under which none ends early, so that
every step has the whole batch to run. Without --workdir the weights are random, and the cut-offs are calibrated so that
12.5 % of random tokens are selected; what the decoded tokens really entered is counted, and gives the FLOPs.

`FLOPs` is routed / dense per step, at the lengths really attended to. `time / ideal` is the time ratio over the FLOP
ratio: 1 means that routing itself costs nothing.
"""

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from mod_jax import host, sampling
from mod_jax.config import Config, make_config
from mod_jax.data.tokenizers import ByteTokenizer
from mod_jax.evaluation import budget
from mod_jax.models.flops import decode_flops
from mod_jax.models.model import make_model

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a trained run; default: random weights.")
WIDTH = flags.DEFINE_integer("width", 512, "D, without --workdir.")
DEPTH = flags.DEFINE_integer("depth", 12, "L, without --workdir.")
CAPACITY = flags.DEFINE_float("capacity", 0.125, "Fraction selected, without --workdir.")
CONTEXT = flags.DEFINE_integer("context", 512, "Longest sequence, without --workdir.")
PROMPT = flags.DEFINE_integer("prompt", 64, "Prompt tokens, the separator with them.")
NEW = flags.DEFINE_integer("new", 64, "New tokens per timing.")
BATCHES = flags.DEFINE_list("batches", ["1", "8", "64"], "Batch sizes.")
ROUNDS = flags.DEFINE_integer("rounds", 7, "Interleaved timings.")


@dataclasses.dataclass
class Timed:
    """One model's requests at one batch size, and what they took."""

    sampler: sampling.Sampler
    prompts: list[list[int]]
    options: list[sampling.Options]
    seconds: list[float] = dataclasses.field(default_factory=list)  # per timing, of all decoding steps
    selected: float = 0.0  # fraction of the routed blocks that decoded tokens entered

    def time_once(self) -> None:
        took, entered = [], []
        for new_tokens in (1, NEW.value):
            options = [dataclasses.replace(option, max_new_tokens=new_tokens) for option in self.options]
            begin = time.perf_counter()
            completions = self.sampler.generate(self.prompts, options)
            took.append(time.perf_counter() - begin)
            run = PROMPT.value + new_tokens - 1  # tokens that went through the model: all but the last new one
            entered.append(sum(completion.routed_fraction for completion in completions) / len(completions) * run)
        self.seconds.append(took[1] - took[0])
        self.selected = (entered[1] - entered[0]) / (NEW.value - 1)


def main(_) -> None:
    host.prepare()
    logging.set_verbosity(logging.ERROR)
    routed, capacity_L = routed_model()
    m = routed.config.model
    dense = untrained(dataclasses.replace(routed.config, model=dataclasses.replace(m, layout="F")))
    samplers = sampling.Sampler(dense), sampling.Sampler(routed, "threshold", capacity_L=capacity_L)
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}; D {m.width}, {m.depth} blocks {m.layout}, "
        f"{PROMPT.value} + {NEW.value} tokens; "
        + (f"step {routed.step} of {WORKDIR.value}" if WORKDIR.value else "random weights, calibrated cut-offs")
    )
    print("| batch | selected | dense tok/s | routed tok/s | time ratio | FLOPs | time / ideal |")
    print("|---|---|---|---|---|---|---|")
    for batch_size in map(int, BATCHES.value):
        a, b = (requests(sampler, batch_size) for sampler in samplers)
        for _ in range(ROUNDS.value):
            a.time_once()
            b.time_once()
        print(row(routed.config, samplers[1].tokenizer.vocab_size, batch_size, a, b), flush=True)


def routed_model() -> tuple[sampling.TrainedModel, tuple[float, ...] | None]:
    """The model, and the fraction that each routed block is expected to select; None: as trained."""
    if WORKDIR.value:
        return sampling.restore(WORKDIR.value), None
    shape = {"model.width": WIDTH.value, "model.depth": DEPTH.value, "model.num_heads": max(1, WIDTH.value // 64)}
    lengths = {"data.seq_len": CONTEXT.value, "train.steps": 1}
    model = untrained(make_config(**shape, **lengths, **{"routing.capacity": CAPACITY.value}))
    shifted = budget.calibrate(model, CAPACITY.value, [random_batch(8, min(256, CONTEXT.value))])
    return dataclasses.replace(model, cutoffs_L=jnp.asarray(shifted.cutoffs_L)), shifted.capacity_L


def untrained(config: Config) -> sampling.TrainedModel:
    tokenizer = ByteTokenizer()
    model = make_model(config, config.model.vocab_size or tokenizer.vocab_size)
    cutoffs_L = jnp.zeros(config.num_routed)
    return sampling.TrainedModel(config, model, jax.jit(model.init)(), cutoffs_L, tokenizer, step=0, metadata={})


def random_batch(num_rows: int, length: int) -> dict[str, np.ndarray]:
    tokens_BT = np.random.default_rng(0).integers(1, 257, (num_rows, length)).astype(np.int32)
    positions_BT = np.broadcast_to(np.arange(length, dtype=np.int32), tokens_BT.shape)
    return dict(tokens_BT=tokens_BT, positions_BT=positions_BT, segment_ids_BT=np.ones_like(tokens_BT))


def requests(sampler: sampling.Sampler, batch_size: int) -> Timed:
    """Requests that all run to their last token, timed once: whatever they need is then compiled."""
    prompts = random_batch(batch_size, PROMPT.value - 1)["tokens_BT"].tolist()
    options = [sampling.Options(seed=seed, max_new_tokens=NEW.value) for seed in range(batch_size)]
    next_seed = batch_size
    while True:
        completions = sampler.generate(prompts, options)
        ended = [index for index, completion in enumerate(completions) if completion.finish_reason != "length"]
        if not ended:
            break
        for index in ended:  # a row's text depends on its own seed alone, so the others stay as they are
            options[index] = dataclasses.replace(options[index], seed=next_seed)
            next_seed += 1
    timed = Timed(sampler, prompts, options)
    timed.time_once()
    timed.seconds.clear()
    return timed


def row(config: Config, vocab_size: int, batch_size: int, dense: Timed, routed: Timed) -> str:
    """One line of the table."""
    length = PROMPT.value + NEW.value / 2  # attended to, on average
    selected = dataclasses.replace(config.routing, capacity=routed.selected, predictor=False)
    all_full = dataclasses.replace(config, model=dataclasses.replace(config.model, layout="F"))
    some = dataclasses.replace(config, routing=selected)
    slots = [
        length * (block.capacity if depth in config.routed_depths else 1) for depth, block in enumerate(some.blocks)
    ]
    flop_ratio = (
        decode_flops(some, vocab_size, slots).total / decode_flops(all_full, vocab_size, [length] * len(slots)).total
    )
    tokens = batch_size * (NEW.value - 1)
    a, b = statistics.median(dense.seconds), statistics.median(routed.seconds)
    least = min(routed.seconds) / min(dense.seconds)
    return (
        f"| {batch_size} | {routed.selected:.3f} | {tokens / a:.0f} | {tokens / b:.0f} | {b / a:.3f} ({least:.3f}) | "
        f"{flop_ratio:.3f} | {b / a / flop_ratio:.2f} ({least / flop_ratio:.2f}) |"
    )


if __name__ == "__main__":
    app.run(main)
