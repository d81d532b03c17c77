"""A pretrained dense model becomes a Mixture-of-Depths model, without training: convert, measure, choose, save.

1. Read and convert (`source`, `families`). With every token selected the result is the dense model, exactly.
2. Leave out each block in turn: the cheapest ones will be routed.
3. One dense pass: ridge regression gives each block a router, for how far the block turns a token (`measure`).
4. Cut-offs by one more pass for each capacity, and the table of loss against FLOPs, beside deleting blocks (`table`).
5. A workdir as training leaves it, at step 0, which `train --init_from`, `evaluate` and `sample` take.
"""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mod_jax import config as config_lib
from mod_jax import outputs, paths
from mod_jax.analysis.routing_stats import block_name
from mod_jax.config import Config
from mod_jax.data import tokenizers
from mod_jax.data.batches import Batch, bits_per_byte, eval_batches, train_batches
from mod_jax.data.corpus import Corpus, describe_corpus, prepare_corpus
from mod_jax.errors import CheckpointMismatch, ConfigError
from mod_jax.models import flops
from mod_jax.models.decoder import by_depth, from_depth
from mod_jax.pretrained import families, table
from mod_jax.pretrained.check import difference_from_transformers
from mod_jax.pretrained.measure import Loss, Probe, capacity_of, cheapest, fit_routers, leave_one_out, tokens_kept
from mod_jax.pretrained.source import Source, open_source
from mod_jax.trained import CHECKPOINTS, keep_tokenizer
from mod_jax.training import prepare, result
from mod_jax.training.checkpoint import Checkpointer

