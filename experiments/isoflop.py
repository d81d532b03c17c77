"""The isoFLOP study: variants and sizes at equal training FLOPs, from the plan to the figures.

    python experiments/isoflop.py plan --preset=cpu --out=runs/isoflop        # the cells, what each costs, its command
    xargs -P 2 -d '\\n' -I{} sh -c {} < runs/isoflop/commands.txt             # or: python experiments/isoflop.py run
    python experiments/isoflop.py time --out=runs/isoflop                     # step times, on a quiet machine
    python experiments/isoflop.py collect --out=runs/isoflop                  # tables, optima, figures

`plan` writes OUT/plan.jsonl, a JSON line per cell, and OUT/commands.txt, a command per cell. It adds to a plan that is
there: a second call with --budgets=3e12 --widths=48,64 --seeds=1,2 gives more seeds to the sizes near an optimum, one
with --rates=0.5,2 checks the rule's learning rate. `collect` can be called at any time: it says which cells are
missing, failed or diverged. How to run the commands on one machine or on many: docs/studies.md.
"""

import json
import pathlib
import statistics
from typing import Any

import cells
import isoflop_results
import jax
from absl import app, flags

import mod_jax
from mod_jax import cli, outputs, tuning
from mod_jax import config as config_lib
from mod_jax.config import Config
from mod_jax.data.corpus import known_vocab_size, prepare_corpus
from mod_jax.errors import ConfigError, DataError
from mod_jax.models import flops
from mod_jax.training import dry_run, loop, prepare, rates

OUT = flags.DEFINE_string("out", "runs/isoflop", "Folder of all cells.")
PRESET = flags.DEFINE_string("preset", "cpu", "Of configs/isoflop.py: cpu, paper or tiny.")
VARIANTS = flags.DEFINE_list("variants", None, "Default: all of configs/isoflop.py.")
BUDGETS = flags.DEFINE_list("budgets", None, "Training FLOPs; default: those of the preset.")
WIDTHS = flags.DEFINE_list("widths", None, "Default: those of the preset for each budget.")
SEEDS = flags.DEFINE_list("seeds", ["0"], "Seeds. Cells of one seed share the order of their data.")
RATES = flags.DEFINE_list("rates", ["1"], "Factors on the rule's learning rate.")
SOURCE = flags.DEFINE_string("source", None, "config.data.source, in place of the preset's.")
CORPUS_TOKENS = flags.DEFINE_integer("corpus_tokens", None, "Training tokens of a corpus that is not here.", 1)
MFU = flags.DEFINE_float("mfu", None, "Measured MFU to predict times with; default: measured here, on a few steps.")
DEVICE = flags.DEFINE_string("device", None, 'With --mfu: the devices\' kind, such as "TPU v5e".')
NUM_DEVICES = flags.DEFINE_integer("num_devices", 1, "With --mfu: how many.", 1)
JOBS = flags.DEFINE_integer("jobs", 1, "run: cells at a time.", 1)
MOST_OFF = 0.005  # of the budget, by rounding to whole steps
MANY_EPOCHS = 4.0  # from here on repeated text is worth clearly less than new (Muennighoff et al. 2023)


def main(argv: list[str]) -> int:
    def command() -> None:
        if len(argv) != 2 or argv[1] not in COMMANDS:
            raise ConfigError(f"give one of {', '.join(COMMANDS)}, and flags as --name=value")
        COMMANDS[argv[1]](outputs.check_folder("out", OUT.value))

    return cli.exit_code(command)


def plan(out: pathlib.Path) -> None:
    """Writes plan.jsonl and commands.txt, and prints what the cells will cost."""
    known = read_plan(out) if (out / "plan.jsonl").exists() else {}
    wanted = wanted_cells(out)
    for cell in wanted:
        old = known.get(cell.name, {"config": cell.config, "changes": cell.changes})
        if (old["config"], old["changes"]) != (cell.config, cell.changes):
            raise ConfigError(f"--out = {out}: its plan has {cell.name} with {old['changes']}, not {cell.changes}")
    facts = [describe(cell) for cell in wanted]
    for cell, fact, seconds in zip(wanted, facts, predicted_seconds(wanted, facts), strict=True):
        known[cell.name] = {"name": cell.name, "config": cell.config, "changes": cell.changes, **fact} | seconds
    rows = sorted(known.values(), key=lambda row: (row["budget"], row["rate"], row["seed"], row["width"]))
    outputs.write_text(out / "plan.jsonl", "".join(outputs.to_json(row) + "\n" for row in rows))
    commands = [to_cell(out, row).command for row in rows]
    outputs.write_text(out / "commands.txt", "".join(f"{command}\n" for command in commands))
    print("\n".join(plan_table(rows)))
    print(f"{len(rows)} cells; {out / 'commands.txt'} has a command for each, to be run in {cells.ROOT}")


