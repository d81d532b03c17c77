"""The lm-evaluation-harness with our models: python -m mod_jax.lm_eval --model mod_jax --model_args workdir=runs/mod

Flags are the harness's own. --model_args takes workdir, and optionally step, selection, capacity, context,
batch_tokens, and the mesh to lay the model out over: data, fsdp, tensor, expert. Needs the extra `lm-eval`.
"""

import sys

from mod_jax import cli, host, streams
from mod_jax.errors import ConfigError


def main() -> int:
    streams.prepare()
    streams.keep_warnings_of_libraries()
    host.prepare()

    def run() -> None:
        try:
            from lm_eval.__main__ import cli_evaluate
        except ModuleNotFoundError as error:
            if error.name != "lm_eval":
                raise
            raise ConfigError("mod_jax.lm_eval needs an extra: pip install -e '.[lm-eval]'") from None
        from mod_jax.evaluation import harness  # noqa: F401  registers the model

        cli_evaluate()

    return cli.exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
