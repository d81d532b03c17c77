"""Trains a model: python -m mod_jax.train --config=configs/cpu_demo.py:mod --workdir=runs/mod

The same command resumes the run, --extend makes it longer, --init_from begins a new one with its weights. The workdir
may lie in a bucket, gs://BUCKET/FOLDER.
"""

from absl import app, flags

from mod_jax import cli, paths, streams
from mod_jax.errors import EXIT_CODES

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; an existing one is resumed.", required=True)
DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print size, cost and time; train nothing.")
EXTEND = flags.DEFINE_bool("extend", False, "Allow a changed run length when resuming.")
INIT_FROM = flags.DEFINE_string("init_from", None, "Begin a new run with the weights of the run in this workdir.")
PROFILE = flags.DEFINE_bool("profile", False, "Trace a few steps for xprof, into WORKDIR/profile.")
PREEMPTED_EXIT_CODE = flags.DEFINE_integer(
    "preempted_exit_code",
    0,
    "Exit code of a run that was preempted and saved. What restarts runs often takes 0 for finished: give it 42, which "
    "no other end has.",
    0,
    255,
)
flags.register_validator(
    "preempted_exit_code", lambda code: code == 0 or code not in EXIT_CODES, "must be 0 or a code that no other end has"
)
CONFIG = cli.define_config()
DISTRIBUTED = cli.define_distributed()
flags.adopt_module_key_flags(cli)  # so that --help shows them


def main(argv: list[str]) -> int:
    cli.refuse_arguments(argv)

    def run() -> int:
        for name, folder in (("--workdir", WORKDIR.value), ("--init_from", INIT_FROM.value)):
            if folder is not None:
                paths.run_folder(name, folder)  # before the others are waited for
        cli.start_distributed(DISTRIBUTED)
        streams.outlive_stdout()
        from mod_jax.training import loop  # after flag errors: importing JAX takes seconds

        config = cli.read_config(CONFIG.value)
        if DRY_RUN.value:
            from mod_jax.training.dry_run import dry_run

            dry_run(config, WORKDIR.value)
            return 0
        verbs = dict(extend=EXTEND.value, init_from=INIT_FROM.value)
        outcome = loop.train(config, WORKDIR.value, **verbs, profile=PROFILE.value)
        return PREEMPTED_EXIT_CODE.value if outcome is loop.Outcome.PREEMPTED else 0

    return cli.exit_code(run)


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
