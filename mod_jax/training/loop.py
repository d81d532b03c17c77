"""The training loop, which reads as a table of contents, and what frames it: prepare, resume, save.

Layout of a workdir: claim.json (which run is using it), config.json, metrics.jsonl, tokenizer/, checkpoints/<step>/,
report/*.png, at the end result.json, and if asked for tensorboard/ and profile/. Rerunning the same command resumes;
of a finished run it prints the result.
"""

import contextlib
import dataclasses
import enum
import math
import os
import pathlib
import platform
import textwrap
import time
from typing import Any

import flax
import jax
import numpy as np
from jax.experimental import multihost_utils

import mod_jax
from mod_jax import config as config_lib
from mod_jax import distributed, outputs, paths, sharding, tuning
from mod_jax.config import Config
from mod_jax.data import tokenizers
from mod_jax.data.batches import Batch, train_batches
from mod_jax.data.corpus import Corpus, describe_corpus, prepare_corpus
from mod_jax.errors import ConfigError, DataError, ResumeRefused
from mod_jax.evaluation.evaluator import Evaluator
from mod_jax.models import flops
from mod_jax.models.model import Model, make_model
from mod_jax.trained import CHECKPOINTS, causal_selection, keep_tokenizer, kept_tokenizer, why_not_sampled
from mod_jax.training import claim, finite, inherit, result, resume, trackers
from mod_jax.training.checkpoint import Checkpointer
from mod_jax.training.interval import Interval
from mod_jax.training.optimizer import make_optimizer
from mod_jax.training.preemption import PreemptionGuard
from mod_jax.training.profile import Profiler
from mod_jax.training.rows import MetricWriter, read_metrics
from mod_jax.training.step import MODEL_INPUTS, TrainState, init_state, make_train_step
from mod_jax.training.watch import Watch
from mod_jax.versions import commit

MAX_STEPS = 2**31 - 1  # the state counts them as int32


