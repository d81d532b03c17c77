"""Does a routed model cost what its FLOPs say? Times beside FLOP ratios, one table per question.

    python experiments/throughput.py                          # every table, about half an hour on two idle cores
    python experiments/throughput.py --tables=step,block --width=512 --seq_len=1024 --depth=2 --batch=4

Tables: `step` (training step: dense, routed, and dense of as many FLOPs as routed), `block` (one block, and what
routing adds to it), `length`, `width`, `depth` (how a step grows), `compile` (scan against unrolled), `peers` (a
PyTorch block of the same mathematics, and the package `mixture-of-depth` on a Llama; what is not installed is skipped,
see torch_peer.py and hf_peer.py for what they need), `experts` (a channel of experts beside its products alone, and
beside one MLP; its sizes are fixed).

Programs that are compared take turns (A B A B ...); times are medians, with the minimum in brackets. `ideal` is the
same block on C tokens, without router, gather or scatter: routed / ideal is the pure cost of routing. FLOPs count
attention in full and the predictor. MFU is over the best float32 matmul of this machine, measured in the same process.
"""

import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags
from flax import nnx

from mod_jax import config as config_lib
from mod_jax import host, routing, tuning
from mod_jax.data.batches import MODEL_INPUTS
from mod_jax.layout import BlockSpec
from mod_jax.models import flops
from mod_jax.models.blocks import TOPK, Choice, make_block
from mod_jax.models.dispatch import through_slots
from mod_jax.models.memory import Present, make_tokens
from mod_jax.models.mlp import MLP
from mod_jax.models.model import make_model
from mod_jax.models.moe import Experts
from mod_jax.training.language import Language
from mod_jax.training.rates import measure_matmul_peak
from mod_jax.training.step import init_state, make_train_step

WIDTH = flags.DEFINE_integer("width", 256, "D")
DEPTH = flags.DEFINE_integer("depth", 12, "L")
SEQ_LEN = flags.DEFINE_integer("seq_len", 512, "T")
BATCH = flags.DEFINE_integer("batch", 2, "B")
VOCAB = flags.DEFINE_integer("vocab", 4096, "V")
ROUNDS = flags.DEFINE_integer("rounds", 10, "Interleaved rounds.")
SCAN = flags.DEFINE_bool("scan", False, "Scan over blocks; unrolled is 5-15 % faster on a CPU.")
CAPACITIES = flags.DEFINE_list("capacities", ["0.125", "0.25", "0.5"], "Capacities of the block table.")
DENSE = {"model.layout": "F", "routing.predictor": False}
ROUTED = {"routing.predictor": False}
FULL = BlockSpec("F", 1.0)


def main(_) -> None:
    host.prepare()
    size = f"D {WIDTH.value}, L {DEPTH.value}, T {SEQ_LEN.value}, B {BATCH.value}, V {VOCAB.value}"
    peak = measure_matmul_peak(seconds=3.0).flops
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, matmul {peak / 1e9:.0f} GFLOP/s; {size}")
    print(f"seconds: median (minimum) of {ROUNDS.value} interleaved rounds; ratios: median of the rounds' own")
    for name in TABLES.value:
        PRINT[name](peak)


