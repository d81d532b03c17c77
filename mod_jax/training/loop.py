"""The training loop, which reads as a table of contents, and what frames it: resume, evaluate, save, finish.

Layout of a workdir: claim.json (which run is using it), config.json, metrics.jsonl, tokenizer/, checkpoints/<step>/,
report/*.png, at the end result.json, and if asked for tensorboard/ and profile/. Rerunning the same command resumes;
of a finished run it prints the result.
"""

import contextlib
import dataclasses
import enum
import os
import time
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from mod_jax import config as config_lib
from mod_jax import distributed, paths, sharding
from mod_jax.config import Config
from mod_jax.data.batches import Batch
from mod_jax.errors import ResumeRefused
from mod_jax.trained import CHECKPOINTS, keep_tokenizer
from mod_jax.training import claim, finite, inherit, optimizer, result, resume
from mod_jax.training.checkpoint import Checkpointer
from mod_jax.training.interval import Interval
from mod_jax.training.language import Language
from mod_jax.training.preemption import PreemptionGuard
from mod_jax.training.prepare import Run, metadata, prepare_run, say, write_config
from mod_jax.training.profile import Profiler
from mod_jax.training.rows import MetricWriter, read_metrics
from mod_jax.training.step import TrainState, init_state, make_train_step
from mod_jax.training.watch import Watch
from mod_jax.versions import commit


