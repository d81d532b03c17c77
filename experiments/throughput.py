"""Does a routed model cost what its FLOPs say? Step time and block time, beside the FLOP ratio.

    python experiments/throughput.py                      # both tables, about five minutes on two idle cores
    python experiments/throughput.py --width=512 --seq_len=1024 --depth=6

Programs that are compared take turns (A B A B ...); times are medians, with the minimum beside. `ideal`
is the same block on C tokens, without router, gather or scatter; routed / ideal is the pure cost of routing. FLOPs
count attention in full and the predictor.
"""

import statistics
import time

import jax
import jax.numpy as jnp
from absl import app, flags
from flax import nnx

from mod_jax import config as config_lib
from mod_jax import routing
from mod_jax.models.blocks import FullBlock, RoutedBlock, Stream
from mod_jax.scaling import flops
from mod_jax.training.step import MODEL_INPUTS, init_state, make_model, make_train_step

WIDTH = flags.DEFINE_integer("width", 256, "D")
DEPTH = flags.DEFINE_integer("depth", 12, "L")
SEQ_LEN = flags.DEFINE_integer("seq_len", 512, "T")
BATCH = flags.DEFINE_integer("batch", 2, "B")
VOCAB = flags.DEFINE_integer("vocab", 4096, "V")
TABLES = flags.DEFINE_list("tables", ["step", "block"], "Which tables to print.")
ROUNDS = flags.DEFINE_integer("rounds", 10, "Interleaved rounds.")
CAPACITIES = flags.DEFINE_list("capacities", ["0.125", "0.25", "0.5"], "Capacities of the block table.")


def main(_) -> None:
    size = f"D {WIDTH.value}, L {DEPTH.value}, T {SEQ_LEN.value}, B {BATCH.value}, V {VOCAB.value}"
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; {size}")
    print(f"seconds: median (minimum) of {ROUNDS.value} interleaved rounds")
    if "step" in TABLES.value:
        step_table()
    if "block" in TABLES.value:
        block_table()


def make_config(**changes) -> config_lib.Config:
    base = {
        "model.width": WIDTH.value,
        "model.depth": DEPTH.value,
        "model.num_heads": max(1, WIDTH.value // 64),
        "data.seq_len": SEQ_LEN.value,
        "train.batch_size": BATCH.value,
        "train.steps": 100,
    }
    return config_lib.make_config(**{**base, **changes})


def step_table() -> None:
    """Whole training step: dense, MoD without and with its predictor."""
    configs = {
        "dense": make_config(**{"model.layout": "F", "routing.predictor": False}),
        "MoD": make_config(**{"routing.predictor": False}),
        "MoD + predictor": make_config(),
    }
    times = interleave({name: step_program(config) for name, config in configs.items()})
    dense_flops = flops.train_flops(configs["dense"], VOCAB.value)
    print("\n| train step | seconds | time ratio | FLOP ratio | time / FLOP ratio | TFLOP/s |")
    print("|---|---|---|---|---|---|")
    for name, config in configs.items():
        count = flops.train_flops(config, VOCAB.value)
        ratio, flop_ratio = median_ratio(times[name], times["dense"]), count / dense_flops
        rate = count * BATCH.value / statistics.median(times[name]) / 1e12
        ratios = f"{ratio:.3f} | {flop_ratio:.3f} | {ratio / flop_ratio:.3f}"
        print(f"| {name} | {seconds(times[name])} | {ratios} | {rate:.4f} |")


def step_program(config: config_lib.Config):
    model = make_model(config, VOCAB.value)
    state = jax.jit(lambda: init_state(config, model))()
    key = jax.random.key(0)
    tokens = jax.random.randint(key, (BATCH.value, SEQ_LEN.value + 1), 0, VOCAB.value)
    positions = jnp.broadcast_to(jnp.arange(SEQ_LEN.value)[None], (BATCH.value, SEQ_LEN.value))
    arrays = (tokens[:, :-1], tokens[:, 1:], positions, jnp.ones_like(positions))
    batch = dict(zip(MODEL_INPUTS, arrays, strict=True))
    step = jax.jit(make_train_step(config, model, 100), donate_argnums=0)

    def program():
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["train/loss"]

    return program


def block_table() -> None:
    """One block, forward and backward: full, routed, and the same block on C tokens."""
    config = make_config(**{"routing.predictor": False})
    T, B, D = SEQ_LEN.value, BATCH.value, WIDTH.value
    times = interleave({"full": block_program(FullBlock(config.model, nnx.Rngs(params=0)), B, T, D)})
    for capacity in map(float, CAPACITIES.value):
        count = routing.tokens_kept(T, capacity)
        routed = RoutedBlock(config, capacity, nnx.Rngs(params=0))
        # Apart from the full block: a short program right after a long one pays for cold caches.
        pair = {f"routed {capacity}": (routed, T), f"ideal {capacity}": (routed.block, count)}
        times |= interleave({name: block_program(block, B, length, D) for name, (block, length) in pair.items()})
    print(
        "\n| block, forward + backward | seconds | routed / full | FLOP ratio | ratio / FLOP ratio | routed / ideal |"
    )
    print("|---|---|---|---|---|---|")
    print(f"| full | {seconds(times['full'])} | | | | |")
    for capacity in map(float, CAPACITIES.value):
        routed, ideal = times[f"routed {capacity}"], times[f"ideal {capacity}"]
        count = routing.tokens_kept(T, capacity)
        flop_ratio = sum(flops.block_flops(config, count)) / sum(flops.block_flops(config, T))
        ratio = statistics.median(routed) / statistics.median(times["full"])
        print(
            f"| routed {capacity} | {seconds(routed)} | {ratio:.3f} | {flop_ratio:.3f} | {ratio / flop_ratio:.3f} | "
            f"{median_ratio(routed, ideal):.3f} |"
        )


def block_program(block, B: int, T: int, D: int):
    graphdef, params = nnx.split(block)
    params = nnx.to_pure_dict(params)
    x_BTD = jax.random.normal(jax.random.key(1), (B, T, D))
    positions = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
    stream = Stream(positions, jnp.ones_like(positions))

    def loss(params, x_BTD):
        out = nnx.merge(graphdef, nnx.State(params))(x_BTD, stream)
        return jnp.mean(jnp.square(out[0] if isinstance(out, tuple) else out))

    grad = jax.jit(jax.grad(loss, argnums=(0, 1)))
    return lambda: grad(params, x_BTD)


def interleave(programs: dict) -> dict[str, list[float]]:
    """Seconds per call, taking turns; two warm-up rounds."""
    times = {name: [] for name in programs}
    for turn in range(ROUNDS.value + 2):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            if turn >= 2:
                times[name].append(time.perf_counter() - start)
    return times


def median_ratio(a: list[float], b: list[float]) -> float:
    """Median over rounds of a / b within the round."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def seconds(times: list[float]) -> str:
    return f"{statistics.median(times):.4f} ({min(times):.4f})"


if __name__ == "__main__":
    app.run(main)