def make_config(**changes) -> config_lib.Config:
    base = {
        "model.width": WIDTH.value,
        "model.depth": DEPTH.value,
        "model.scan": SCAN.value,
        "data.seq_len": SEQ_LEN.value,
        "train.batch_size": BATCH.value,
        "train.steps": 100,
    }
    values = {**base, **changes}
    return config_lib.make_config(**{"model.num_heads": max(1, values["model.width"] // 64), **values})


def step_table(peak: float) -> None:
    """Whole training step: dense, MoD without and with its predictor, and dense of about MoD's FLOPs."""
    configs = {"dense": make_config(**DENSE), "MoD": make_config(**ROUTED), "MoD + predictor": make_config()}
    routed_flops = flops.train_flops(configs["MoD"], VOCAB.value)
    shallower = [make_config(**DENSE, **{"model.depth": depth}) for depth in range(1, DEPTH.value)]
    isoflop = min(shallower, key=lambda config: abs(flops.train_flops(config, VOCAB.value) - routed_flops))
    configs[f"dense of {isoflop.model.depth} blocks"] = isoflop
    times = interleave({name: step_program(config) for name, config in configs.items()})
    dense_flops = flops.train_flops(configs["dense"], VOCAB.value)
    print("\n| train step | seconds | time ratio | FLOP ratio | time / FLOP ratio | MFU |")
    print("|---|---|---|---|---|---|")
    for name, config in configs.items():
        count = flops.train_flops(config, VOCAB.value)
        ratio, flop_ratio = median_ratio(times[name], times["dense"]), count / dense_flops
        mfu = count * BATCH.value / statistics.median(times[name]) / peak
        ratios = f"{ratio:.3f} | {flop_ratio:.3f} | {ratio / flop_ratio:.3f}"
        print(f"| {name} | {seconds(times[name])} | {ratios} | {mfu:.0%} |", flush=True)


def growth_table(key: str, values: list[int], **fixed) -> None:
    """Dense and routed step as one size grows."""
    print(f"\n| {key} | dense, us per token | MoD, us per token | time ratio | FLOP ratio | time / FLOP ratio |")
    print("|---|---|---|---|---|---|")
    for value in values:
        pair = [make_config(**{key: value, **fixed, **layout}) for layout in (DENSE, ROUTED)]
        dense, routed = interleave(dict(enumerate(map(step_program, pair)))).values()
        ratio = median_ratio(routed, dense)
        dense_flops, routed_flops = (flops.train_flops(config, VOCAB.value) for config in pair)
        flop_ratio = routed_flops / dense_flops
        tokens = pair[0].train.batch_size * pair[0].data.seq_len
        per_token = [statistics.median(times) / tokens * 1e6 for times in (dense, routed)]
        print(
            f"| {value} | {per_token[0]:.0f} | {per_token[1]:.0f} | {ratio:.3f} | {flop_ratio:.3f} | "
            f"{ratio / flop_ratio:.3f} |",
            flush=True,
        )


def step_program(config: config_lib.Config):
    model = make_model(config, VOCAB.value)
    state = jax.jit(lambda: init_state(config, model))()
    B, T = config.train.batch_size, config.data.seq_len
    tokens = jax.random.randint(jax.random.key(0), (B, T + 1), 0, VOCAB.value)
    positions = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
    arrays = (tokens[:, :-1], tokens[:, 1:], positions, jnp.ones_like(positions))
    batch = dict(zip(MODEL_INPUTS, arrays, strict=True))
    step = jax.jit(make_train_step(Language(config, model), 100), donate_argnums=0)

    def program():
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["train/loss"]

    return program


def block_table(peak: float) -> None:
    """One block, forward and backward: full, routed, and the same block on C tokens."""
    config = make_config(**ROUTED)
    T, B = SEQ_LEN.value, BATCH.value
    full = interleave({"full": block_program(block_of(config, "F", 1.0), config.model, B, T)})["full"]
    full_flops = sum(flops.block_flops(config, FULL, T))

    def mfu(count, times):
        return f"{3 * B * count / statistics.median(times) / peak:.0%}"

    titles = ("block, forward + backward", "seconds", "MFU", "over full", "FLOP ratio", "ratio / FLOP ratio")
    print(f"\n| {' | '.join(titles)} | routed / ideal | routing's share |")
    print("|---|---|---|---|---|---|---|---|")
    print(f"| full | {seconds(full)} | {mfu(full_flops, full)} | | | | | |")
    for capacity in map(float, CAPACITIES.value):
        count = routing.tokens_kept(T, capacity)
        block = block_of(config, "R", capacity)
        # Apart from the full block: a short program right after a long one pays for cold caches.
        ideal_program = block_program(block.block, config.model, B, count)
        pair = {"routed": block_program(block, config.model, B, T), "ideal": ideal_program}
        routed, ideal = interleave(pair).values()
        routed_flops = sum(flops.block_flops(config, FULL, count))
        flop_ratio = routed_flops / full_flops
        ratio, overhead = statistics.median(routed) / statistics.median(full), median_ratio(routed, ideal)
        print(
            f"| routed {capacity} | {seconds(routed)} | {mfu(routed_flops, routed)} | {ratio:.3f} | {flop_ratio:.3f} | "
            f"{ratio / flop_ratio:.3f} | {overhead:.3f} | {1 - 1 / overhead:.1%} |",
            flush=True,
        )


def block_of(config: config_lib.Config, kind: str, capacity: float):
    return make_block(config, BlockSpec(kind, capacity), nnx.Rngs(params=0))


def block_program(block, config: config_lib.ModelConfig, B: int, T: int):
    graphdef, params = nnx.split(block)
    params = nnx.to_pure_dict(params)
    x_BTD = jax.random.normal(jax.random.key(1), (B, T, config.width))
    positions = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
    tokens = make_tokens(positions, jnp.ones_like(positions), config.head_dim, config.rope_base)

    def loss(params, x_BTD):
        out = nnx.merge(graphdef, nnx.State(params))(x_BTD, tokens, Present(), TOPK, through_slots)
        return jnp.mean(jnp.square(out[0]))

    grad = jax.jit(jax.grad(loss, argnums=(0, 1)))
    return lambda: grad(params, x_BTD)


def compile_table(_) -> None:
    """CPU seconds to compile the train step, `model.scan` on and off."""
    print("\n| depth | scan, CPU s | unrolled, CPU s |")
    print("|---|---|---|")
    for depth in (4, 8, 16, 32):
        spent = []
        for scan in (True, False):
            config = make_config(**{**ROUTED, "model.depth": depth, "model.scan": scan})
            model = make_model(config, VOCAB.value)
            state = jax.eval_shape(lambda config=config, model=model: init_state(config, model))
            rows = jax.ShapeDtypeStruct((BATCH.value, SEQ_LEN.value), jnp.int32)
            lowered = jax.jit(make_train_step(Language(config, model), 100)).lower(
                state, dict.fromkeys(MODEL_INPUTS, rows)
            )
            start = time.process_time()
            lowered.compile()
            spent.append(time.process_time() - start)
        print(f"| {depth} | {spent[0]:.1f} | {spent[1]:.1f} |", flush=True)


def peers_table(_) -> None:
    """Our blocks against PyTorch's, which skips the causal half too; our step against a public package's."""
    for table in (torch_table, package_table):
        try:
            table()
        except ImportError as error:
            print(f"\n{table.__name__}: skipped ({error})")


def torch_table() -> None:
    from torch_peer import torch_programs

    config = make_config(**ROUTED)
    T, B = SEQ_LEN.value, BATCH.value
    routed = block_of(config, "R", config.routing.capacity)
    blocks = {"full": routed.block, "routed": routed}
    ours = {name: block_program(block, config.model, B, T) for name, block in blocks.items()}
    theirs = torch_programs(config, B, T)
    print("\n| block, forward + backward | ours | PyTorch | ours / PyTorch |")
    print("|---|---|---|---|")
    for name, program in ours.items():
        mine, other = interleave({"ours": program, "theirs": theirs[name]}).values()
        print(f"| {name} | {seconds(mine)} | {seconds(other)} | {median_ratio(mine, other):.3f} |", flush=True)


def package_table() -> None:
    from hf_peer import llama_steps

    ours = {"dense": make_config(**DENSE), "MoD": make_config(**ROUTED)}
    theirs = llama_steps(ours["MoD"], VOCAB.value)
    print("\n| train step | ours | Hugging Face Llama, MoD by mixture-of-depth | ours / theirs |")
    print("|---|---|---|---|")
    for name, config in ours.items():
        mine, other = interleave({"ours": step_program(config), "theirs": theirs[name]}).values()
        print(f"| {name} | {seconds(mine)} | {seconds(other)} | {median_ratio(mine, other):.3f} |", flush=True)


class ExpertShape(NamedTuple):
    """E experts of width D and hidden size 4 D, one per token, as many slots as tokens."""

    width: int = 512
    count: int = 8
    depth: int = 6  # channels that a token is decoded through
    tokens: int = 16  # decoded in one call


def experts_table(_) -> None:
    """A channel of experts in training, in evaluation and in decoding, router included."""
    shape = ExpertShape()
    about = f"D {shape.width}, E {shape.count}, A 1, capacity 1"
    titles = (f"channel of experts, {about}", "B * T", "seconds", "over", "seconds", "ratio", "by minima")
    print(f"\n| {' | '.join(titles)} |")
    print("|---" * len(titles) + "|")

    def row(what: str, tokens: str, programs: dict) -> None:
        first, *others = times = interleave(programs)
        for other in others:
            pair = times[first], times[other]
            ratio, by_minima = median_ratio(*pair), min(pair[0]) / min(pair[1])
            cells = (what, tokens, seconds(pair[0]), other, seconds(pair[1]), f"{ratio:.3f}", f"{by_minima:.3f}")
            print(f"| {' | '.join(cells)} |", flush=True)

    for B, T in ((16, 512), (4, 512)):
        row("forward + backward", f"{B} * {T}", expert_training(shape, B, T))
    row("forward, nobody dropped", "4 * 512", expert_evaluation(shape, 4, 512))
    row(f"decoding {shape.tokens} tokens through {shape.depth}", "1 * 1", expert_decoding(shape))


def expert_parts(shape: ExpertShape, T: int) -> tuple[Experts, MLP]:
    """A channel of experts, and one MLP of as many active FLOPs."""
    changes = {"experts.count": shape.count, "experts.capacity": 1.0, "model.width": shape.width, "data.seq_len": T}
    config = make_config(**{"model.layout": "E", "routing.predictor": False, **changes})
    return Experts(config, nnx.Rngs(0)), MLP(config, nnx.Rngs(1))


def expert_inputs(shape: ExpertShape, B: int, T: int):
    positions = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
    tokens = make_tokens(positions, jnp.ones_like(positions), 64, 10_000.0)
    return jax.random.normal(jax.random.key(1), (B, T, shape.width)), tokens


def expert_training(shape: ExpertShape, B: int, T: int) -> dict:
    """The channel with its losses; its batched products on as many tokens, without routing; one MLP."""
    experts, mlp = expert_parts(shape, T)
    x_BTD, tokens = expert_inputs(shape, B, T)

    def loss_of_experts(experts, x_BTD):
        update_BTD, record = experts(x_BTD, tokens, TOPK)
        return jnp.mean(jnp.square(update_BTD)) + 0.1 * record.sums.balance / x_BTD.size + 1e-3 * record.sums.z

    def loss_of_products(experts, x_EMD):
        return jnp.mean(jnp.square(experts.mlps(x_EMD)))

    def loss_of_mlp(mlp, x_BTD):
        return jnp.mean(jnp.square(mlp(x_BTD, tokens, TOPK)[0]))

    def program(loss, module, x):
        graphdef, params = nnx.split(module)
        grad = jax.jit(jax.grad(lambda params, x: loss(nnx.merge(graphdef, params), x), argnums=(0, 1)))
        return lambda: grad(params, x)

    return {
        "experts": program(loss_of_experts, experts, x_BTD),
        "its products alone": program(loss_of_products, experts, x_BTD.reshape(shape.count, -1, shape.width)),
        "one MLP": program(loss_of_mlp, mlp, x_BTD),
    }


def expert_evaluation(shape: ExpertShape, B: int, T: int) -> dict:
    experts, mlp = expert_parts(shape, T)
    x_BTD, tokens = expert_inputs(shape, B, T)

    def program(module):
        graphdef, params = nnx.split(module)
        run = jax.jit(lambda params, x_BTD: nnx.merge(graphdef, params)(x_BTD, tokens, Choice("all"))[0])
        return lambda: run(params, x_BTD)

    return {"experts": program(experts), "one MLP": program(mlp)}


def expert_decoding(shape: ExpertShape) -> dict:
    """Tokens one after the other through several channels, in one program and with weights as the sampler keeps them.

    Beside them MLPs that read as many bytes a token, E in turn: those of one would stay in the processor's cache.
    """
    x_11D, tokens = expert_inputs(shape, 1, 1)
    experts, mlps = zip(*(expert_parts(shape, 2) for _ in range(shape.depth)), strict=True)
    mlps = [mlps, *([expert_parts(shape, 2)[1] for _ in experts] for _ in range(shape.count - 1))]
    if not tuning.stacks_weights(jax.default_backend()):
        for channel in experts:
            channel.take_apart()

    def program(channels_of_token, num_kinds: int):
        graphdefs, params = nnx.split(channels_of_token)

        @jax.jit
        def run(params, x_11D):
            merged = nnx.merge(graphdefs, params)

            def some_tokens(_, x_11D):
                for kind in range(shape.count):
                    for channel in merged[kind % num_kinds]:
                        x_11D = x_11D + channel(rms_normalised(x_11D), tokens, Choice("all"))[0]
                    x_11D = jnp.roll(x_11D, 1, axis=-1)  # another token, with other experts
                return x_11D

            return jax.lax.fori_loop(0, shape.tokens // shape.count, some_tokens, x_11D)

        return lambda: run(params, x_11D)

    return {
        "experts": program(nnx.List([nnx.List(experts)]), 1),
        "MLPs": program(nnx.List(map(nnx.List, mlps)), shape.count),
    }


def rms_normalised(x):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True))


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


PRINT = {
    "step": step_table,
    "block": block_table,
    "length": lambda _: growth_table(
        "data.seq_len", [512, 1024, 2048, 4096], **{"model.depth": 2, "train.batch_size": 1}
    ),
    "width": lambda _: growth_table("model.width", [128, 256, 512, 1024], **{"model.depth": 2}),
    "depth": lambda _: growth_table("model.depth", [2, 4, 8, 16], **{"data.seq_len": 256}),
    "compile": compile_table,
    "peers": peers_table,
    "experts": experts_table,
}
TABLES = flags.DEFINE_list("tables", list(PRINT), f"Which tables to print, of {', '.join(PRINT)}.")
flags.register_validator("tables", lambda names: set(names) <= set(PRINT), f"must be some of {', '.join(PRINT)}")

if __name__ == "__main__":
    app.run(main)
