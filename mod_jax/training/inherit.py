"""Weights of another run as the start of a new one (`--init_from`): step 0, a fresh optimizer, fresh cut-offs.

Taken over are the embeddings and the weights of every block; they must all be there and fit. A router, or a predictor,
is taken over where both runs have one of the same kind, and starts afresh where only the new run has. So a dense run
can become a routed one.
"""

import dataclasses
import os
from typing import Any

import jax
from jax.sharding import Mesh

from mod_jax import config as config_lib
from mod_jax import sharding
from mod_jax.config import Config
from mod_jax.data.tokenizers import Tokenizer
from mod_jax.errors import ConfigError, ResumeRefused
from mod_jax.models.decoder import by_depth, from_depth
from mod_jax.models.model import Model, make_model
from mod_jax.paths import Folder, as_folder, folder_to_read
from mod_jax.training.checkpoint import Checkpointer
from mod_jax.training.resume import saved_config


@dataclasses.dataclass(frozen=True)
class Source:
    """The checkpoint that a new run takes its weights from."""

    workdir: str
    step: int
    config: Config
    model: Model

    def to_json(self) -> dict[str, Any]:
        """What a run remembers of where its weights came from."""
        return dict(workdir=self.workdir, step=self.step, fingerprint=config_lib.fingerprint(self.config))


def find_source(workdir: str | os.PathLike, config: Config, vocab_size: int, tokenizer: Tokenizer) -> Source:
    """The newest checkpoint of another run, if its weights fit. Reads no array, writes nothing.

    Args:
      config, vocab_size, tokenizer: of the new run.

    Raises:
      ConfigError: there is no checkpoint.
      ResumeRefused: the weights do not fit; names every key that must not differ.
    """
    folder, step, saved, old = newest_checkpoint("--init_from", workdir)
    differing = {
        name: pair
        for name, pair in config_lib.difference(old, config).items()
        if config_lib.FIELDS[name].metadata["change"] == "never"
    }
    if _parts(old) != _parts(config):
        differing["model.layout"] = (old.model.layout, config.model.layout)
    old_vocab_size = old.model.vocab_size or saved.get("vocab_size", vocab_size)
    differing.pop("model.vocab_size", None)
    if old_vocab_size != vocab_size:
        differing["model.vocab_size"] = (old_vocab_size, vocab_size)
    if saved.get("tokenizer_digest", tokenizer.digest) != tokenizer.digest:
        differing["tokenizer digest"] = (saved["tokenizer_digest"][:12], tokenizer.digest[:12])
    if differing:
        lines = "\n".join(f"  {name}: {was!r} -> {now!r}" for name, (was, now) in differing.items())
        raise ResumeRefused(f"the weights of {folder} do not fit this run (there -> here):\n{lines}")
    return source_at(folder, step, old, vocab_size)


def newest_checkpoint(name: str, workdir: str | os.PathLike) -> tuple[Folder, int, dict[str, Any], Config]:
    """(folder, step, metadata, config) of the newest checkpoint of a run that the flag or key `name` names.

    Raises:
      ConfigError: there is none.
    """
    folder = folder_to_read(name, workdir)
    step = saved = None
    if (folder / "checkpoints").is_dir():
        with Checkpointer(folder / "checkpoints", read_only=True) as checkpointer:
            step = checkpointer.latest_step()
            saved = checkpointer.read_metadata(step) if step is not None else None
    if saved is None:
        raise ConfigError(f"{name} = {os.fspath(workdir)!r}: there is no finished checkpoint in {folder}")
    return folder, step, saved, saved_config(saved)


def source_at(folder: Folder, step: int, config: Config, vocab_size: int) -> Source:
    return Source(str(folder), step, config, make_model(config, vocab_size))


def _parts(config: Config) -> list[tuple[str | None, str | None]]:
    """Mixer and channel of each block: what routing leaves as it is."""
    return [(block.mixer, block.channel) for block in config.blocks]


def take_weights(source: Source, fresh: dict[str, Any], config: Config, mesh: Mesh) -> dict[str, Any]:
    """Returns `fresh`, the parameters as they were initialised on the mesh, with the weights of `source` in them.

    Raises:
      StorageError: the checkpoint is damaged.
    """
    old = read_weights(source, mesh)
    into = jax.tree.map(lambda leaf: leaf.sharding, fresh)
    return jax.jit(lambda fresh, old: merge(fresh, config, old, source.config), out_shardings=into)(fresh, old)


def read_weights(source: Source, mesh: Mesh) -> dict[str, Any]:
    """The weights of a checkpoint on the mesh, with any low-rank additions in them.

    Raises:
      StorageError: the checkpoint is damaged.
    """
    model = source.model
    places = sharding.param_shardings(mesh, model.logical_specs, model.abstract_params)
    abstract = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), model.abstract_params, places
    )
    with Checkpointer(as_folder(source.workdir) / "checkpoints", read_only=True) as checkpointer:
        stored = checkpointer.restore_params(abstract, source.step).state
    if model.plain is model:
        return stored
    places = sharding.param_shardings(mesh, model.plain.logical_specs, model.plain.abstract_params)
    return jax.jit(model.merged, out_shardings=places)(stored)


def merge(fresh: dict[str, Any], config: Config, old: dict[str, Any], old_config: Config) -> dict[str, Any]:
    """`fresh` parameters with every weight of `old` that both have. Shapes are those of `fresh`."""
    parts = taken_parts(config, old_config)
    blocks = []
    for depth, (new, was) in enumerate(zip(by_depth(fresh, config), by_depth(old, old_config), strict=True)):
        inner = was.get("block", was)  # of a routed block, or a full one
        taken = {part: was[part] for part, depths in parts.items() if depth in depths}
        blocks.append({**new, "block": inner, **taken} if "block" in new else inner)
    return from_depth(blocks, {**fresh, **{name: old[name] for name in ("embedder", "final_norm")}}, config)


def taken_parts(config: Config, old_config: Config) -> dict[str, list[int]]:
    """Depths of the routers and of the predictors that are taken over: both runs have one, of the same kind."""
    both = [depth for depth in config.routed_depths if depth in old_config.routed_depths]
    routers = config.routing.score == old_config.routing.score != "stochastic"
    predictors = config.routing.predictor and old_config.routing.predictor
    return {"router": both if routers else [], "predictor": both if predictors else []}


def describe(source: Source, config: Config) -> str:
    """One line: where the weights are from, and what starts afresh."""
    taken = taken_parts(config, source.config)
    wanted = {
        "router": config.routed_depths if config.routing.score != "stochastic" else (),
        "predictor": config.routed_depths if config.routing.predictor else (),
    }
    afresh = {part: [depth for depth in depths if depth not in taken[part]] for part, depths in wanted.items()}
    said = [f"{part}s of blocks {', '.join(map(str, depths))}" for part, depths in afresh.items() if depths]
    said += ["the optimizer", "the cut-offs"]
    return f"weights of step {source.step} of {source.workdir}; afresh: {', '.join(said)}"
