"""A trained model as its run left it: config, parameters and cut-offs from a checkpoint, and the tokenizer."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, SingleDeviceSharding

from mod_jax import buckets, paths, sharding
from mod_jax import config as config_lib
from mod_jax.analysis.routing_stats import capacities, capacity_error
from mod_jax.config import Config, MeshConfig
from mod_jax.data import tokenizers
from mod_jax.data.corpus import prepare_corpus
from mod_jax.data.prepared import is_prepared
from mod_jax.errors import CheckpointMismatch, ConfigError, DataError, RequestError, StorageError
from mod_jax.models.model import Model, Weights, make_model
from mod_jax.training.checkpoint import Checkpointer

CHECKPOINTS = "checkpoints"  # folder in the workdir of a run
TOKENIZER = "tokenizer"  # likewise
MAX_CONTEXT = 2**17  # a float32 angle is then wrong by 1/128 at most


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """What sampling and evaluation need of a run.

    Attributes:
      cutoffs_L: the cut-off of selection "threshold" per routed block.
      expert_cutoffs_LE: that of each expert, per block with experts; None unless experts choose their tokens.
      step: of the checkpoint.
      metadata: what the checkpoint says of its run.
      evaluation: the metrics of the evaluation that was recorded with the checkpoint; None if there was none.
      mesh: what its weights are laid out over, and rows of a batch will be; None: it lies on one device.
    """

    config: Config
    model: Model
    params: dict[str, Any]
    cutoffs_L: jax.Array
    tokenizer: tokenizers.Tokenizer
    step: int
    metadata: dict[str, Any]
    evaluation: dict[str, float] | None = None
    expert_cutoffs_LE: jax.Array | None = None
    mesh: Mesh | None = None

    @property
    def trained_positions(self) -> int:
        """Positions from here on were never trained."""
        pretrained = (self.metadata.get("init_from") or {}).get("positions", 0)  # of an upgraded model
        return max(self.config.data.seq_len, pretrained)

    @property
    def weights(self) -> Weights:
        return Weights(self.params, self.cutoffs_L, self.expert_cutoffs_LE)


def chosen_workdir(root: pathlib.Path) -> paths.Folder | None:
    """The run that $MOD_JAX_RUN names, from `root` on if it is a relative path; None where it is not set.

    Raises:
      StorageError: if there is no run. Another one is not shown in its place.
    """
    name = os.environ.get("MOD_JAX_RUN", "")
    if not name:
        return None
    if buckets.is_bucket(name):
        workdir = paths.folder_to_read("MOD_JAX_RUN", name)
    else:
        workdir = root / pathlib.Path(name).expanduser()
    if not (workdir / CHECKPOINTS).is_dir():
        raise StorageError(
            f"MOD_JAX_RUN = {name!r}: {workdir} has no folder {CHECKPOINTS}, so nothing was trained there"
        )
    return workdir


def restore(
    workdir: str | os.PathLike,
    step: int | None = None,
    *,
    context: int | None = None,
    mesh: MeshConfig | Mapping[str, int] | None = None,
) -> TrainedModel:
    """Loads the newest good checkpoint of a run, or that of `step`. Writes nothing.

    Neither the corpus nor the tokenizer's own file is needed: the tokenizer lies in the workdir.

    Args:
      context: the longest sequence to sample or score, in place of the run's own; caches are sized by it. Rotary
        positions have no limit, but positions from `data.seq_len` on were never trained.
      mesh: devices to lay the model out over, such as `dict(tensor=4)`, whatever it was trained on; axes as in
        `config.mesh`, 1 where left out. Each device reads its own part of the checkpoint. None: the first device alone.

    Raises:
      StorageError: if there is none, or if its tokenizer is damaged.
      CheckpointMismatch: if it is of another model than its own config describes, or of another tokenizer.
      RequestError: if the context is out of range.
      ConfigError: if there are not so many devices, or the weights do not divide evenly over them.
    """
    mesh = as_mesh_config(mesh)
    workdir = paths.folder_to_read("--workdir", workdir)
    directory = workdir / CHECKPOINTS
    if not directory.is_dir():
        raise StorageError(f"{directory}: there is no such folder, so nothing was trained in this workdir yet")
    parts, stored = {}, []  # `stored`: the model as the checkpoint has it, perhaps with low-rank additions

    def wanted(metadata: dict[str, Any]) -> dict[str, Any]:
        """What to read of a step, which its own metadata tells."""
        config = saved_config(metadata)
        if context is not None:
            config = with_context(config, context)
        tokenizer = load_tokenizer(workdir, config, metadata)
        model = make_model(config, config.model.vocab_size or tokenizer.vocab_size)
        parts.update(config=config, tokenizer=tokenizer, model=model.plain)
        stored.append(model)
        cutoffs_L = jax.ShapeDtypeStruct((config.num_routed,), jnp.float32)
        abstract = {"params": model.abstract_params, "cutoffs_L": cutoffs_L}
        if config.experts_choose:
            shape = len(config.expert_depths), config.experts.count
            abstract["expert_cutoffs_LE"] = jax.ShapeDtypeStruct(shape, jnp.float32)
        parts["mesh"] = serving_mesh(config, mesh)
        lies = weight_shardings(model, abstract, parts["mesh"])
        return jax.tree.map(lambda a, lies: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=lies), abstract, lies)

    with Checkpointer(directory, read_only=True) as checkpointer:
        restored = checkpointer.restore_fields(wanted, step)
    if restored is None:
        raise StorageError(f"{directory}: there is no finished checkpoint yet")
    found = dict(step=restored.step, metadata=restored.metadata, evaluation=restored.metrics)
    state, model = restored.state, stored[-1]
    if model is not model.plain:
        lies = weight_shardings(model.plain, {"params": model.plain.abstract_params}, parts["mesh"])
        state = {**state, "params": jax.jit(model.merged, out_shardings=lies["params"])(state["params"])}
    return TrainedModel(**parts, **state, **found)


def as_mesh_config(mesh: MeshConfig | Mapping[str, int] | None) -> MeshConfig:
    """Checked as far as it can be without a model. None: one device.

    Raises:
      RequestError: an axis that does not exist, or a size that is neither -1 (all that are left) nor >= 1.
    """
    sizes = dataclasses.asdict(mesh) if isinstance(mesh, MeshConfig) else dict(mesh or {})
    for name, size in sizes.items():
        if name not in sharding.AXES:
            raise RequestError(f"mesh.{name}: no such axis; there are {', '.join(sharding.AXES)}")
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise RequestError(f"mesh.{name} = {size!r}: must be an integer >= 1, or -1 (all devices that are left)")
    if list(sizes.values()).count(-1) > 1:
        raise RequestError(
            f"mesh: {' and '.join(n for n, size in sizes.items() if size == -1)} are -1; only one may be"
        )
    return MeshConfig(**{name: sizes.get(name, 1) for name in sharding.AXES})


def serving_mesh(config: Config, mesh: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh | None:
    """The mesh to sample and evaluate this model on, over `devices` (default: all); None where that is one device.

    Raises:
      ConfigError: there are not so many devices, the weights do not divide evenly over them, or this is one of several
        processes.
    """
    devices = jax.devices() if devices is None else devices
    if mesh == MeshConfig(data=1):
        return None
    if jax.process_count() > 1:
        raise ConfigError(f"a model is sampled from and evaluated by one process, and there are {jax.process_count()}")
    sizes = sharding.mesh_sizes(mesh, len(devices), "mesh")
    sharding.check_model(config, sizes)
    return sharding.mesh_of(tuple(sizes.values()), devices) if math.prod(sizes.values()) > 1 else None


def weight_shardings(model: Model, abstract: dict[str, Any], mesh: Mesh | None) -> dict[str, Any]:
    """Where parameters and cut-offs lie: as in training, or all on the first device."""
    if mesh is None:
        return jax.tree.map(lambda _: SingleDeviceSharding(jax.local_devices()[0]), abstract)
    shardings = jax.tree.map(lambda _: sharding.replicated(mesh), abstract)
    return shardings | {"params": sharding.param_shardings(mesh, model.logical_specs, abstract["params"])}


def with_context(config: Config, context: int) -> Config:
    """The config with another longest sequence for sampling."""
    trained, most = config.data.seq_len, max(MAX_CONTEXT, config.model.context)
    if isinstance(context, bool) or not isinstance(context, int) or not trained <= context <= most:
        raise RequestError(f"context = {context!r}: must be an integer in [{trained}, {most}], from data.seq_len on")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, context=context))


def as_model(model: TrainedModel | str | os.PathLike) -> TrainedModel:
    """The model itself, or the newest one of a workdir. See `restore`."""
    if isinstance(model, TrainedModel):
        return model
    if isinstance(model, str | os.PathLike):
        return restore(model)
    raise RequestError(f"model: must be a workdir or what restore() gives, found {type(model).__name__}")


def saved_config(metadata: dict[str, Any]) -> Config:
    """The config that wrote a checkpoint."""
    try:
        return config_lib.from_flat_dict(metadata["config"])
    except ConfigError as error:
        raise ConfigError(f"the checkpoint was written by mod_jax {metadata.get('mod_jax', '?')}: {error}") from error


def load_tokenizer(workdir: paths.Folder, config: Config, metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of a run, as it was when the checkpoint with this metadata was written.

    A run of an earlier version did not keep it. Then it is what the corpus gives, if that is still the same.

    Raises:
      StorageError, CheckpointMismatch, DataError: if what lies there is damaged, is another, or cannot be made again.
    """
    tokenizer, wanted = tokenizers.load(workdir / TOKENIZER), metadata.get("tokenizer_digest")
    if tokenizer is not None and wanted in (None, tokenizer.digest):
        return tokenizer
    if tokenizer is not None:
        raise CheckpointMismatch(
            f"{workdir / TOKENIZER} holds {tokenizer.name} of digest {tokenizer.digest[:12]}, "
            f"but the checkpoint was trained with digest {wanted[:12]}; bring that run's own folder back"
        )
    if config.data.tokenizer == "bytes" and not is_prepared(config.data.source):
        return tokenizers.ByteTokenizer()
    gone = f"{workdir / TOKENIZER}: the run's tokenizer is not there"
    try:
        corpus = prepare_corpus(config.data)
    except (ConfigError, DataError) as error:
        raise StorageError(f"{gone}, and its corpus cannot be prepared to make it again: {error}") from error
    if corpus.digest != metadata["corpus_digest"]:
        raise StorageError(
            f"{gone}, and its corpus has changed since: digest {metadata['corpus_digest'][:12]} -> {corpus.digest[:12]}"
        )
    return corpus.tokenizer