class Outcome(enum.Enum):
    """How a call of `train` ended without an error."""

    DONE = "done"
    PREEMPTED = "preempted"


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that is fixed before the first step. `abstract_state` carries shapes, dtypes and shardings."""

    config: Config
    workdir: pathlib.Path
    corpus: Corpus | None  # None: not opened yet
    mesh: jax.sharding.Mesh
    model: Model
    vocab_size: int
    abstract_state: TrainState
    num_steps: int
    tokens_per_step: int
    flops_per_step: float
    init_from: dict[str, Any] | None = None  # where its weights came from, see `inherit.Source`
    seconds_before: float = 0.0  # spent by earlier processes on the steps that are resumed


def train(
    config: Config,
    workdir: str | os.PathLike,
    *,
    extend: bool = False,
    init_from: str | os.PathLike | None = None,
    profile: bool = False,
) -> Outcome:
    """Trains to the end of the run, or until preempted; resumes from the newest good checkpoint in `workdir`.

    Args:
      extend: allow a run length that differs from the checkpoint's (the learning-rate schedule changes with it).
      init_from: workdir of another run, whose weights a fresh run begins with; see `inherit`.
      profile: trace a few steps into workdir/profile, see `profile.Profiler`.

    Raises:
      ConfigError, DataError, StorageError, CheckpointMismatch, ResumeRefused, NumericsError, CausalityError: see there.
    """
    start = time.monotonic()
    with PreemptionGuard() as guard:
        workdir = paths.folder_to_write("--workdir", workdir)
        distributed.wait_for_others("started")
        if finished := stored_result(config, workdir):
            say("\n".join(finished))
            return Outcome.DONE
        run = prepare_run(config, workdir, init_from)
        run, source = remember(run, init_from)
        start -= run.seconds_before
        with (
            jax.set_mesh(run.mesh),
            claim.hold(run.workdir) as check_claim,
            Checkpointer(
                run.workdir / CHECKPOINTS, keep=config.train.keep, metric=ranking_metric(config)
            ) as checkpointer,
            Profiler(run.workdir / "profile", enabled=profile) as profiler,
            contextlib.ExitStack() as closing,
        ):
            checkpointer.check_space(run.abstract_state)
            state, interval = restore_or_init(run, checkpointer, extend, source)
            write_config(run)
            if jax.process_index() == 0:
                keep_tokenizer(run.workdir, run.corpus.tokenizer)
            step = int(state.step)
            if step < run.num_steps and jax.process_index() == 0:
                result.remove(run.workdir)
            watch = closing.enter_context(open_watch(run, step, interval))
            evaluator = Evaluator(config, run.model, run.mesh, run.corpus)
            if step and eval_is_due(run, step) and not has_eval(run, step):  # preempted between step and evaluation
                watch.evaluate(step, evaluator, state)

            if step < run.num_steps:
                train_step = compile_step(run)
                batches = open_batches(run, step)
            while step < run.num_steps:
                step += 1
                with profiler.step(step, run.num_steps, watch.pause):
                    batch = next(batches)
                    state, metrics = train_step(state, put_batch(run, batch))
                watch.after_step(step, metrics, batch["example_ids_B"])
                stop = guard.requested(step)
                evals = watch.evaluate(step, evaluator, state) if eval_is_due(run, step) and not stop else None
                if save_is_due(run, step) or stop:
                    unfinished = watch.unfinished()  # raises after too many bad steps: then nothing is saved
                    if stop or step == run.num_steps or not watch.bad_steps:  # else older, good steps would be lost
                        check_claim()
                        with watch.pause("save"):
                            finite.check_state(state, f"the state after step {step}, which was not saved,")
                            about_now = metadata(run, time.monotonic() - start) | {"interval": unfinished}
                            checkpointer.save(step, state, about_now, evals)
                if stop:
                    checkpointer.wait()
                    closing.close()
                    watch.say(f"PREEMPTED at step {step} of {run.num_steps}: saved; the same command resumes")
                    return Outcome.PREEMPTED
            checkpointer.wait()
            evaluation = watch.finish(evaluator, state, run.workdir)
            closing.close()
            finish(run, evaluation, time.monotonic() - start)
            return Outcome.DONE


def prepare_run(config: Config, workdir: str | os.PathLike, init_from: str | os.PathLike | None = None) -> Run:
    """Checks what can be checked, cheapest first, opens the data, and describes the run on stdout."""
    workdir = paths.folder_to_write("--workdir", workdir)
    if jax.process_index() == 0:  # alone has a tracker
        trackers.check_installed(config.train.tracker)
    check_processes_agree("config", config_lib.fingerprint(config), ConfigError)
    run = None
    if (vocab_size := known_vocabulary(config)) is not None:
        run = make_run(config, workdir, vocab_size)
        say(describe(run))
        check_memory(run)
    return with_corpus(run, config, workdir, init_from)


def with_corpus(
    run: Run | None, config: Config, workdir: pathlib.Path, init_from: str | os.PathLike | None = None
) -> Run:
    """The run with its data, and described anew if its vocabulary could not be known without."""
    tokenizer = kept_tokenizer(workdir, config)
    if tokenizer is None and init_from is not None:
        tokenizer = kept_tokenizer(paths.local_folder("--init_from", init_from), config)
    corpus = prepare_corpus(config.data, tokenizer)
    distributed.wait_for_others("prepared")
    check_processes_agree("corpus", corpus.digest[:12], DataError)
    vocab_size = vocabulary(config, corpus)
    if run is None or run.vocab_size != vocab_size:
        run = make_run(config, workdir, vocab_size)
        say(describe(run))
        check_memory(run)
    epochs = run.num_steps * run.tokens_per_step / corpus.train_tokens.size
    say(f"corpus    {describe_corpus(corpus)}; {epochs:.2f} epochs")
    return dataclasses.replace(run, corpus=corpus)


def make_run(config: Config, workdir: pathlib.Path, vocab_size: int) -> Run:
    """The run without its data: what it computes, on which devices, for how long."""
    mesh = sharding.make_mesh(config)
    model = make_model(config, vocab_size)
    num_steps = flops.train_steps(config, vocab_size)
    if num_steps > MAX_STEPS:
        name = next(name for name in config_lib.LENGTH_KEYS if config_lib.to_flat_dict(config)[name])
        raise ConfigError(f"config.{name}: gives {num_steps:.3g} steps, more than {MAX_STEPS:,} cannot be counted")
    return Run(
        config=config,
        workdir=workdir,
        corpus=None,
        mesh=mesh,
        model=model,
        vocab_size=vocab_size,
        abstract_state=abstract_state(config, model, mesh),
        num_steps=num_steps,
        tokens_per_step=config.train.batch_size * config.data.seq_len,
        flops_per_step=config.train.batch_size * flops.train_flops(config, vocab_size),
    )


def check_processes_agree(what: str, mine: str, error: type[Exception]) -> None:
    """Raises `error`, in every process alike, if the processes of a run hold different ones of `what`."""
    if jax.process_count() == 1:
        return
    everyone = multihost_utils.process_allgather(np.frombuffer(mine.encode(), np.uint8))
    names = [bytes(row).decode() for row in everyone]
    if len(set(names)) > 1:
        raise error(f"the processes of this run hold different {what}s, by process: {', '.join(names)}")


def check_memory(run: Run) -> None:
    """Refuses a state that the memory of a device cannot hold, before any of it is allocated.

    Raises:
      ConfigError: with both sizes.
    """
    needed, available = state_bytes(run), tuning.memory_bytes(jax.local_devices()[0])
    if available is not None and needed > available:
        raise ConfigError(
            f"config.model: parameters and moments take {needed / 2**30:,.1f} GiB of each device, which has "
            f"{available / 2**30:,.1f} GiB; a smaller model, or mesh.fsdp, would fit"
        )


def state_bytes(run: Run) -> int:
    """Bytes of the train state on one device; of all devices together where they share the memory of a machine."""
    leaves = jax.tree.leaves(run.abstract_state)
    here = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    return here * sharing_devices(run)


def sharing_devices(run: Run) -> int:
    """Devices of this process that share one memory: the virtual ones of a CPU."""
    return len(run.mesh.local_devices) if run.mesh.local_devices[0].platform == "cpu" else 1


def known_vocabulary(config: Config) -> int | None:
    """Rows of the embedding table as far as they are known without data; None: ask the tokenizer.

    Raises:
      ConfigError: data.tokenizer is misspelt.
    """
    return config.model.vocab_size or tokenizers.known_vocab_size(config.data.tokenizer)


def vocabulary(config: Config, corpus: Corpus) -> int:
    """Rows of the embedding table: the tokenizer's ids, or as many as the config asks for, if they suffice."""
    needed = corpus.tokenizer.vocab_size
    if config.model.vocab_size and config.model.vocab_size < needed:
        raise ConfigError(
            f"config.model.vocab_size = {config.model.vocab_size}: must be 0 (the tokenizer's) or >= {needed}, "
            f"the vocabulary of {corpus.tokenizer.name}"
        )
    return config.model.vocab_size or needed


