"""The result of a finished run: result.json in its workdir, written last, so that where it stands the run is finished.

Running a finished command again prints the stored result, without data, devices or checkpoints. Something else is done
where something else is needed: a longer run (`--extend`) takes the mark away and trains on; another run is refused; a
report, a tokenizer or a last checkpoint that is gone is made again from the newest checkpoint.
"""

import datetime
import json
from typing import Any

from mod_jax import config as config_lib
from mod_jax import outputs
from mod_jax.config import Config
from mod_jax.evaluation import tables
from mod_jax.paths import Folder, writing

FILE = "result.json"
NEEDED = {"finished", "fingerprint", "config"}  # of what is read here, beside what `describe` shows


def write(workdir: Folder, contents: dict[str, Any]) -> None:
    """Writes the mark of the end. `contents`: step, tokens, flops, wall_seconds, report, evaluation; and metadata.

    Raises:
      StorageError: it cannot be written.
    """
    finished = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    outputs.write_json(workdir / FILE, {"finished": finished, **contents})


def remove(workdir: Folder) -> None:
    """Takes the mark away, before a finished run goes on.

    Raises:
      StorageError: it cannot be taken away.
    """
    with writing(workdir / FILE):
        (workdir / FILE).unlink(missing_ok=True)


def read(workdir: Folder) -> dict[str, Any] | None:
    """The result of a finished run; None where there is none, or none that is whole."""
    try:
        stored = json.loads((workdir / FILE).read_text(encoding="utf-8"))
        evaluation = {name: outputs.NON_FINITE.get(value, value) for name, value in stored["evaluation"].items()}
        stored = stored | {"evaluation": evaluation}
        describe(stored, workdir)  # what cannot be shown is not what `write` wrote
        return stored if stored.keys() >= NEEDED and isinstance(stored["config"], dict) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def stored_lines(config: Config, workdir: Folder, init_from: str | None = None) -> list[str]:
    """What the end of this very run said; [] unless it is finished and everything that it left is still there.

    Args:
      init_from: the workdir whose weights the run is asked to have begun with; None: not asked.
    """
    stored = read(workdir)
    if stored is None or stored["fingerprint"] != config_lib.fingerprint(config):
        return []
    if init_from is not None and init_from != (stored.get("init_from") or {}).get("workdir"):
        return []  # another run, which is refused once its checkpoints are read
    left = "report/loss.png", f"checkpoints/{stored['step']}", "tokenizer"
    if not all((workdir / name).exists() for name in left):
        return []
    lines = [f"FINISHED {stored['finished']}, printed from {workdir / FILE}: nothing was prepared or computed"]
    now = config_lib.to_flat_dict(config)
    changed = [
        f"{name}={now[name]} (then {old})"
        for name, old in stored["config"].items()
        if name in now and outputs.canonical(now[name]) != outputs.canonical(old)
    ]
    if changed:
        lines.append(
            f"it was finished under other values of keys that nothing learned depends on: {', '.join(changed)}"
        )
    return [*lines, *describe(stored, workdir)]


def describe(result: dict[str, Any], workdir: Folder) -> list[str]:
    """The end of a run in a few lines."""
    evaluation = result["evaluation"]
    took = datetime.timedelta(seconds=round(result["wall_seconds"]))
    return [
        f"trained on {result['tokens']:,} tokens with {result['flops']:.3g} FLOPs in {took}; plots in "
        f"{workdir / 'report'}",
        *tables.loss_table(evaluation),
        *tables.warnings(evaluation),
        f"DONE at step {result['step']}",
    ]
