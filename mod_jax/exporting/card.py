"""The model card: what the folder holds, how it is loaded, and what is known of it."""

from __future__ import annotations

import mod_jax
from mod_jax import config as config_lib
from mod_jax.evaluation import tables
from mod_jax.trained import TrainedModel
from mod_jax.versions import commit


def write(
    model: TrainedModel,
    *,
    family: str | None,
    selection: str,
    why: str,
    cutoffs_L: list[float],
    digest: str,
    has_tokenizer: bool,
) -> str:
    """Markdown, with the front matter that Hugging Face reads."""
    routed = [f"{depth} ({cutoff:.6g})" for depth, cutoff in zip(model.config.routed_depths, cutoffs_L, strict=True)]
    facts = {
        "selection": "none: every token goes through every block" if selection == "none" else f"`{selection}`, {why}",
        "routed blocks (cut-off)": ", ".join(routed) or "none",
        "layout": f"`{model.config.model.layout}` x {model.config.model.depth}",
        "parameters": f"{sum(leaf.size for leaf in _leaves(model.params)):,}",
        "checkpoint": f"step {model.step}, config {config_lib.fingerprint(model.config)}, seed {model.config.seed}",
        "corpus": f"{model.config.data.source}, digest {str(model.metadata.get('corpus_digest', 'unknown'))[:12]}",
        "tokenizer": f"{model.tokenizer.name}, digest {model.tokenizer.digest[:12]}",
        "computed in": f"{model.config.model.dtype} in training, to which the losses below belong",
        "trained by": f"mod_jax {model.metadata.get('mod_jax', 'unknown')}",
        "exported by": f"mod_jax {mod_jax.__version__}, commit {commit()}",
        "digest of the weights": digest,
    }
    trust = "" if family else ", trust_remote_code=True"
    load = ["import transformers", "", f'model = transformers.AutoModelForCausalLM.from_pretrained("."{trust})']
    if has_tokenizer:
        load += [
            f'tokenizer = transformers.AutoTokenizer.from_pretrained("."{trust})',
            'ids = model.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=32)',
            "print(tokenizer.decode(ids[0], skip_special_tokens=True))",
        ]
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            "tags: [mixture-of-depths, mod_jax]",
            "---",
            "",
            "# A dense transformer" if family else "# A Mixture-of-Depths transformer",
            "",
            f"Weights in float32, one tensor per layer; {_computed_by(family)}.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in facts.items()),
            "",
            "```python",
            *load,
            "```",
            "",
            *_losses(model),
        ]
    )


def _computed_by(family: str | None) -> str:
    if family:
        return f"transformers' own `{family}` computes it"
    return "`modeling_mod.py`, which lies beside them, computes it, in PyTorch and transformers alone"


def _losses(model: TrainedModel) -> list[str]:
    if not model.evaluation:
        return ["No evaluation stands with this checkpoint.", ""]
    about = "Held-out losses of the checkpoint, as they were evaluated with it, at the cut-offs of training"
    top_k = "; top-k looks at the future, so its loss is not a language model's" if model.config.num_routed else ""
    return [f"{about}{top_k}:", "", "```", *tables.loss_table(model.evaluation), "```", ""]


def _leaves(tree):
    for value in tree.values():
        yield from _leaves(value) if isinstance(value, dict) else [value]
