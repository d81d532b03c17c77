"""A decoder described without its parameters, which then are a plain nested dict."""

from typing import Any, NamedTuple

import jax
from flax import nnx

from mod_jax.config import Config
from mod_jax.errors import ConfigError
from mod_jax.models.blocks import TOPK, Choice
from mod_jax.models.decoder import Decoder, ModelOutput

INIT_STREAM = 0  # of the seed; 1 is routing's


class Weights(NamedTuple):
    """What a run has learned: all that evaluation, sampling and analysis read of it.

    `cutoffs_L` is the cut-off of selection "threshold" per routed block, float32. `expert_cutoffs_LE` is that of each
    expert per block with experts, where experts choose their tokens.
    """

    params: dict[str, Any]
    cutoffs_L: jax.Array
    expert_cutoffs_LE: jax.Array | None = None

    def choice(self, rule: str, keys_B: jax.Array | None = None) -> Choice:
        """The choice by this rule, with the cut-offs of the run."""
        return Choice(rule, self.cutoffs_L, keys_B, self.expert_cutoffs_LE)


class Model(NamedTuple):
    """A decoder without its parameters: apply with `run`, place with `logical_specs`.

    `vocab_size` is the number of rows of the embedding table, at least the tokenizer's ids.
    """

    vocab_size: int
    graphdef: Any
    abstract_params: dict[str, Any]
    logical_specs: dict[str, Any]
    groups: dict[str, Any]
    init: Any

    def merge(self, params: dict[str, Any]) -> Decoder:
        return nnx.merge(self.graphdef, nnx.State(params))

    def run(
        self,
        params: dict[str, Any],
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segments_BT: jax.Array | None = None,
        choice: Choice = TOPK,
    ) -> ModelOutput:
        """The decoder of `params`; arguments as for `Decoder.features`."""
        return self.merge(params)(tokens_BT, positions_BT, segments_BT, choice)


def make_model(config: Config, vocab_size: int) -> Model:
    """Describes the model without allocating it; `init()` makes the parameters as a pure nested dict.

    Raises:
      ConfigError: `vocab_size`, the number of rows of the embedding table, is no integer >= 1.
    """
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1:
        tokenizers = "config.model.vocab_size is 0 where the tokenizer decides"
        raise ConfigError(f"vocab_size = {vocab_size!r}: must be an integer >= 1; {tokenizers}")

    def build() -> Decoder:
        key = jax.random.fold_in(jax.random.key(config.seed), INIT_STREAM)
        return Decoder(config, vocab_size, nnx.Rngs(params=key))

    graphdef, abstract = nnx.split(nnx.eval_shape(build), nnx.Param)
    return Model(
        vocab_size,
        graphdef,
        nnx.to_pure_dict(abstract),
        nnx.to_pure_dict(nnx.get_partition_spec(abstract)),
        nnx.to_pure_dict(jax.tree.map(lambda p: p.group, abstract, is_leaf=lambda p: isinstance(p, nnx.Param))),
        lambda: nnx.to_pure_dict(nnx.state(build(), nnx.Param)),
    )