def run(out: pathlib.Path) -> None:
    """Trains what is not finished."""
    found = cells.run([to_cell(out, row) for row in read_plan(out).values()], JOBS.value)
    lines = cells.not_done(found)
    print("\n".join([*lines, f"{len(found) - len(lines)} of {len(found)} cells are done"]))


def collect(out: pathlib.Path) -> None:
    """Writes tables, optima and figures of what is finished."""
    rows = read_plan(out)
    print("\n".join(isoflop_results.collect(out, rows, [to_cell(out, row) for row in rows.values()])))


def time(out: pathlib.Path) -> None:
    """Writes times.json: seconds per token of a training step, of one cell per variant and width that is finished.

    Times are taken here and now, on random tokens, the best of a few steps each: cells that were trained beside other
    programs, or on several machines, cannot tell them.
    """
    seconds = {}
    for row in read_plan(out).values():
        cell, name = to_cell(out, row), f"{row['variant']}-w{row['width']}"
        if name not in seconds and cells.find(cell).state == "done":
            seconds[name] = row["flops"] / row["tokens"] / flops_per_second(cell, row)
            print(f"{name}: {seconds[name]:.3g} s per token", flush=True)
    outputs.write_json(out / "times.json", {"device": jax.devices()[0].device_kind, "seconds_per_token": seconds})


def wanted_cells(out: pathlib.Path) -> list[cells.Cell]:
    module = cells.load_config_file("isoflop.py")
    if PRESET.value not in module.PRESETS:
        raise ConfigError(f"--preset = {PRESET.value!r}: must be one of {', '.join(module.PRESETS)}")
    preset = module.PRESETS[PRESET.value]
    for budget in BUDGETS.value or ():
        if budget not in preset.widths and not WIDTHS.value:
            raise ConfigError(f"--budgets = {budget}: not of preset {PRESET.value}, so it needs --widths")
    for name, values, kind in (("widths", WIDTHS, int), ("seeds", SEEDS, int), ("rates", RATES, float)):
        for value in values.value or ():
            check_number(name, value, kind)
    made = []
    for budget in BUDGETS.value or preset.widths:
        for variant in VARIANTS.value or module.VARIANTS:
            for width in WIDTHS.value or preset.widths[budget]:
                for rate in RATES.value:
                    argument = f"preset={PRESET.value},variant={variant},budget={budget},width={width}"
                    argument += f",rate={rate}" if float(rate) != 1 else ""
                    for seed in SEEDS.value:
                        name = f"{budget}-{variant}-w{width}-s{seed}" + (f"-r{rate}" if float(rate) != 1 else "")
                        changes = {"seed": int(seed)} | ({"data.source": SOURCE.value} if SOURCE.value else {})
                        made.append(cells.Cell(out / name, f"isoflop.py:{argument}", changes))
    return made


def check_number(name: str, value: str, kind: type) -> None:
    try:
        kind(value)
    except ValueError:
        raise ConfigError(f"--{name} = {value}: must be {'integers' if kind is int else 'numbers'}") from None


def to_cell(out: pathlib.Path, row: dict[str, Any]) -> cells.Cell:
    return cells.Cell(out / row["name"], row["config"], row["changes"])