def abstract_state(config: Config, model: Model, mesh: jax.sharding.Mesh) -> TrainState:
    """The train state as ShapeDtypeStructs, each with its sharding."""
    shapes = jax.eval_shape(lambda: init_state(config, model))
    optimizer = make_optimizer(config.optimizer, model.groups)
    params = sharding.param_shardings(mesh, model.logical_specs, shapes.params)
    everywhere = sharding.replicated(mesh)
    shardings = TrainState(
        step=everywhere,
        params=params,
        opt_state=sharding.opt_state_shardings(mesh, optimizer, shapes.opt_state, params),
        cutoffs_L=everywhere,
        bad_steps=everywhere,
        expert_cutoffs_LE=None if shapes.expert_cutoffs_LE is None else everywhere,
    )
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def remember(run: Run, init_from: str | os.PathLike | None) -> tuple[Run, inherit.Source | None]:
    """The run with what its newest checkpoint knows of its past; for a fresh run, the weights that it is to begin with.

    Raises:
      ConfigError, ResumeRefused: see `inherit.find_source`; or the run at hand began with other weights.
    """
    asked = None if init_from is None else str(paths.local_folder("--init_from", init_from))
    saved = None
    if (run.workdir / CHECKPOINTS).is_dir():
        with Checkpointer(run.workdir / CHECKPOINTS, read_only=True) as checkpointer:
            saved = checkpointer.read_metadata()
    if saved is None:
        if asked is None:
            return run, None
        source = inherit.find_source(asked, run.config, run.vocab_size, run.corpus.tokenizer)
        return dataclasses.replace(run, init_from=source.to_json()), source
    began, seconds = saved.get("init_from"), saved.get("wall_seconds", 0.0)  # which older checkpoints do not have
    if asked is not None and asked != (began or {}).get("workdir"):
        began_with = "weights of its own" if began is None else f"the weights of {began['workdir']}"
        raise ResumeRefused(
            f"--init_from = {asked!r}: the run in {run.workdir} has begun, with {began_with}; "
            "leave the flag out to go on, or use another workdir"
        )
    return dataclasses.replace(run, init_from=began, seconds_before=seconds), None


