"""A trained model as its run left it: config, parameters and cut-offs from a checkpoint, and the tokenizer."""

import dataclasses
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from mod_jax import config as config_lib
from mod_jax import paths
from mod_jax.config import Config
from mod_jax.data import tokenizers
from mod_jax.data.corpus import prepare_corpus
from mod_jax.errors import ConfigError, RequestError, StorageError
from mod_jax.models.model import Model, make_model
from mod_jax.training.checkpoint import Checkpointer

CHECKPOINTS = "checkpoints"  # folder in the workdir of a run


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

    Raises:
      StorageError: if there is none.
      CheckpointMismatch: if it is of another model than its own config describes.
    """
    directory = paths.local_folder("--workdir", workdir) / CHECKPOINTS
    if not directory.is_dir():
        raise StorageError(f"{directory}: there is no such folder, so nothing was trained in this workdir yet")
    with Checkpointer(directory, read_only=True) as checkpointer:
        metadata = checkpointer.read_metadata(step)
        if metadata is None:
            raise StorageError(f"{directory}: there is no finished checkpoint yet")
        config = saved_config(metadata)
        tokenizer = load_tokenizer(config)
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


def load_tokenizer(config: Config) -> tokenizers.Tokenizer:
    """The tokenizer of a run. A trained one lies with the prepared corpus, which is prepared again if it is gone."""
    if tokenizers.needs_training(config.data.tokenizer):
        return prepare_corpus(config.data).tokenizer
    return tokenizers.load(config.data.tokenizer, pathlib.Path())


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
