"""Exports a run for Hugging Face transformers: python -m mod_jax.export --workdir=runs/mod --out=exported/mod

A dense model that is a Llama, Qwen2 or Qwen3 becomes one. Any other comes with a reference model in PyTorch, one file
in the folder, that transformers loads with trust_remote_code=True. The folder is written whole or not at all.
"""

from absl import app, flags

from mod_jax import cli

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
OUT = flags.DEFINE_string("out", None, "Folder to write: one that is not there yet, or is empty.", required=True)
STEP = flags.DEFINE_integer("step", None, "Step of the checkpoint; default: the newest.")
SELECTION = flags.DEFINE_string(
    "selection",
    None,
    "router, predictor or threshold; default: the one that was calibrated best at the last evaluation.",
)
CAPACITY = flags.DEFINE_float(
    "capacity", None, "Compute budget in (0, 1]: shifts the cut-offs of selection `threshold`, on held-out text."
)
TOKENIZER = flags.DEFINE_bool("tokenizer", True, "Export the tokenizer too.")


def main(argv: list[str]) -> int:
    cli.refuse_arguments(argv)
    return cli.exit_code(run)


def run() -> None:
    from mod_jax import outputs, trained  # after flag errors: importing JAX takes seconds
    from mod_jax.evaluation import budget
    from mod_jax.exporting.folder import export

    outputs.check_new_folder("out", OUT.value)  # before anything is loaded
    budget.check_selection(SELECTION.value, CAPACITY.value)
    model = trained.restore(WORKDIR.value, STEP.value)
    asked = dict(selection=SELECTION.value, capacity=CAPACITY.value, with_tokenizer=TOKENIZER.value)
    made = export(model, OUT.value, **asked)
    kind = f"a plain {made.family}" if made.family else "the reference model, for trust_remote_code=True"
    print(f"step {model.step} of {WORKDIR.value} exported to {OUT.value} as {kind}")
    print(f"selection {made.selection}; {made.num_bytes:,} bytes; digest of the weights {made.digest[:12]}")


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