def restore_or_init(
    run: Run, checkpointer: Checkpointer, extend: bool, source: inherit.Source | None = None
) -> tuple[TrainState, Interval]:
    """The newest good checkpoint of this very run, or a fresh state, and its unfinished interval; says loudly which."""
    notes = []

    def wanted(saved: dict[str, Any]) -> TrainState:
        notes[:] = resume.check_same_run(saved, run.config, run.corpus.digest, run.num_steps, extend)
        resume.check_same_tokenizer(saved, run.corpus.tokenizer.digest)
        return run.abstract_state

    restored = checkpointer.restore(wanted)
    if restored is None:
        state = fresh_state(run)
        if source is not None:
            state = state._replace(params=inherit.take_weights(source, state.params, run.config, run.mesh))
            say(f"FRESH RUN with {inherit.describe(source, run.config)}")
        else:
            say(f"FRESH RUN: no checkpoint in {run.workdir / CHECKPOINTS}")
        return state, Interval()
    resume.check_length(restored.metadata, restored.step, run.num_steps)
    if extension := resume.describe_extension(restored.metadata, run.config, restored.step, run.num_steps):
        notes.append(extension)
    say("\n".join([f"RESUMED step {restored.step} of {run.num_steps} from {run.workdir / 'checkpoints'}", *notes]))
    finite.check_state(restored.state, f"the checkpoint of step {restored.step} (moved away, an older one is used)")
    return restored.state, Interval(restored.metadata.get("interval"))  # which older checkpoints do not have


def ranking_metric(config: Config) -> str:
    """What ranks checkpoints: the loss of sampling's default selection; top-k's where there is no causal one."""
    if not config.num_routed or why_not_sampled(config):
        return "eval/topk_loss"
    return f"eval/causal_loss/{causal_selection(config)}"


def fresh_state(run: Run) -> TrainState:
    """The state before the first step, initialised where it lives."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, run.abstract_state)
    return jax.jit(lambda: init_state(run.config, run.model), out_shardings=shardings)()


def compile_step(run: Run) -> jax.stages.Compiled:
    """Compiles the train step ahead of time: once per run, and batches of another shape are refused, not recompiled."""
    start = time.perf_counter()
    compiled = lower_step(run.config, run.model, run.mesh, run.abstract_state, run.num_steps).compile()
    memory = compiled.memory_analysis()
    needed = (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**20
    say(f"compiled the train step in {time.perf_counter() - start:.1f} s; memory {needed:,.0f} MiB per device")
    distributed.wait_for_others("compiled")
    return compiled


def lower_step(
    config: Config, model: Model, mesh: jax.sharding.Mesh, abstract_state: TrainState, num_steps: int
) -> jax.stages.Lowered:
    """The train step as it will be compiled: state donated, everything placed on the mesh."""
    # The state comes back laid out as it went in, or the next call would be refused.
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)
    step = jax.jit(
        make_train_step(config, model, num_steps),
        donate_argnums=0,
        out_shardings=(shardings, sharding.replicated(mesh)),
    )
    shape, placed = (config.train.batch_size, config.data.seq_len), sharding.batch_sharding(mesh)
    batch = {name: jax.ShapeDtypeStruct(shape, "int32", sharding=placed) for name in MODEL_INPUTS}
    with jax.set_mesh(mesh):
        return step.lower(abstract_state, batch)


def open_batches(run: Run, step: int):
    """The training stream from `step` on: this process's rows of each global batch."""
    return train_batches(
        run.corpus,
        seq_len=run.config.data.seq_len,
        batch_size=run.config.train.batch_size,
        seed=run.config.seed,
        start_step=step,
        rows=sharding.local_rows(run.mesh, run.config.train.batch_size),
        workers=run.config.data.workers,
    )


def put_batch(run: Run, batch: Batch) -> dict[str, jax.Array]:
    model_inputs = {name: batch[name] for name in MODEL_INPUTS}
    return sharding.put_batch(run.mesh, model_inputs, run.config.train.batch_size)


def open_watch(run: Run, step: int, interval: Interval) -> Watch:
    flat = config_lib.to_flat_dict(run.config)
    writer = MetricWriter(run.workdir, run.config.train.tracker, flat, resumed_at=step)
    return Watch(
        run.config,
        writer,
        first_step=step,
        num_steps=run.num_steps,
        tokens_per_step=run.tokens_per_step,
        flops_per_step=run.flops_per_step,
        devices=list(run.mesh.devices.flat),
        digest=run.corpus.digest[:12],
        interval=interval,
        part_names=finite.part_names(run.config.routed_depths, run.abstract_state),
        commit=commit(),
    )


def eval_is_due(run: Run, step: int) -> bool:
    return _is_due(step, run.config.train.eval_every, run.num_steps)


def save_is_due(run: Run, step: int) -> bool:
    return _is_due(step, run.config.train.save_every, run.num_steps)