# What an upgraded model is, unless a key says otherwise.
DEFAULTS = {
    "routing.skipped_keys": "kept",
    "model.context": 2048,
}
# What it always is. Scores of its routers rank tokens and nothing else, so that only cut-offs can select.
FIXED = {
    "routing.gate": "one",
    "routing.score": "learned",
    "routing.predictor": False,
    "routing.aux_weight": 0.0,
    "routing.topk_per": "row",
    "train.steps": 1,
    "train.tokens": 0,
    "train.flops": 0.0,
}
GRID = (0.9, 0.75, 0.5, 0.25)
TUNE = "tune.py"  # in the workdir: a config that continues from it
TUNING = {"train.steps": 200, "optimizer.learning_rate": 1e-4, "optimizer.weight_decay": 0.0}
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked of an upgrade; see the flags of `python -m mod_jax.upgrade`."""

    source: str
    workdir: str | os.PathLike
    layout: str = "auto"
    capacity: float = 0.75
    grid: Sequence[float] = GRID
    tokenizer: str = ""
    calibration_rows: int = 16
    block_rows: int = 3
    check: bool | None = None
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)


class Dense(NamedTuple):
    """A pretrained model as it was read: `config` has layout "F"."""

    name: str
    digest: str  # sha256 of its files
    config: Config
    params: dict[str, Any]
    tokenizer: tokenizers.Tokenizer
    positions: int  # that it was trained for


class Measured(NamedTuple):
    """What the measurements found. `config` is routed; arrays have an entry for every block of the stack."""

    config: Config
    worth_L: np.ndarray
    routers_LD: np.ndarray
    fit_L: np.ndarray
    cutoffs: dict[float, np.ndarray]
    whole: table.Point
    routed: list[table.Point]
    deleted: list[table.Point]
    evaluation: dict[str, float]


def upgrade(request: Request, say: Say = lambda line: print(line, flush=True)) -> dict[str, Any]:
    """Upgrades a model into a new workdir, and returns what is written to its upgrade.json.

    Raises:
      ConfigError, CheckpointMismatch, StorageError, DataError: nothing is written then.
    """
    start = time.monotonic()
    workdir = _new_workdir(request.workdir)
    _check(request)
    dense = read_dense(request, say)
    corpus = prepare_corpus(dense.config.data, dense.tokenizer)
    say(f"corpus    {describe_corpus(corpus)}")
    found = measure(dense, corpus, request, say)
    routed = list(found.config.routed_depths)
    about = {
        "source": {"name": dense.name, "sha256": dense.digest},
        "layout": found.config.model.layout,
        "capacity": request.capacity,
        "leave_one_out": found.worth_L.tolist(),
        "router_r2": found.fit_L.tolist(),
        "corpus_digest": corpus.digest,
        "cutoffs": {f"{capacity:g}": cutoffs_L[routed].tolist() for capacity, cutoffs_L in found.cutoffs.items()},
        **table.to_json(found.whole, found.routed, found.deleted),
    }
    with _whole_or_nothing(workdir) as scratch:
        seconds = time.monotonic() - start
        _write_run(scratch, dense, found, corpus, request, seconds)
        name = dense.name.split("/")[-1]
        caption = f"{name}, sha256 {dense.digest[:12]}; {corpus.source}, digest {corpus.digest[:12]}; no training"
        table.draw(scratch / "report", caption, found.whole, found.routed, found.deleted)
        outputs.write_json(scratch / "upgrade.json", about)
    what = f"at capacity {request.capacity:g}" if routed else "of the dense model"
    say(f"DONE in {seconds:.0f} s: step 0 {what} in {workdir}, plot in {workdir / 'report'}")
    say(f"to train it: python -m mod_jax.train --config={workdir / TUNE} --init_from={workdir} --workdir=runs/tuned")
    return about


def read_dense(request: Request, say: Say) -> Dense:
    """Reads and converts the model, and compares its logits where that is possible."""
    source = open_source(request.source)
    config = dense_config(source, request)
    _layout(request.layout, config, None)  # refuses a bad one now
    tokenizer = tokenizers.pretrained(config.data.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise CheckpointMismatch(
            f"{config.data.tokenizer}: has {tokenizer.vocab_size} ids, but the embedding of {source.name} has "
            f"{config.model.vocab_size} rows: it is another model's tokenizer"
        )
    params = families.read_params(source, config)
    digest = source.digest()
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    kind, depth, width = source.about["model_type"], config.model.depth, config.model.width
    say(f"source    {source.name}: {kind}, {depth} blocks of width {width}, {size:,} parameters, sha256 {digest[:12]}")
    say(f"checked   {_checked(source, config, params, request.check)}")
    return Dense(source.name, digest, config, params, tokenizer, families.model_keys(source)["model.context"])


def measure(dense: Dense, corpus: Corpus, request: Request, say: Say) -> Measured:
    """Chooses the routed blocks, fits routers and cut-offs on training text, and measures on held-out windows."""
    calibration, held_out = _batches(corpus, dense.config, request)
    few = {name: array[: request.block_rows] for name, array in calibration.items()}
    vocab_size, depth = dense.config.model.vocab_size, dense.config.model.depth
    probe = Probe(dense.config, vocab_size)
    params = probe.make_params(dense.params, np.zeros((depth, dense.config.model.width)))
    whole = probe.leave_out(params, [], held_out)
    bits = bits_per_byte(whole.nats, whole.num_bytes)
    say(
        f"dense     {whole.per_token:.4f} nats per token, {bits:.4f} bits per byte, on {whole.tokens:,} held-out tokens"
    )

    if _layout(request.layout, dense.config, [1]) == "F" * depth:
        return _as_it_is(dense.config, vocab_size, whole)
    worth_L = leave_one_out(probe, params, [few])
    order = cheapest(worth_L, depth)
    worth = ", ".join(f"{d} {worth_L[d]:+.2f}" for d in np.argsort(worth_L, kind="stable"))
    say(f"blocks    nats that leaving each out costs, on {few['tokens_BT'].size:,} training tokens: {worth}")
    layout = _layout(request.layout, dense.config, order)
    config = _with(dense.config, {"model.layout": layout, "routing.capacity": request.capacity})
    routed = list(config.routed_depths)
    say(f"layout    {layout}: blocks {', '.join(map(str, routed))} are routed")

    routers_LD, fit_L = fit_routers(probe.moments(params, calibration))
    params = probe.make_params(dense.params, routers_LD)
    low, high = fit_L[routed].min(), fit_L[routed].max()
    fitted = calibration["tokens_BT"].size
    say(f"routers   by ridge regression on {fitted:,} training tokens, R2 {low:.2f} to {high:.2f} in routed blocks")

    points, cutoffs, evaluation = [], {}, {}
    for capacity in dict.fromkeys((request.capacity, *request.grid)):
        cutoffs[capacity] = probe.cutoffs(params, capacity_of(depth, routed, capacity), calibration)
        loss = probe.loss(params, cutoffs[capacity], held_out)
        points.append(table.routed_point(config, vocab_size, capacity, loss.capacity_L[routed], loss.per_token))
        evaluation = evaluation or _evaluation(config, vocab_size, probe, params, held_out, loss)
    points.sort(key=lambda point: -point.of_dense)
    deleted = []
    for count in table.counts_to_delete(config, vocab_size, points, len(order)):
        loss = probe.leave_out(params, order[:count], held_out)
        deleted.append(table.deleted_point(config, vocab_size, order[:count], loss.per_token))
    at_full = table.deleted_point(config, vocab_size, [], whole.per_token)
    say("\n".join(table.lines(at_full, points, deleted)))
    return Measured(config, worth_L, routers_LD, fit_L, cutoffs, at_full, points, deleted, evaluation)


def _as_it_is(config: Config, vocab_size: int, whole: Loss) -> Measured:
    """A model that stays dense, for training that continues it."""
    spent = flops.dense_flops(config, vocab_size).total / config.data.seq_len
    metrics = {"eval/topk_loss": whole.per_token, "eval/topk_bits_per_byte": bits_per_byte(whole.nats, whole.num_bytes)}
    metrics |= {f"eval/forward_flops_per_token/{name}": spent for name in ("topk", "dense")}
    none_L, point = np.zeros(0), table.deleted_point(config, vocab_size, [], whole.per_token)
    return Measured(config, none_L, none_L, none_L, {}, point, [], [], metrics)


def _check(request: Request) -> None:
    for name, value in (("--capacity", [request.capacity]), ("--grid", request.grid)):
        if not all(isinstance(x, int | float) and 0 < x <= 1 for x in value):
            raise ConfigError(f"{name} = {', '.join(map(str, value))}: must be in (0, 1]")
    if request.calibration_rows < 1:
        raise ConfigError(f"--calibration_rows = {request.calibration_rows}: must be >= 1")
    if not 1 <= request.block_rows <= request.calibration_rows:
        raise ConfigError(
            f"--block_rows = {request.block_rows}: must be in [1, {request.calibration_rows}], of these rows"
        )


def dense_config(source: Source, request: Request) -> Config:
    """The config of the model as it was trained, in layout "F", with the keys that say how it will be routed.

    Raises:
      ConfigError: a key was asked for that the model, or another flag, decides.
    """
    keys = families.model_keys(source)
    longest = keys.pop("model.context")
    tokenizer = request.tokenizer or source.name
    decided = {**keys, **FIXED, "data.tokenizer": tokenizer if ":" in tokenizer else f"hf:{tokenizer}"}
    instead = {"model.layout": "--layout", "routing.capacity": "--capacity", "data.tokenizer": "--tokenizer"}
    for name, value in request.changes.items():
        if name in instead:
            raise ConfigError(f"config.{name} = {value!r}: is given by {instead[name]} here")
        if name in decided and value != decided[name]:
            raise ConfigError(f"config.{name} = {value!r}: is {decided[name]!r} of this model; leave it out")
    # Two batches of held-out windows, so that a budget can be calibrated on one and judged on the other.
    rows = -(-4 // jax.device_count()) * jax.device_count()
    sizes = {"train.batch_size": rows, "data.eval_windows": 2 * rows}
    context = min(longest, DEFAULTS["model.context"])
    values = {**DEFAULTS, **sizes, "model.context": context, **request.changes, **decided}
    if values["model.context"] > longest:
        raise ConfigError(f"config.model.context = {values['model.context']}: this model allows {longest}")
    return config_lib.make_config(**values)


def _layout(asked: str, config: Config, order: Sequence[int] | None) -> str:
    """One letter per block: as spelt out, or R for the first of `order` (None: only check what was asked).

    Raises:
      ConfigError: it is none of auto, auto:N and letters, or is for more blocks than there are.
    """
    depth = config.model.depth
    name, colon, number = asked.partition(":")
    if name == "auto":
        if colon and not (number.isascii() and number.isdigit() and int(number) > 0):
            raise ConfigError(f"--layout = {asked!r}: must be auto, auto:N with N >= 1, or letters F and R")
        count = int(number) if colon else max(1, (depth - 2) // 2)
        if count > depth - 2:
            raise ConfigError(f"--layout = {asked!r}: of {depth} blocks at most {max(0, depth - 2)} can be routed so")
        return "".join("R" if i in (order or [])[:count] else "F" for i in range(depth))
    if not 0 < len(asked) <= depth or set(asked) - set("FRf"):
        raise ConfigError(f"--layout = {asked!r}: must be auto, auto:N, or up to {depth} letters F and R")
    return "".join(asked[i % len(asked)] for i in range(depth))


def routed_params(dense: dict[str, Any], config: Config, routers_LD: np.ndarray) -> dict[str, Any]:
    """The parameters of `config`, from those of the dense model and one router per block."""
    blocks = by_depth(dense, _with(config, {"model.layout": "F", "routing.capacity": 1.0}))
    for depth in config.routed_depths:
        blocks[depth] = {"block": blocks[depth], "router": {"weight_D": jnp.asarray(routers_LD[depth])}}
    return from_depth(blocks, {name: dense[name] for name in ("embedder", "final_norm")}, config)


def _with(config: Config, changes: dict[str, Any]) -> Config:
    return config_lib.from_flat_dict(config_lib.to_flat_dict(config) | changes)


def _checked(source: Source, config: Config, dense: dict[str, Any], check: bool | None) -> str:
    found = difference_from_transformers(source, config, dense) if check in (None, True) else "not asked for"
    if isinstance(found, str):
        if check:
            raise ConfigError(f"--check: logits cannot be compared: {found}")
        return f"logits were not compared with transformers: {found}"
    worst, largest = found
    if not worst <= 1e-3 * max(1.0, largest):
        raise CheckpointMismatch(f"{source.name}: logits differ from those of transformers by {worst:.3g}")
    return f"logits equal those of transformers, largest difference {worst:.1e} (logits up to {largest:.1f})"


def _batches(corpus: Corpus, config: Config, request: Request) -> tuple[Batch, list[Batch]]:
    """(rows of training text to measure and to fit on, held-out windows for the table)."""
    shape = dict(seq_len=config.data.seq_len)
    calibration = next(train_batches(corpus, **shape, batch_size=request.calibration_rows, seed=config.seed))
    windows = eval_batches(corpus, **shape, num_windows=config.data.eval_windows, batch_size=config.train.batch_size)
    return calibration, windows


def _evaluation(config: Config, vocab_size: int, probe: Probe, params, held_out: list[Batch], causal: Loss) -> dict:
    """The metrics of an evaluation, as `Evaluator` names them."""
    capacity_L = capacity_of(probe.depth, config.routed_depths, config.capacity_L[0])
    parts = [probe.loss(params, probe.cutoffs(params, capacity_L, batch, per_row=True), [batch]) for batch in held_out]
    topk = Loss(*(sum(values) for values in zip(*parts, strict=True)))
    realised_L = causal.capacity_L[list(config.routed_depths)]
    metrics = {"eval/topk_loss": topk.per_token, "eval/topk_bits_per_byte": bits_per_byte(topk.nats, topk.num_bytes)}
    metrics |= {
        "eval/causal_loss/threshold": causal.per_token,
        "eval/causal_bits_per_byte/threshold": bits_per_byte(causal.nats, causal.num_bytes),
        "eval/gap/threshold": causal.per_token - topk.per_token,
        "eval/realised_capacity/threshold": float(np.mean(realised_L)),
    }
    spent = {
        "topk": flops.selection_flops(config, vocab_size, "topk"),
        "threshold": flops.selection_flops(config, vocab_size, "threshold", realised_L),
        "dense": flops.dense_flops(config, vocab_size),
    }
    for name, forward in spent.items():
        metrics[f"eval/forward_flops_per_token/{name}"] = forward.total / config.data.seq_len
    for depth, realised in zip(config.routed_depths, realised_L, strict=True):
        metrics[f"routing/{block_name(depth)}/topk_fraction"] = tokens_kept(config.data.seq_len, config.capacity_L[0])
        metrics[f"routing/{block_name(depth)}/realised_capacity/threshold"] = float(realised)
    return metrics


# The workdir.


def _new_workdir(workdir: str | os.PathLike) -> pathlib.Path:
    # On a disk: in a bucket nothing appears whole or not at all.
    path = paths.folder_to_write("--workdir", paths.local_folder("--workdir", workdir))
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"--workdir = {os.fspath(workdir)!r}: {path} is not empty; an upgrade needs a new folder")
    return path


@contextlib.contextmanager
def _whole_or_nothing(workdir: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder beside `workdir` that becomes it at the end; until then nothing looks like a finished run."""
    scratch = workdir.with_name(f".{workdir.name}.{os.getpid()}.tmp")
    with paths.writing(workdir):
        scratch.mkdir(parents=True)
    try:
        yield scratch
        with paths.writing(workdir):
            scratch.rename(workdir)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_run(
    folder: pathlib.Path, dense: Dense, found: Measured, corpus: Corpus, request: Request, seconds: float
) -> None:
    """What training would have left at step 0, but the optimizer's moments: the run is finished, and never resumed."""
    run = prepare.make_run(found.config, folder, found.config.model.vocab_size)
    began = {"workdir": dense.name, "sha256": dense.digest, "positions": dense.positions}
    run = dataclasses.replace(run, corpus=corpus, num_steps=0, init_from=began)
    routed = list(found.config.routed_depths)
    cutoffs_L = found.cutoffs[request.capacity][routed] if routed else np.zeros(0)
    params = routed_params(dense.params, found.config, found.routers_LD)
    state = dict(params=params, cutoffs_L=jnp.asarray(cutoffs_L, jnp.float32))
    about = prepare.metadata(run, seconds)
    keep_tokenizer(folder, dense.tokenizer)
    metric = "eval/causal_loss/threshold" if routed else "eval/topk_loss"
    with Checkpointer(folder / CHECKPOINTS, metric=metric) as checkpointer:
        checkpointer.save(0, state, about, found.evaluation)
    prepare.write_config(run)
    (folder / TUNE).write_text(tune_config(found.config), encoding="utf-8")
    result.write(folder, {"step": 0, "tokens": 0, "flops": 0.0, "evaluation": found.evaluation, **about})


def tune_config(config: Config) -> str:
    """A config file, to be edited, for a run that begins with the upgraded weights."""
    keys = config_lib.changed_from_default(config) | TUNING
    lines = "\n".join(f"            {name!r}: {value!r}," for name, value in keys.items())
    return f'''"""Training that begins with an upgraded model. Edit it, then, with the folder that this file lies in:

python -m mod_jax.train --config=FOLDER/{TUNE} --init_from=FOLDER --workdir=runs/tuned
"""

from mod_jax.config import default_config


def get_config():
    config = default_config()
    config.update_from_flattened_dict(
        {{
{lines}
        }}
    )
    return config
'''
