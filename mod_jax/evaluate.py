"""Evaluates a run's newest checkpoint on its held-out text: python -m mod_jax.evaluate --workdir=runs/mod

Prints the top-k loss, each causal loss with its gap, the capacity realised and the FLOPs really spent, and how each
block is calibrated. A selection that is not causal ends it with exit code 1.
"""

from absl import app, flags

from mod_jax import cli, outputs

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
STEP = flags.DEFINE_integer("step", None, "Step of the checkpoint; default: the newest.")
CAPACITY = flags.DEFINE_float(
    "capacity", None, "Shift the cut-offs of selection `threshold` to this budget, in (0, 1]."
)
CONTEXT = flags.DEFINE_integer("context", None, "Tokens per window, from data.seq_len on; default: data.seq_len.")
MESH = cli.define_mesh()
flags.adopt_module_key_flags(cli)  # so that --help shows them
OUT = flags.DEFINE_string("out", None, "Also write the numbers to this JSON file.")


def main(argv: list[str]) -> int:
    cli.refuse_arguments(argv)

    def run() -> None:
        if OUT.value is not None:
            outputs.check_place("out", OUT.value)
        from mod_jax.evaluation.finished import evaluate_run  # after flag errors: importing JAX takes seconds

        options = dict(context=CONTEXT.value, mesh=cli.mesh_of(MESH))
        metrics, lines = evaluate_run(WORKDIR.value, STEP.value, CAPACITY.value, **options)
        if OUT.value is not None:  # first, since stdout may break
            outputs.write_json(OUT.value, metrics)
        print("\n".join(lines))

    return cli.exit_code(run)


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
