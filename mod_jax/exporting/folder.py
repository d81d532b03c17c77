"""Writes the folder of an exported model: whole, or not at all."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
from typing import NamedTuple

import jax.numpy as jnp

from mod_jax import outputs
from mod_jax.errors import ConfigError
from mod_jax.evaluation import budget
from mod_jax.exporting import card, families, tokenizer, weights
from mod_jax.trained import TrainedModel, as_model, best_selection, causal_selection

REFERENCE = "modeling_mod.py"


class Exported(NamedTuple):
    """`family` is that of Hugging Face, None for the reference model; `digest` is of the weights."""

    family: str | None
    selection: str
    digest: str
    num_bytes: int


def export(
    model: TrainedModel | str | os.PathLike,
    out: str | os.PathLike,
    *,
    selection: str | None = None,
    capacity: float | None = None,
    with_tokenizer: bool = True,
) -> Exported:
    """Exports a model under one causal selection.

    Args:
      model: as `restore` gives it, or a workdir.
      out: a folder that is not there yet, or is empty.
      selection: a causal one that was trained; None for the one that is calibrated best.
      capacity: shift the cut-offs of selection "threshold" to this budget, on the run's held-out text.

    Raises:
      ConfigError: naming what cannot be exported. StorageError: the folder cannot be written.
    """
    _import_safetensors()
    out = outputs.check_new_folder("out", out)
    budget.check_selection(selection, capacity)
    model = as_model(model)
    families.refuse(model.config)
    if with_tokenizer:
        tokenizer.refuse(model.tokenizer)
    why = "as asked for" if selection else ""
    if capacity is not None:
        budget.check_capacity(model, capacity)
        shifted = budget.calibrate(model, capacity, budget.held_out_batches(model))
        model = dataclasses.replace(model, cutoffs_L=jnp.asarray(shifted.cutoffs_L))
        selection, why = "threshold", f"cut-offs shifted to capacity {capacity:g} on held-out text"
    elif selection is None and model.config.num_routed:
        selection, why = best_selection(model)
    selection = causal_selection(model.config, selection)
    cutoffs_L = [float(cutoff) for cutoff in model.cutoffs_L]
    family = families.family(model.config)
    ids = tokenizer.special_ids(model.tokenizer)
    with outputs.new_folder(out) as folder:
        digest = weights.save(weights.tensors(model.params, model.config), folder)
        outputs.write_json(folder / "config.json", families.describe(model, selection, cutoffs_L, ids))
        without_text = list(range(model.tokenizer.vocab_size, model.model.vocab_size))  # rows of the table alone
        outputs.write_json(
            folder / "generation_config.json", ids | ({"suppress_tokens": without_text} if without_text else {})
        )
        if with_tokenizer:
            tokenizer.save(model.tokenizer, folder, model.config.model.context)
        if family is None:
            shutil.copyfile(pathlib.Path(__file__).with_name(REFERENCE), folder / REFERENCE)
        facts = dict(family=family, selection=selection, why=why, cutoffs_L=cutoffs_L, digest=digest)
        (folder / "README.md").write_text(card.write(model, **facts, has_tokenizer=with_tokenizer), encoding="utf-8")
        for path in folder.glob("*.safetensors"):
            shutil.copymode(folder / "config.json", path)  # the library lets nobody else read them
        num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    return Exported(family, selection, digest, num_bytes)


def _import_safetensors() -> None:
    try:
        import safetensors.numpy  # noqa: F401
    except ImportError:
        raise ConfigError("mod_jax.export needs an extra: pip install -e '.[pretrained]'") from None
