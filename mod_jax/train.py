"""Trains a model: python -m mod_jax.train --config=configs/cpu_demo.py:mod --workdir=runs/mod

The same command resumes the run, --extend makes it longer, --init_from begins a new one with its weights.
"""

from absl import app, flags

from mod_jax import cli, streams

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; an existing one is resumed.", required=True)
DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print size, cost and time; train nothing.")
EXTEND = flags.DEFINE_bool("extend", False, "Allow a changed run length when resuming.")
INIT_FROM = flags.DEFINE_string("init_from", None, "Begin a new run with the weights of the run in this workdir.")
PROFILE = flags.DEFINE_bool("profile", False, "Trace a few steps for xprof, into WORKDIR/profile.")
CONFIG = cli.define_config()
DISTRIBUTED = cli.define_distributed()
flags.adopt_module_key_flags(cli)  # so that --help shows them


def main(argv: list[str]) -> int:
    cli.refuse_arguments(argv)

    def run() -> None:
        cli.start_distributed(DISTRIBUTED)
        streams.outlive_stdout()
        from mod_jax.training import loop  # after flag errors: importing JAX takes seconds

        config = cli.read_config(CONFIG.value)
        if DRY_RUN.value:
            from mod_jax.training.dry_run import dry_run

            dry_run(config, WORKDIR.value)
        else:
            verbs = dict(extend=EXTEND.value, init_from=INIT_FROM.value)
            loop.train(config, WORKDIR.value, **verbs, profile=PROFILE.value)

    return cli.exit_code(run)


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