def kept_tokenizer(workdir: paths.Folder, config: Config) -> tokenizers.Tokenizer | None:
    """The tokenizer to continue a run with; None before its first checkpoint, and where `data.tokenizer` is another.

    A damaged one counts as none: training can make it again, and finds out whether it is the same.
    """
    checkpoints = workdir / CHECKPOINTS
    if not checkpoints.is_dir() or not any(path.name.isdecimal() for path in checkpoints.iterdir()):
        return None
    try:
        tokenizer = tokenizers.load(workdir / TOKENIZER)
    except StorageError as error:
        logging.warning("%s; it is made again", error)
        return None
    return tokenizer if tokenizer is not None and tokenizer.name == config.data.tokenizer else None


def keep_tokenizer(workdir: paths.Folder, tokenizer: tokenizers.Tokenizer) -> None:
    """Lays the tokenizer of a run into its workdir. Call before the first checkpoint, in one process.

    Raises:
      StorageError: if it cannot be written.
    """
    directory = workdir / TOKENIZER
    with paths.writing(directory):
        with contextlib.suppress(StorageError):  # what is damaged is replaced
            kept = tokenizers.load(directory)
            if kept is not None and kept.digest == tokenizer.digest:
                return
        tokenizers.save(tokenizer, directory)


def causal_selection(config: Config, selection: str | None = None) -> str:
    """The causal selection to sample with, checked: default the predictor's where there is one.

    Raises:
      ConfigError: if this model has no causal selection, or if the one asked for was not trained.
    """
    trained = config.causal_selections
    if not config.num_routed and not trained:
        if selection is not None:
            raise ConfigError(f"selection = {selection!r}: this model has no routed blocks, so nothing is selected")
        return "none"
    if why_not := why_not_sampled(config):
        raise ConfigError(why_not)
    if selection is None:
        return "predictor" if "predictor" in trained else trained[0]
    if selection not in trained:
        why = {
            "topk": " looks at the future",
            "router": " was not trained (routing.aux_weight = 0)",
            "predictor": " was not trained (routing.predictor = False)",
        }.get(str(selection), " does not exist")
        why = why if config.num_routed else " this model has no routed blocks"
        raise ConfigError(f"selection = {selection!r}:{why}; this run has {', '.join(trained)}")
    return selection


