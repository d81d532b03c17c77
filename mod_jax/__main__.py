"""Lists the commands: python -m mod_jax"""

import ast
import pathlib
import sys

from mod_jax.errors import ConfigError

COMMANDS = (
    "prepare",
    "train",
    "evaluate",
    "compare",
    "sample",
    "upgrade",
    "export",
    "lm_eval",
    "plan",
    "doctor",
)


def first_line(command: str) -> str:
    """What the command says of itself, without importing it."""
    source = pathlib.Path(__file__).with_name(f"{command}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)).splitlines()[0]


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] not in ("--help", "-h", "--helpshort", "--helpfull"):
        print(f"error: {sys.argv[1]!r}: commands are written python -m mod_jax.train", file=sys.stderr)
        sys.exit(ConfigError.exit_code)
    print("\n".join(first_line(command) for command in COMMANDS))
    print("Each explains its flags: python -m mod_jax.train --help")
