"""The pretrained model as it was read: converted, and its logits compared with those of the program it was made for."""

from typing import Any, NamedTuple

import jax

from mod_jax.config import Config
from mod_jax.data import tokenizers
from mod_jax.errors import CheckpointMismatch, ConfigError
from mod_jax.layout import is_routed
from mod_jax.pretrained import families
from mod_jax.pretrained.check import difference_from_transformers
from mod_jax.pretrained.request import Request, Say, dense_config, layout_of
from mod_jax.pretrained.source import Source, open_source


class Dense(NamedTuple):
    """A pretrained model as it was read: `config` has layout "F"."""

    name: str
    digest: str  # sha256 of its files
    config: Config
    params: dict[str, Any]
    tokenizer: tokenizers.Tokenizer
    positions: int  # that it was trained for


def read_dense(request: Request, say: Say) -> Dense:
    """Reads and converts the model, and compares its logits where that is possible."""
    source = open_source(request.source)
    config = dense_config(source, request)
    layout = layout_of(request.layout, config, None)  # refuses a bad one now
    if request.train == "routing" and request.layout[:4] != "auto" and not any(map(is_routed, layout)):
        raise ConfigError(f"--train = 'routing': --layout = {request.layout!r} has no router to train")
    tokenizer = tokenizers.pretrained(config.data.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise CheckpointMismatch(
            f"{config.data.tokenizer}: has {tokenizer.vocab_size} ids, but the embedding of {source.name} has "
            f"{config.model.vocab_size} rows: it is another model's tokenizer"
        )
    params = families.read_params(source, config)
    digest = source.digest()
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    kind, depth, width = source.about["model_type"], config.model.depth, config.model.width
    say(f"source    {source.name}: {kind}, {depth} blocks of width {width}, {size:,} parameters, sha256 {digest[:12]}")
    say(f"checked   {_checked(source, config, params, request.check)}")
    return Dense(source.name, digest, config, params, tokenizer, families.model_keys(source)["model.context"])


def _checked(source: Source, config: Config, dense: dict[str, Any], check: bool | None) -> str:
    found = difference_from_transformers(source, config, dense) if check in (None, True) else "not asked for"
    if isinstance(found, str):
        if check:
            raise ConfigError(f"--check: logits cannot be compared: {found}")
        return f"logits were not compared with transformers: {found}"
    worst, largest = found
    if not worst <= 1e-3 * max(1.0, largest):
        raise CheckpointMismatch(f"{source.name}: logits differ from those of transformers by {worst:.3g}")
    return f"logits equal those of transformers, largest difference {worst:.1e} (logits up to {largest:.1f})"
