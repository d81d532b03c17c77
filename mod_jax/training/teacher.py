"""A trained run whose next-token distribution another one learns (`train.teacher`): found, checked, loaded.

All its blocks are full, so that of an upgraded model it is the dense model that was upgraded. Its weights lie beside
the train state, in `train.teacher_dtype`; no checkpoint holds them.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mod_jax import sharding
from mod_jax.config import Config
from mod_jax.data.tokenizers import Tokenizer
from mod_jax.errors import ConfigError
from mod_jax.layout import unrouted
from mod_jax.models import flops
from mod_jax.models.blocks import Choice
from mod_jax.models.decoder import by_depth, from_depth
from mod_jax.models.model import Model, make_model
from mod_jax.training import inherit


@dataclasses.dataclass(frozen=True)
class Teacher:
    """The newest checkpoint of a run, when it was found. `config` and `model` are without routing, and of `dtype`."""

    source: inherit.Source
    config: Config
    tokenizer_digest: str | None
    model: Model
    dtype: jnp.dtype

    def describe(self, mesh: Mesh) -> str:
        """One line: which run, and what it takes."""
        size = sum(leaf.size for leaf in jax.tree.leaves(self.model.abstract_params))
        return (
            f"teacher   step {self.source.step} of {self.source.workdir}, {size:,} parameters in {self.dtype.name}, "
            f"{self.bytes_per_device(mesh) / 2**20:,.1f} MiB on each device"
        )

    def bytes_per_device(self, mesh: Mesh) -> int:
        leaves = jax.tree.leaves(self.abstract_params(mesh))
        return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)

    def to_json(self) -> dict[str, Any]:
        """What a run remembers of its teacher."""
        return self.source.to_json()

    def flops(self, seq_len: int) -> float:
        """Of one row, forward, every token selected."""
        return flops.forward_flops(self.config, self.model.vocab_size, seq_len).total

    def abstract_params(self, mesh: Mesh) -> dict[str, Any]:
        """The weights as ShapeDtypeStructs, each with its sharding."""
        model = self.model
        places = sharding.param_shardings(mesh, model.logical_specs, model.abstract_params)
        dtypes = jax.tree.map(lambda group: self.dtype if group == "matrix" else jnp.float32, model.groups)
        return jax.tree.map(
            lambda leaf, dtype, place: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=place),
            model.abstract_params,
            dtypes,
            places,
        )

    def load(self, mesh: Mesh) -> dict[str, Any]:
        """The weights, on the mesh.

        Raises:
          StorageError: the checkpoint is damaged, or gone.
        """
        wanted, stored = self.abstract_params(mesh), inherit.read_weights(self.source, mesh)

        def without_routing(params: dict[str, Any]) -> dict[str, Any]:
            blocks = [block.get("block", block) for block in by_depth(params, self.source.config)]
            dense = from_depth(blocks, {name: params[name] for name in ("embedder", "final_norm")}, self.config)
            return jax.tree.map(lambda weight, leaf: weight.astype(leaf.dtype), dense, wanted)

        places = jax.tree.map(lambda leaf: leaf.sharding, wanted)
        return jax.jit(without_routing, out_shardings=places)(stored)

    def features(self, params: dict[str, Any], *inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(normalised features [B, T, D], the weight that makes logits of them [D, V]), without gradient."""
        decoder = self.model.merge(jax.lax.stop_gradient(params))
        x_BTD, _ = decoder.features(*inputs, Choice("all"))
        return x_BTD, decoder.embedder.output_weight()

    def check_mesh(self, mesh: Mesh) -> None:
        """Raises ConfigError unless the weights divide evenly over the mesh."""
        try:
            sharding.check_model(self.config, dict(mesh.shape))
        except ConfigError as error:
            raise ConfigError(f"config.train.teacher = {self.source.workdir!r}: of its model, {error}") from None

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError if the ids of the teacher mean other text."""
        if self.tokenizer_digest not in (None, tokenizer.digest):
            raise ConfigError(
                f"config.train.teacher = {self.source.workdir!r}: its tokenizer is another one, digest "
                f"{self.tokenizer_digest[:12]}; this run's is {tokenizer.digest[:12]}"
            )


def find(config: Config, vocab_size: int) -> Teacher | None:
    """The teacher that `config` names, if any. Reads no array.

    Raises:
      ConfigError: there is none, or one with another vocabulary, or that is another model with all tokens selected.
    """
    name = config.train.teacher
    if not name:
        return None
    folder, step, saved, old = inherit.newest_checkpoint("config.train.teacher", name)
    rows = old.model.vocab_size or saved["vocab_size"]
    if rows != vocab_size:
        raise ConfigError(f"config.train.teacher = {name!r}: has a vocabulary of {rows}, this run one of {vocab_size}")
    if old.num_routed and old.routing.gate != "one":
        raise ConfigError(
            f"config.train.teacher = {name!r}: its routing.gate is {old.routing.gate!r}, and must be 'one': with "
            "another, it is another model when every token is selected"
        )
    if old.experts_choose:
        raise ConfigError(f"config.train.teacher = {name!r}: its experts.choice is 'expert', which is no causal model")
    dtype = config.train.teacher_dtype
    layout = "".join(map(unrouted, old.model.layout))
    shape = dict(dtype=dtype, remat="none", scan=True, layout=layout)
    dense = dataclasses.replace(old, model=dataclasses.replace(old.model, **shape))
    model = make_model(dense, rows).plain
    return Teacher(
        inherit.source_at(folder, step, old, rows), dense, saved.get("tokenizer_digest"), model, jnp.dtype(dtype)
    )
