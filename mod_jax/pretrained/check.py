"""Are the logits those of the program that the model was made for? Asked of `transformers`, where it is installed."""

import dataclasses
from typing import Any

import jax
import numpy as np

from mod_jax.config import Config
from mod_jax.models.model import make_model
from mod_jax.pretrained.source import Source

LENGTH = 48


def difference_from_transformers(source: Source, config: Config, params: dict[str, Any]) -> tuple[float, float] | str:
    """(largest difference of a logit, largest logit) on random ids, both in float32; or why that cannot be told."""
    kind, _, path = source.name.partition(":")
    if kind != "hf":
        return "it reads folders; a GGUF file has no golden logits to compare with"
    try:
        import torch
        import transformers
    except ImportError as error:
        return f"{error.name} is not installed"
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    ids_1T = np.random.default_rng(0).integers(0, config.model.vocab_size, (1, LENGTH))
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
        with torch.no_grad():
            theirs_1TV = model(torch.from_numpy(ids_1T)).logits.numpy()
    except Exception as error:  # whatever stops another program is its own affair
        return f"it cannot load the folder ({' '.join(str(error).split())[:120]})"
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="float32"))
    model = make_model(config, config.model.vocab_size)
    ours_1TV = np.asarray(jax.jit(model.run)(params, ids_1T.astype(np.int32)).logits_BTV)
    return float(np.abs(ours_1TV - theirs_1TV).max()), float(np.abs(theirs_1TV).max())
