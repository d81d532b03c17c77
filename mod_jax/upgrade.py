"""Upgrades a pretrained model: python -m mod_jax.upgrade --from=gguf:FILE --workdir=runs/up

Makes a dense model a Mixture-of-Depths one, without training, and tunes it if asked to.
Reads a folder of transformers (hf:FOLDER, config.json and *.safetensors) or a file of llama.cpp (gguf:FILE). Measures
what each block is worth, gives the cheapest ones routers, and prints what each capacity costs in loss and saves in
FLOPs, beside deleting whole blocks. The workdir is then an ordinary one, for evaluate, sample and train --init_from.
"""

import pathlib

from absl import app, flags

from mod_jax import cli, streams
from mod_jax import config as config_lib

FROM = flags.DEFINE_string("from", None, "The model: hf:FOLDER or gguf:FILE.", required=True)
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder to be made; it must not be there yet, or be empty.", required=True
)
LAYOUT = flags.DEFINE_string(
    "layout",
    "auto",
    "Which blocks are routed: auto:N, the N cheapest; auto, half of the inner ones; or letters (F: it stays dense).",
)
CAPACITY = flags.DEFINE_float("capacity", 0.75, "Fraction of tokens that a routed block computes on, in (0, 1].")
GRID = flags.DEFINE_list("grid", ["0.9", "0.75", "0.5", "0.25"], "Capacities that are measured, too.")
TOKENIZER = flags.DEFINE_string("tokenizer", "", "Folder of a tokenizer.json, in place of the model's own tokenizer.")
CALIBRATION_ROWS = flags.DEFINE_integer("calibration_rows", 16, "Rows of training text for routers and cut-offs.")
BLOCK_ROWS = flags.DEFINE_integer("block_rows", 3, "Of these, rows on which each block is left out.")
CHECK = flags.DEFINE_bool(
    "check", None, "Compare logits with those of transformers; default: where that is installed and can."
)
STEPS = flags.DEFINE_integer("steps", 0, "Steps of tuning afterwards, into WORKDIR/tuned.")
TRAIN = flags.DEFINE_string("train", "lora", "What is tuned: lora, routing or all (see optimizer.train).")
LOSS = flags.DEFINE_string(
    "loss", "kl", "kl: the dense model's distribution is learned. ce: the text, too where the layout is dense."
)
CONFIG = cli.define_config()
flags.adopt_module_key_flags(cli)  # so that --help shows it
DEFAULTS = pathlib.Path(__file__).parent / "pretrained" / "keys.py"


def parse_flags(argv: list[str]) -> list[str]:
    """As for every command; --config.a.b=value needs no --config here."""
    has_file = any(argument.lstrip("-").startswith("config=") for argument in argv[1:])
    return cli.parse_flags(argv if has_file else [argv[0], f"--config={DEFAULTS}", *argv[1:]])


def main(argv: list[str]) -> int:
    cli.refuse_arguments(argv)

    def run() -> None:
        streams.outlive_stdout()
        from mod_jax.errors import ConfigError

        try:
            grid = [float(capacity) for capacity in GRID.value]
        except ValueError:
            raise ConfigError(f"--grid = {','.join(GRID.value)}: must be numbers in (0, 1], with commas") from None
        from mod_jax.pretrained import upgrade  # after flag errors: importing JAX takes seconds

        upgrade.upgrade(
            upgrade.Request(
                source=FROM.value,
                workdir=WORKDIR.value,
                layout=LAYOUT.value,
                capacity=CAPACITY.value,
                grid=grid,
                tokenizer=TOKENIZER.value,
                calibration_rows=CALIBRATION_ROWS.value,
                block_rows=BLOCK_ROWS.value,
                check=CHECK.value,
                steps=STEPS.value,
                train=TRAIN.value,
                loss=LOSS.value,
                changes=config_lib.asked_for(CONFIG.value),
            )
        )

    return cli.exit_code(run)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
