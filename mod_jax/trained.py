"""A trained model as its run left it: config, parameters and cut-offs from a checkpoint, and the tokenizer."""

import contextlib
import dataclasses
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import SingleDeviceSharding

from mod_jax import config as config_lib
from mod_jax import paths
from mod_jax.config import Config
from mod_jax.data import tokenizers
from mod_jax.data.corpus import prepare_corpus
from mod_jax.errors import CheckpointMismatch, ConfigError, DataError, RequestError, StorageError
from mod_jax.models.model import Model, make_model
from mod_jax.training.checkpoint import Checkpointer

CHECKPOINTS = "checkpoints"  # folder in the workdir of a run
TOKENIZER = "tokenizer"  # likewise


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """What sampling needs of a run. `cutoffs_L` is the cut-off of selection "threshold" per routed block."""

    config: Config
    model: Model
    params: dict[str, Any]
    cutoffs_L: jax.Array
    tokenizer: tokenizers.Tokenizer
    step: int
    metadata: dict[str, Any]


def restore(workdir: str | os.PathLike, step: int | None = None) -> TrainedModel:
    """Loads the newest good checkpoint of a run, or that of `step`, onto the first device. Writes nothing.

    Neither the corpus nor the tokenizer's own file is needed: the tokenizer lies in the workdir.

    Raises:
      StorageError: if there is none, or if its tokenizer is damaged.
      CheckpointMismatch: if it is of another model than its own config describes, or of another tokenizer.
    """
    workdir = paths.local_folder("--workdir", workdir)
    directory = workdir / CHECKPOINTS
    if not directory.is_dir():
        raise StorageError(f"{directory}: there is no such folder, so nothing was trained in this workdir yet")
    with Checkpointer(directory, read_only=True) as checkpointer:
        metadata = checkpointer.read_metadata(step)
        if metadata is None:
            raise StorageError(f"{directory}: there is no finished checkpoint yet")
        config = saved_config(metadata)
        tokenizer = load_tokenizer(workdir, config, metadata)
        model = make_model(config, config.model.vocab_size or tokenizer.vocab_size)
        here = SingleDeviceSharding(jax.local_devices()[0])
        cutoffs_L = jax.ShapeDtypeStruct((config.num_routed,), jnp.float32)
        abstract = {"params": model.abstract_params, "cutoffs_L": cutoffs_L}
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), abstract)
        restored = checkpointer.restore_fields(abstract, step)
    return TrainedModel(
        config, model, restored.state["params"], restored.state["cutoffs_L"], tokenizer, restored.step, metadata
    )


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


def load_tokenizer(workdir: pathlib.Path, config: Config, metadata: dict[str, Any]) -> tokenizers.Tokenizer:
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
    if config.data.tokenizer == "bytes":
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


def kept_tokenizer(workdir: pathlib.Path, config: Config) -> tokenizers.Tokenizer | None:
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


def keep_tokenizer(workdir: pathlib.Path, tokenizer: tokenizers.Tokenizer) -> None:
    """Lays the tokenizer of a run into its workdir. Call before the first checkpoint, in one process.

    Raises:
      StorageError: if it cannot be written.
    """
    directory = workdir / TOKENIZER
    try:
        with contextlib.suppress(StorageError):  # what is damaged is replaced
            kept = tokenizers.load(directory)
            if kept is not None and kept.digest == tokenizer.digest:
                return
        tokenizers.save(tokenizer, directory)
    except OSError as error:
        raise StorageError(f"{directory}: cannot keep the tokenizer here: {error.strerror}") from error


def causal_selection(config: Config, selection: str | None = None) -> str:
    """The causal selection to sample with, checked: default the predictor's where there is one.

    Raises:
      ConfigError: if this model has no causal selection, or if the one asked for was not trained.
    """
    trained = config.causal_selections
    if not config.num_routed:
        if selection is not None:
            raise ConfigError(f"selection = {selection!r}: this model has no routed blocks, so nothing is selected")
        return "none"
    if not trained:
        raise ConfigError(
            f"routing.gate = {config.routing.gate!r}: weighs a token by later ones, so no causal selection exists"
        )
    if selection is None:
        return "predictor" if "predictor" in trained else trained[0]
    if selection not in trained:
        why = {
            "topk": " looks at the future",
            "router": " was not trained (routing.aux_weight = 0)",
            "predictor": " was not trained (routing.predictor = False)",
        }.get(selection, " does not exist")
        raise ConfigError(f"selection = {selection!r}:{why}; this run has {', '.join(trained)}")
    return selection
