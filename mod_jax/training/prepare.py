"""What is fixed before the first step of a run: config, data, mesh, model, length. Checked here, and said on stdout."""

import dataclasses
import math
import os
import platform
import textwrap
from typing import Any

import flax
import jax
import numpy as np
from jax.experimental import multihost_utils

import mod_jax
from mod_jax import config as config_lib
from mod_jax import distributed, outputs, paths, sharding, tuning
from mod_jax.config import Config
from mod_jax.data.corpus import Corpus, describe_corpus, known_vocab_size, prepare_corpus
from mod_jax.errors import ConfigError, DataError
from mod_jax.models import flops
from mod_jax.models.model import Model, make_model
from mod_jax.trained import kept_tokenizer
from mod_jax.training import teacher, trackers
from mod_jax.training.language import Language
from mod_jax.training.optimizer import make_optimizer
from mod_jax.training.step import TrainState, init_state
from mod_jax.versions import commit

MAX_STEPS = 2**31 - 1  # the state counts them as int32


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that is fixed before the first step. `abstract_state` carries shapes, dtypes and shardings."""

    config: Config
    workdir: paths.Folder
    corpus: Corpus | None  # None: not opened yet
    mesh: jax.sharding.Mesh
    task: Language
    vocab_size: int
    abstract_state: TrainState
    num_steps: int
    init_from: dict[str, Any] | None = None  # where its weights came from, see `inherit.Source`
    seconds_before: float = 0.0  # spent by earlier processes on the steps that are resumed


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
    run: Run | None, config: Config, workdir: paths.Folder, init_from: str | os.PathLike | None = None
) -> Run:
    """The run with its data, and described anew if its vocabulary could not be known without."""
    tokenizer = kept_tokenizer(workdir, config)
    if tokenizer is None and init_from is not None:
        tokenizer = kept_tokenizer(paths.folder_to_read("--init_from", init_from), config)
    corpus = prepare_corpus(config.data, tokenizer)
    distributed.wait_for_others("prepared")
    check_processes_agree("corpus", corpus.digest[:12], DataError)
    vocab_size = vocabulary(config, corpus)
    if run is None or run.vocab_size != vocab_size:
        run = make_run(config, workdir, vocab_size)
        say(describe(run))
        check_memory(run)
    if run.task.teacher is not None:
        run.task.teacher.check_tokenizer(corpus.tokenizer)
        say(run.task.teacher.describe(run.mesh))
    epochs = run.num_steps * run.task.units_per_step / corpus.num_train_tokens
    say(f"corpus    {describe_corpus(corpus)}; {epochs:.2f} epochs")
    return dataclasses.replace(run, corpus=corpus)


def make_run(config: Config, workdir: paths.Folder, vocab_size: int) -> Run:
    """The run without its data: what it computes, on which devices, for how long."""
    mesh = sharding.make_mesh(config)
    task = make_task(config, vocab_size)
    if task.teacher is not None:
        task.teacher.check_mesh(mesh)
    num_steps = flops.train_steps(config, vocab_size)
    if num_steps > MAX_STEPS:
        name = next(name for name in config_lib.LENGTH_KEYS if config_lib.to_flat_dict(config)[name])
        raise ConfigError(f"config.{name}: gives {num_steps:.3g} steps, more than {MAX_STEPS:,} cannot be counted")
    return Run(
        config=config,
        workdir=workdir,
        corpus=None,
        mesh=mesh,
        task=task,
        vocab_size=vocab_size,
        abstract_state=abstract_state(config, task.model, mesh),
        num_steps=num_steps,
    )


def make_task(config: Config, vocab_size: int) -> Language:
    """What this config is to learn.

    Raises:
      ConfigError: it names a teacher that is not there, or has another vocabulary.
    """
    return Language(config, make_model(config, vocab_size), teacher.find(config, vocab_size))


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
    """Bytes of the train state, and of a teacher's weights, on one device; of all devices together where they share the
    memory of a machine."""
    leaves = jax.tree.leaves(run.abstract_state)
    here = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    here += run.task.teacher.bytes_per_device(run.mesh) if run.task.teacher else 0
    return here * sharing_devices(run)


def sharing_devices(run: Run) -> int:
    """Devices of this process that share one memory: the virtual ones of a CPU."""
    return len(run.mesh.local_devices) if run.mesh.local_devices[0].platform == "cpu" else 1


def known_vocabulary(config: Config) -> int | None:
    """Rows of the embedding table as far as they are known without data; None: ask the tokenizer.

    Raises:
      ConfigError: data.tokenizer is misspelt.
    """
    return config.model.vocab_size or known_vocab_size(config.data)


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
        "parameters": flops.count_parameters(run.config, run.task.model)._asdict(),
        "init_from": run.init_from,
        "teacher": run.task.teacher and run.task.teacher.to_json(),
        "mod_jax": mod_jax.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "device": jax.devices()[0].device_kind,
    }


def metadata(run: Run, wall_seconds: float) -> dict[str, Any]:
    """What a checkpoint, and result.json, know about their run. `wall_seconds`: spent so far, over all processes."""
    return about(run) | {"wall_seconds": round(wall_seconds, 1)}


def write_config(run: Run) -> None:
    """Writes config.json: the whole config, its difference from the default, and where it ran."""
    if jax.process_index() != 0:
        return
    contents = about(run) | {"changed_from_default": config_lib.changed_from_default(run.config)}
    paths.make_folder(run.workdir)
    outputs.write_json(run.workdir / "config.json", contents)


def describe(run: Run) -> str:
    """The run in a few lines: config, size, length, devices."""
    embedding = sum(leaf.size for leaf in jax.tree.leaves(run.abstract_state.params["embedder"]))
    per_token = run.task.flops_per_step / run.task.units_per_step
    all_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(run.abstract_state))
    kinds = "".join(block.kind for block in run.config.blocks)
    changed = ", ".join(f"{name}={value}" for name, value in config_lib.changed_from_default(run.config).items())
    mesh = " x ".join(f"{name} {size}" for name, size in run.mesh.shape.items())
    return "\n".join(
        [
            *config_lib.describe(run.config),
            *textwrap.wrap(f"changed   {changed}", 118, subsequent_indent=" " * 10, break_on_hyphens=False),
            f"identity  {config_lib.fingerprint(run.config)}, a fingerprint of every key that affects what is learned",
            f"size      {kinds}, {flops.count_parameters(run.config, run.task.model)} ({embedding:,} in embeddings of "
            f"{run.vocab_size:,} ids), with optimizer {all_bytes / 2**20:,.1f} MiB over all devices",
            f"length    {run.num_steps:,} steps, {run.num_steps * run.task.units_per_step:,} tokens, "
            f"{run.num_steps * run.task.flops_per_step:.3g} training FLOPs ({per_token:.3g} per token)",
            f"devices   {run.mesh.size} of {jax.device_count()} x {jax.devices()[0].device_kind} ({mesh}), "
            f"{jax.process_count()} process(es), jax {jax.__version__}",
        ]
    )


def say(text: str) -> None:
    """One line on stdout, from process 0."""
    if jax.process_index() == 0:
        print(text, flush=True)
