"""A decoder described without its parameters, which then are a plain nested dict."""

from typing import Any, NamedTuple

import jax
from flax import nnx

from mod_jax.config import Config
from mod_jax.errors import ConfigError
from mod_jax.models import lora
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

    `vocab_size` is the number of rows of the embedding table, at least the tokenizer's ids. With `optimizer.train` =
    "lora" the parameters hold additions beside the weights, and `plain` is the model without them.
    """

    vocab_size: int
    graphdef: Any
    abstract_params: dict[str, Any]
    logical_specs: dict[str, Any]
    groups: dict[str, Any]
    init: Any
    add: Any = None  # makes plain parameters of those with additions
    under: Any = None  # the model that they are made to

    @property
    def plain(self) -> "Model":
        """The model without additions; itself, if it has none."""
        return self if self.under is None else self.under

    def merge(self, params: dict[str, Any]) -> Decoder:
        return nnx.merge(self.graphdef, nnx.State(self.merged(params)))

    def merged(self, params: dict[str, Any]) -> dict[str, Any]:
        """The parameters as the decoder has them, with any additions in them."""
        return self.add(params) if "lora" in params else params

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
    plain = Model(
        vocab_size,
        graphdef,
        nnx.to_pure_dict(abstract),
        nnx.to_pure_dict(nnx.get_partition_spec(abstract)),
        nnx.to_pure_dict(jax.tree.map(lambda p: p.group, abstract, is_leaf=lambda p: isinstance(p, nnx.Param))),
        lambda: nnx.to_pure_dict(nnx.state(build(), nnx.Param)),
    )
    return _with_additions(plain, config) if config.optimizer.train == "lora" else plain


def _with_additions(plain: Model, config: Config) -> Model:
    plans = lora.additions(plain.abstract_params, plain.logical_specs, plain.groups, config.optimizer.lora_rank)
    return plain._replace(
        abstract_params={**plain.abstract_params, "lora": lora.abstract(plans)},
        logical_specs={**plain.logical_specs, "lora": lora.logical_specs(plans)},
        groups={**plain.groups, "lora": lora.groups(plans)},
        init=lambda: {**plain.init(), "lora": lora.init(plans, config.seed)},
        add=lambda params: lora.merged(params, plans, config.optimizer),
        under=plain,
    )
