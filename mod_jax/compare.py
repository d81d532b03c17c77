"""Compares runs in a table and a plot: python -m mod_jax.compare runs/dense runs/mod

A run that is not finished is shown as far as it got; what cannot be read gets a line that says why.
"""

from absl import app, flags

from mod_jax import cli, outputs
from mod_jax.errors import ConfigError

OUT = flags.DEFINE_string("out", None, "Folder for compare.md, compare.json and compare.png.")
AXIS = flags.DEFINE_enum("axis", "flops", ["flops", "tokens", "seconds"], "What the plot shows losses against.")


def main(argv: list[str]) -> int:
    def run() -> None:
        if len(argv) < 2:
            raise ConfigError("give the workdirs of one or more runs; for example runs/dense runs/mod")
        out = None if OUT.value is None else outputs.check_folder("out", OUT.value)
        from mod_jax.analysis import comparison  # after flag errors: importing JAX takes seconds

        runs, unreadable = comparison.read_runs(argv[1:])
        lines = [*comparison.table(runs), *unreadable]
        if out is not None:
            outputs.write_text(out / "compare.md", "\n".join([*comparison.table(runs, markdown=True), "", *unreadable]))
            outputs.write_json(out / "compare.json", [run.summary() for run in runs])
            from mod_jax.analysis import plots

            plots.save(comparison.draw(runs, AXIS.value), out / "compare.png")
            lines.append(f"written to {out}")
        print("\n".join(lines))

    return cli.exit_code(run)


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