def why_not_sampled(config: Config) -> str | None:
    """Why nothing can be sampled from a model of this config; None if it can."""
    if config.num_routed and config.routing.gate == "softmax":
        return "routing.gate = 'softmax': weighs a token by later ones, so no causal selection exists"
    if config.num_routed and config.routing.score == "stochastic":
        return "routing.score = 'stochastic' is a control for training: there is nothing to sample with"
    return None


def best_selection(model: TrainedModel) -> tuple[str, str]:
    """(the causal selection to sample with if none is asked for, why), by the evaluation recorded with the checkpoint.

    The one whose realised capacity is nearest to what top-k keeps: another spends other compute than was trained, and
    may leave every routed block out.
    """
    default = causal_selection(model.config)
    if len(model.config.causal_selections) < 2:
        return default, "the only one"
    errors = {s: capacity_error(model.evaluation or {}, s) for s in (default, *model.config.causal_selections)}
    errors = {s: error for s, error in errors.items() if error is not None and math.isfinite(error)}
    if not errors:
        return default, "the default: no evaluation stands with this checkpoint"
    best = min(errors, key=errors.get)  # the default first among equals
    routed = ", ".join(f"{s} {model.evaluation[f'eval/realised_capacity/{s}']:.1%}" for s in errors)
    kept = np.mean([kept for _, _, kept in capacities(model.evaluation, best)])
    return best, f"calibrated best when step {model.step} was evaluated: routed {routed}; trained with {kept:.1%}"