class Outcome(enum.Enum):
    """How a call of `train` ended without an error."""

    DONE = "done"
    PREEMPTED = "preempted"


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
        if finished := stored_result(config, workdir, init_from):
            say("\n".join(finished))
            return Outcome.DONE
        run = prepare_run(config, workdir, init_from)
        run, source = remember(run, init_from)
        start -= run.seconds_before
        with (
            jax.set_mesh(run.mesh),
            claim.hold(run.workdir) as check_claim,
            Checkpointer(
                run.workdir / CHECKPOINTS, keep=config.train.keep, metric=run.task.ranking_metric
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
            evaluator = run.task.evaluator(run.mesh, run.corpus)
            if step and eval_is_due(run, step) and not has_eval(run, step):  # preempted between step and evaluation
                watch.evaluate(step, evaluator, state)

            if step < run.num_steps:
                train_step = compile_step(run)
                batches, teacher = open_batches(run, step), load_teacher(run)
            while step < run.num_steps:
                step += 1
                with profiler.step(step, run.num_steps, watch.pause):
                    batch = next(batches)
                    state, metrics = train_step(state, put_batch(run, batch), *teacher)
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


def remember(run: Run, init_from: str | os.PathLike | None) -> tuple[Run, inherit.Source | None]:
    """The run with what its newest checkpoint knows of its past; for a fresh run, the weights that it is to begin with.

    Raises:
      ConfigError, ResumeRefused: see `inherit.find_source`; or the run at hand began with other weights.
    """
    asked = asked_source(init_from)
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
    taught, teaches = saved.get("teacher") or {}, run.task.teacher and run.task.teacher.to_json()
    if teaches and taught and any(taught[name] != teaches[name] for name in ("step", "fingerprint")):
        was, now = (f"step {of['step']} of config {of['fingerprint']}" for of in (taught, teaches))
        raise ResumeRefused(
            f"config.train.teacher = {run.config.train.teacher!r}: this run began with {was}; there now lies {now}"
        )
    if asked is not None and asked != (began or {}).get("workdir"):
        began_with = "weights of its own" if began is None else f"the weights of {began['workdir']}"
        raise ResumeRefused(
            f"--init_from = {asked!r}: the run in {run.workdir} has begun, with {began_with}; "
            "leave the flag out to go on, or use another workdir"
        )
    return dataclasses.replace(run, init_from=began, seconds_before=seconds), None


def asked_source(init_from: str | os.PathLike | None) -> str | None:
    """The workdir in --init_from, as checkpoints and results name it."""
    return None if init_from is None else str(paths.run_folder("--init_from", init_from))


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


def fresh_state(run: Run) -> TrainState:
    """The state before the first step, initialised where it lives."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, run.abstract_state)
    return jax.jit(lambda: init_state(run.config, run.task.model), out_shardings=shardings)()


def compile_step(run: Run) -> jax.stages.Compiled:
    """Compiles the train step ahead of time: once per run, and batches of another shape are refused, not recompiled."""
    start = time.perf_counter()
    compiled = lower_step(run.task, run.mesh, run.abstract_state, run.num_steps).compile()
    memory = compiled.memory_analysis()
    needed = (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**20
    say(f"compiled the train step in {time.perf_counter() - start:.1f} s; memory {needed:,.0f} MiB per device")
    distributed.wait_for_others("compiled")
    return compiled


def lower_step(
    task: Language, mesh: jax.sharding.Mesh, abstract_state: TrainState, num_steps: int
) -> jax.stages.Lowered:
    """The train step as it will be compiled: state donated, everything placed on the mesh."""
    # The state comes back laid out as it went in, or the next call would be refused.
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)
    step = jax.jit(
        make_train_step(task, num_steps),
        donate_argnums=0,
        out_shardings=(shardings, sharding.replicated(mesh)),
    )
    placed = sharding.batch_sharding(mesh)
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed) for name, x in task.inputs.items()}
    with jax.set_mesh(mesh):
        teacher = () if task.teacher is None else (task.teacher.abstract_params(mesh),)
        return step.lower(abstract_state, batch, *teacher)


def open_batches(run: Run, step: int):
    """The training stream from `step` on: this process's rows of each global batch."""
    return run.task.batches(run.corpus, step, sharding.local_rows(run.mesh, run.config.train.batch_size))


def load_teacher(run: Run) -> tuple[dict[str, Any], ...]:
    """What the train step takes beside state and batch: the weights of the teacher, if there is one."""
    return () if run.task.teacher is None else (run.task.teacher.load(run.mesh),)


def put_batch(run: Run, batch: Batch) -> dict[str, jax.Array]:
    model_inputs = {name: batch[name] for name in run.task.inputs}
    return sharding.put_batch(run.mesh, model_inputs, run.config.train.batch_size)


def open_watch(run: Run, step: int, interval: Interval) -> Watch:
    flat = config_lib.to_flat_dict(run.config)
    trained, _ = optimizer.split(run.abstract_state.params, run.config.optimizer, run.task.model.groups)
    writer = MetricWriter(run.workdir, run.config.train.tracker, flat, resumed_at=step)
    return Watch(
        run.config,
        writer,
        first_step=step,
        num_steps=run.num_steps,
        tokens_per_step=run.task.units_per_step,
        flops_per_step=run.task.flops_per_step,
        devices=list(run.mesh.devices.flat),
        digest=run.corpus.digest[:12],
        interval=interval,
        part_names=finite.part_names(run.config.routed_depths, run.abstract_state, trained),
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


def stored_result(config: Config, workdir: paths.Folder, init_from: str | os.PathLike | None = None) -> list[str]:
    """What the end of this very run said; [] unless it is finished. Process 0 wrote it, so it answers for all."""
    lines = result.stored_lines(config, workdir, asked_source(init_from)) if jax.process_index() == 0 else []
    return lines or [""] * from_process_0(bool(lines))


def finish(run: Run, evaluation: dict[str, Any], wall_seconds: float) -> None:
    """Writes result.json, last of all, and says in a few lines how the run ended."""
    if jax.process_index() != 0:
        return
    stored = result.read(run.workdir)
    if stored is None or stored["fingerprint"] != config_lib.fingerprint(run.config):  # else it was only drawn again
        stored = {
            "step": run.num_steps,
            "tokens": run.num_steps * run.task.units_per_step,
            "flops": run.num_steps * run.task.flops_per_step,
            "evaluation": evaluation,
            **metadata(run, wall_seconds),
        }
        result.write(run.workdir, stored)
    say("\n".join(result.describe(stored, run.workdir)))


def from_process_0(value: bool | float) -> bool | float:
    """What process 0 says, in every process."""
    return multihost_utils.broadcast_one_to_all(np.array(value)).item() if jax.process_count() > 1 else value
