"""What became of a run is told from its workdir and its log, and no state is taken for another."""

import dataclasses
import json

import cells
import pytest

from mod_jax import config as config_lib
from mod_jax import outputs
from mod_jax.errors import ConfigError
from mod_jax.training import claim

ARGUMENT = "isoflop.py:preset=tiny,variant=mod,budget=1e9,width=8"


@pytest.fixture
def cell(tmp_path):
    return cells.Cell(tmp_path / "cell", ARGUMENT, {"seed": 3})


def write_result(cell, loss=2.0, **more):
    cell.workdir.mkdir()
    config = cell.load()
    stored = {
        "fingerprint": config_lib.fingerprint(config),
        "config": config_lib.to_flat_dict(config),
        "finished": "now",
    }
    stored |= {"step": 1, "tokens": 64, "flops": 1.0, "wall_seconds": 1.0, "vocab_size": 257}
    evaluation = {"step": 1, "eval/topk_loss": loss, "eval/topk_bits_per_byte": loss}
    outputs.write_json(cell.workdir / "result.json", stored | {"evaluation": evaluation} | more)


def write_rows(cell, *losses):
    cell.workdir.mkdir(exist_ok=True)
    rows = [{"step": i, "train/loss": loss} for i, loss in enumerate(losses, start=1)]
    (cell.workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def state(cell):
    found = cells.find(cell)
    assert found.state in cells.STATES
    return found.state


def test_the_config_is_the_one_that_the_command_gives(cell):
    config = cell.load()
    assert (config.seed, config.model.width, config.model.layout) == (3, 8, "FR")
    assert f"--config=configs/{ARGUMENT}" in cell.command
    assert "--config.seed=3" in cell.command
    assert cell.command.startswith("python -m mod_jax.train ")
    assert cell.command.endswith(f">> {cell.log} 2>&1")


def test_a_name_with_dots_and_spaces_keeps_its_log_apart(tmp_path):
    first, second = (cells.Cell(tmp_path / name, ARGUMENT) for name in ("a 1.5", "a 1.25"))
    assert first.log != second.log
    assert f"'{first.log}'" in first.command


def test_what_the_config_file_refuses_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="variant one of"):
        cells.Cell(tmp_path / "x", ARGUMENT.replace("mod", "mud")).load()


def test_missing(cell):
    assert cells.find(cell) == (cell, "missing", "", None)


def test_done(cell):
    write_result(cell)
    assert cells.find(cell).result["step"] == 1
    assert state(cell) == "done"


def test_a_run_of_another_config_is_not_taken_for_this_one(cell):
    write_result(cell)
    assert state(dataclasses.replace(cell, changes={"seed": 4})) == "another"
    assert state(dataclasses.replace(cell, changes={"seed": 3, "train.log_every": 7})) == "done"  # nothing learned


@pytest.mark.parametrize("loss", ["NaN", 5.6])
def test_a_finished_run_that_is_worse_than_guessing_has_diverged(cell, loss):
    write_result(cell, loss)  # guessing among 257 ids: 5.549
    assert state(cell) == "diverged"


def test_a_run_whose_loss_is_no_number_has_diverged(cell):
    write_rows(cell, 5.0, "NaN")
    cell.log.write_text("error: 10 consecutive steps up to step 2 were not finite\n")
    found = cells.find(cell)
    assert (found.state, found.detail) == ("diverged", "loss not finite at step 2")


def test_a_killed_run_is_unfinished(cell):
    write_rows(cell, 5.0, 4.0)
    cell.log.write_text("step  2/40  loss 4.0\n")
    found = cells.find(cell)
    assert (found.state, found.detail) == ("unfinished", "step 2")


def test_a_run_that_ended_with_an_error_has_failed_and_says_so(cell):
    cell.log.write_text("error: config.data.source = 'text:x': does not exist\n")
    found = cells.find(cell)
    assert (found.state, found.detail) == ("failed", f"before its first step; {cell.log.read_text().strip()}")
    assert cells.not_done([found]) == [f"{cell.name}: failed, {found.detail}"]


def test_a_refusal_while_another_runner_works_is_no_failure(cell):
    write_rows(cell, 5.0)
    cell.log.write_text(f"step  1/40  loss 5.0\nerror: {cell.workdir}: {claim.TAKEN}: pid 7 on host\n")
    assert state(cell) == "unfinished"
