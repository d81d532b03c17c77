"""metrics.jsonl survives kills and comes back as it was written."""

import io
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax.errors import StorageError
from mod_jax.training.console import Console
from mod_jax.training.rows import MetricWriter, read_metrics
from mod_jax.tuning import Peak

PEAK = Peak(1e12, "TPU v9 bf16")


def _steps(workdir):
    return [row["step"] for row in read_metrics(workdir / "metrics.jsonl")]


def test_rows_come_back_as_written(tmp_path):
    writer = MetricWriter(tmp_path)
    writer.write(1, {"train/loss": jnp.float32(2.5), "train/tokens": np.int64(2**40), "data/digest": "ab12"})
    writer.write(2, {"train/loss": jnp.nan, "train/grad_norm": -np.inf, "train/z": jnp.bfloat16(0.5)})
    writer.close()
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert first == {"step": 1, "train/loss": 2.5, "train/tokens": 2**40, "data/digest": "ab12"}
    assert math.isnan(second["train/loss"])
    assert second["train/grad_norm"] == -math.inf
    assert second["train/z"] == 0.5


def test_rows_that_were_deleted_are_a_named_error(tmp_path):
    with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot be read \(No such file"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_every_line_is_strict_json(tmp_path):
    writer = MetricWriter(tmp_path)
    writer.write(1, {"train/loss": math.nan, "train/grad_norm": math.inf})

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    line = (tmp_path / "metrics.jsonl").read_text()  # on disk before close
    assert json.loads(line, parse_constant=refuse) == {"step": 1, "train/loss": "NaN", "train/grad_norm": "Infinity"}


def test_resume_drops_the_rows_that_will_be_repeated(tmp_path):
    writer = MetricWriter(tmp_path)
    for step in (10, 20, 20, 30, 40):
        writer.write(step, {"train/loss": 1.0})
    writer.close()
    resumed = MetricWriter(tmp_path, resumed_at=20)
    resumed.write(30, {"train/loss": 2.0})
    resumed.close()
    assert _steps(tmp_path) == [10, 20, 20, 30]
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["train/loss"] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]  # nothing left of the rewrite


@pytest.mark.parametrize("end", ['{"step": 20, "trai', '{"step": 20}', "\x00\x00"])
def test_half_written_last_line_does_not_spoil_the_next_row(tmp_path, caplog, end):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10, "train/loss": 3.0}\n' + end)
    assert _steps(tmp_path) == [10]
    assert caplog.text == ""  # nothing unusual: the run may be writing right now
    writer = MetricWriter(tmp_path)
    writer.write(20, {"train/loss": 2.0})
    writer.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20]


def test_bad_line_in_the_middle_is_announced(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    edited = ("low", [1.0], None)
    lines = ['{"step": 10}', "\x00\x00\x00", '{"no_step": 1}', *(json.dumps({"step": 15, "eval/x": x}) for x in edited)]
    path.write_text("\n".join([*lines, '{"step": 20, "note": "mine", "eval/x": "NaN"}\n']))
    assert _steps(tmp_path) == [10, 20]
    assert "metrics.jsonl:2" in caplog.text
    assert "metrics.jsonl:3" in caplog.text
    assert "metrics.jsonl:6" in caplog.text


def test_only_process_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    writer = MetricWriter(tmp_path, tracker="wandb", resumed_at=0)
    writer.write(1, {"train/loss": 1.0})
    writer.flush()
    writer.close()
    assert list(tmp_path.iterdir()) == []
    stream = io.StringIO()
    console = Console(10, 0, PEAK, stream)
    console.log(1, {})
    assert stream.getvalue() == ""