def read_plan(out: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The rows of plan.jsonl, by the name of their cell."""
    path = out / "plan.jsonl"
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); make it with: python experiments/isoflop.py plan") from None
    return {row["name"]: row for row in rows}


def describe(cell: cells.Cell) -> dict[str, Any]:
    """What is known of a cell before it is run.

    Raises:
      ConfigError: its FLOPs would miss the budget by more than MOST_OFF.
    """
    config = cell.load()
    options = dict(part.split("=") for part in cell.config.partition(":")[2].split(","))
    vocab_size, train_tokens = corpus_size(config)
    steps = flops.train_steps(config, vocab_size)
    spent = steps * config.train.batch_size * flops.train_flops(config, vocab_size)
    off = spent / config.train.flops - 1
    if abs(off) > MOST_OFF:
        raise ConfigError(
            f"{cell.name}: {steps} steps are {off:+.2%} of the budget, more than {MOST_OFF:.1%}; a smaller "
            "train.batch_size, or a larger budget, comes nearer"
        )
    tokens = steps * config.train.batch_size * config.data.seq_len
    shapes = mod_jax.make_model(config, vocab_size).abstract_params
    return {
        "variant": options["variant"],
        "budget": config.train.flops,
        "width": config.model.width,
        "depth": config.model.depth,
        "heads": config.model.num_heads,
        "rate": float(options.get("rate", 1)),
        "learning_rate": config.optimizer.learning_rate,
        "seed": config.seed,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(shapes)),
        "forward_flops_per_token": flops.forward_flops(config, vocab_size).total / config.data.seq_len,
        "steps": steps,
        "tokens": tokens,
        "flops": spent,
        "off": off,
        "epochs": tokens / train_tokens if train_tokens else None,
        "fingerprint": config_lib.fingerprint(config),
    }


def corpus_size(config: Config) -> tuple[int, int | None]:
    """(vocabulary, training tokens); None where the corpus is not here and --corpus_tokens does not say."""
    vocab_size = config.model.vocab_size or known_vocab_size(config.data)
    if CORPUS_TOKENS.value and vocab_size:
        return vocab_size, CORPUS_TOKENS.value
    try:
        corpus = prepare_corpus(config.data)
    except (ConfigError, DataError):
        if vocab_size is None:
            raise
        return vocab_size, None
    return config.model.vocab_size or corpus.tokenizer.vocab_size, corpus.num_train_tokens


def predicted_seconds(planned: list[cells.Cell], facts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """{seconds, mfu} of each cell, by the MFU given or by that of each variant's middle width, measured here."""
    if MFU.value is not None:
        peak = tuning.published_peak(DEVICE.value or "")
        if peak is None:
            raise ConfigError(f"--device = {DEVICE.value!r}: --mfu needs one of {', '.join(tuning.PEAK_FLOPS)}")
        rate = MFU.value * peak.flops * NUM_DEVICES.value
        return [{"seconds": fact["flops"] / rate, "mfu": MFU.value} for fact in facts]
    peak = rates.measure_matmul_peak()
    measured = {}
    for variant in dict.fromkeys(fact["variant"] for fact in facts):
        of_variant = [(cell, fact) for cell, fact in zip(planned, facts, strict=True) if fact["variant"] == variant]
        middle = statistics.median_low(fact["width"] for _, fact in of_variant)
        cell, fact = next((cell, fact) for cell, fact in of_variant if fact["width"] == middle)
        if fact["flops"] / fact["steps"] / peak.flops <= dry_run.LONGEST_STEP:
            measured[variant] = flops_per_second(cell, fact)
    none = {"seconds": None, "mfu": None}
    return [
        none
        if fact["variant"] not in measured
        else {
            "seconds": fact["flops"] / measured[fact["variant"]],
            "mfu": measured[fact["variant"]] / max(peak.flops, *measured.values()),
        }
        for fact in facts
    ]


def flops_per_second(cell: cells.Cell, fact: dict[str, Any]) -> float:
    """Measured on a few training steps of this cell, here."""
    config = cell.load()
    made = prepare.make_run(config, cell.workdir, corpus_size(config)[0])
    with jax.set_mesh(made.mesh):
        compiled = loop.compile_step(made)
    return fact["flops"] / fact["steps"] / dry_run.measure(made, compiled)


def plan_table(rows: list[dict[str, Any]]) -> list[str]:
    """One line per cell, what is to be warned of, and the total."""
    lines = [
        f"{'cell':<26}{'parameters':>14}{'FLOPs/token':>13}{'steps':>9}{'tokens':>10}{'off':>9}{'epochs':>8}{'time':>9}"
    ]
    for row in rows:
        epochs = "?" if row["epochs"] is None else f"{row['epochs']:.2f}"
        seconds = "?" if row["seconds"] is None else hours(row["seconds"])
        lines.append(
            f"{row['name']:<26}{row['parameters']:>14,}{row['forward_flops_per_token']:>13.3g}{row['steps']:>9,}"
            f"{row['tokens']:>10.3g}{row['off']:>+9.3%}{epochs:>8}{seconds:>9}"
        )
    for row in rows:
        if row["epochs"] is not None and row["epochs"] > MANY_EPOCHS:
            lines.append(f"WARNING {row['name']}: {row['epochs']:.1f} epochs, more than {MANY_EPOCHS:g}")
    total = f"in all {sum(row['flops'] for row in rows):.3g} training FLOPs"
    if all(row["seconds"] is not None for row in rows):
        total += f", {hours(sum(row['seconds'] for row in rows))} one after the other, without evaluations"
    else:
        total += "; times are not known: give --mfu, --device and --num_devices"
    return [*lines, total]


def hours(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )


COMMANDS = {"plan": plan, "run": run, "time": time, "collect": collect}

if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