def _is_due(step: int, every: int, last_step: int) -> bool:
    return step >= last_step or (every > 0 and step % every == 0)


def has_eval(run: Run, step: int) -> bool:
    """Whether metrics.jsonl has an evaluation of this step. Process 0 wrote the file, so it answers for all."""
    found = False
    if jax.process_index() == 0:
        rows = read_metrics(run.workdir / "metrics.jsonl")
        found = any(row["step"] == step and "eval/topk_loss" in row for row in rows)
    return from_process_0(found)


def stored_result(config: Config, workdir: pathlib.Path) -> list[str]:
    """What the end of this very run said; [] unless it is finished. Process 0 wrote it, so it answers for all."""
    lines = result.stored_lines(config, workdir) if jax.process_index() == 0 else []
    return lines or [""] * from_process_0(bool(lines))


def finish(run: Run, evaluation: dict[str, Any], wall_seconds: float) -> None:
    """Writes result.json, last of all, and says in a few lines how the run ended."""
    if jax.process_index() != 0:
        return
    stored = result.read(run.workdir)
    if stored is None or stored["fingerprint"] != config_lib.fingerprint(run.config):  # else it was only drawn again
        stored = {
            "step": run.num_steps,
            "tokens": run.num_steps * run.tokens_per_step,
            "flops": run.num_steps * run.flops_per_step,
            "evaluation": evaluation,
            **metadata(run, wall_seconds),
        }
        result.write(run.workdir, stored)
    say("\n".join(result.describe(stored, run.workdir)))


def from_process_0(value: bool | float) -> bool | float:
    """What process 0 says, in every process."""
    return multihost_utils.broadcast_one_to_all(np.array(value)).item() if jax.process_count() > 1 else value


def metadata(run: Run, wall_seconds: float) -> dict[str, Any]:
    """What a checkpoint, and result.json, know about their run. `wall_seconds`: spent so far, over all processes."""
    return about(run) | {"wall_seconds": round(wall_seconds, 1)}


def about(run: Run) -> dict[str, Any]:
    """What is known about a run before its first step."""
    return {
        "config": config_lib.to_flat_dict(run.config),
        "fingerprint": config_lib.fingerprint(run.config),
        "num_steps": run.num_steps,
        "corpus": describe_corpus(run.corpus),
        "corpus_digest": run.corpus.digest,
        "tokenizer_digest": run.corpus.tokenizer.digest,
        "vocab_size": run.vocab_size,
        "init_from": run.init_from,
        "mod_jax": mod_jax.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "device": jax.devices()[0].device_kind,
    }


def write_config(run: Run) -> None:
    """Writes config.json: the whole config, its difference from the default, and where it ran."""
    if jax.process_index() != 0:
        return
    contents = about(run) | {"changed_from_default": config_lib.changed_from_default(run.config)}
    run.workdir.mkdir(parents=True, exist_ok=True)
    outputs.write_json(run.workdir / "config.json", contents)


def describe(run: Run) -> str:
    """The run in a few lines: config, size, length, devices."""
    params = run.abstract_state.params
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    embedding = sum(leaf.size for leaf in jax.tree.leaves(params["embedder"]))
    per_token = run.flops_per_step / run.tokens_per_step
    all_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(run.abstract_state))
    kinds = "".join(block.kind for block in run.config.blocks)
    changed = ", ".join(f"{name}={value}" for name, value in config_lib.changed_from_default(run.config).items())
    mesh = " x ".join(f"{name} {size}" for name, size in run.mesh.shape.items())
    return "\n".join(
        [
            *config_lib.describe(run.config),
            *textwrap.wrap(f"changed   {changed}", 118, subsequent_indent=" " * 10, break_on_hyphens=False),
            f"identity  {config_lib.fingerprint(run.config)}, a fingerprint of every key that affects what is learned",
            f"size      {kinds}, {count:,} parameters ({embedding:,} in embeddings of {run.vocab_size:,} ids), "
            f"with optimizer {all_bytes / 2**20:,.1f} MiB over all devices",
            f"length    {run.num_steps:,} steps, {run.num_steps * run.tokens_per_step:,} tokens, "
            f"{run.num_steps * run.flops_per_step:.3g} training FLOPs ({per_token:.3g} per token)",
            f"devices   {run.mesh.size} of {jax.device_count()} x {jax.devices()[0].device_kind} ({mesh}), "
            f"{jax.process_count()} process(es), jax {jax.__version__}",
        ]
    )


def say(text: str) -> None:
    """One line on stdout, from process 0."""
    if jax.process_index() == 0:
        print(text, flush=True)
