"""Commands whose streams are closed, broken, full or know ASCII only: quiet, right exit codes, training goes on."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import pytest
from harness import CACHE, QUICK_COMPILER, ROOT, SMALL, newest_step

ENVIRONMENT = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": QUICK_COMPILER,
    "JAX_COMPILATION_CACHE_DIR": str(CACHE / "programs"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "MOD_JAX_CACHE": str(CACHE / "corpora"),
    "PYTHONPATH": str(ROOT),
}


def shell(line, **environment):
    """Runs a line of bash; returns the finished process, with text streams. `python` is this one."""
    line = line.replace("python ", f"{sys.executable} ")
    variables = ENVIRONMENT | environment
    return subprocess.run(["bash", "-c", line], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600)


def train(workdir, steps=6):
    changes = " ".join(
        f"--config.{name}={value}" for name, value in {**SMALL, "routing.predictor": True, "train.steps": steps}.items()
    )
    return f"python -m mod_jax.train --config=configs/smoke.py --workdir={workdir} {changes}"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Of a run of six steps, trained with no stream at all; libraries warn, and the caller asked for 64 bits."""
    folder = tmp_path_factory.mktemp("streams") / "wörk"
    done = shell(f"{train(folder)} <&- >&- 2>&-", PYTHONWARNINGS="error", JAX_ENABLE_X64="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert newest_step(folder) == 6
    return folder


def test_train_without_streams_leaves_its_files_clean(workdir):
    """Were descriptor 1 or 2 free, a file of ours would get it, and what others print would end up in the file."""
    rows = (workdir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows][-1] == 6


def test_every_json_file_of_a_run_is_strict_json(workdir, tmp_path):
    out = tmp_path / "new" / "x.json"
    done = shell(f"python -m mod_jax.evaluate --workdir={workdir} --out={out}")
    assert done.returncode == 0, done.stderr

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    files = [out, workdir / "config.json", *workdir.glob("checkpoints/6/record/metadata")]
    assert len(files) == 3
    texts = [path.read_text() for path in files] + (workdir / "metrics.jsonl").read_text().splitlines()
    for text in texts:
        json.loads(text, parse_constant=refuse)
    assert "NaN" in json.loads(out.read_text()).values()  # after six steps something has no value


def test_a_place_that_cannot_be_written_is_refused_before_the_work(workdir):
    done = shell(f"python -m mod_jax.evaluate --workdir={workdir} --out=README.md/x.json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: out = 'README.md/x.json': cannot be written")


def test_training_goes_on_when_nobody_reads_its_lines(tmp_path):
    done = shell(f"{train(tmp_path / 'run', steps=7)} | head -n 1; exit ${{PIPESTATUS[0]}}", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == GOES_ON.format("Broken pipe")
    assert newest_step(tmp_path / "run") == 7


def test_sample_ends_quietly_when_nobody_reads_it(workdir):
    line = f"python -m mod_jax.sample --workdir={workdir} --prompt=a --prompt=b --max_new_tokens=2 | head -c 1"
    done = shell(f"set -o pipefail; {line}")
    reads_all = done.returncode == 0  # head may be slower than two lines
    assert reads_all or done.returncode == 141
    assert "rror" not in done.stderr
    assert done.stdout == "="


def test_sample_without_a_prompt_to_read_is_refused(workdir):
    done = shell(f"python -m mod_jax.sample --workdir={workdir} <&-")
    assert done.returncode == 2
    assert done.stderr.startswith("error: stdin: no prompt can be read from it")


def test_text_is_written_with_replacement(workdir):
    prompts = "--prompt=hé --prompt=ü"
    done = shell(f"python -m mod_jax.sample --workdir={workdir} {prompts} --max_new_tokens=2", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "=== 'h?'" in done.stdout


GOES_ON = "WARNING stdout cannot be written ({}); the run goes on without\n"

# What every command does first and last, without the seconds that JAX takes.
COMMAND = """
import pathlib, sys, warnings
from mod_jax import cli, streams

def run():
    if sys.argv[1] == "outlives":
        streams.outlive_stdout()
    with open(sys.argv[2], "w") as file:  # would take the number of a closed stream
        for _ in range(3):
            print("ünd" * 10000, flush=True)
        file.write(f"{file.fileno()} {sys.stdin is None}")

cli.parse_flags([""])
code = cli.exit_code(run)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("policy", "streams", "code", "said"),
    [
        ("ends", "", 0, ""),
        ("ends", ">&-", 0, ""),
        ("ends", "2>&-", 0, ""),
        ("ends", "<&- >&- 2>&-", 0, ""),
        ("ends", ">/dev/full", 4, "error: stdout cannot be written (No space left on device)\n"),
        ("ends", "2>/dev/full", 0, ""),
        ("ends", "| true", 141, ""),
        (
            "outlives",
            ">/dev/full",
            0,
            GOES_ON.format("No space left on device"),
        ),
        ("outlives", "| true", 0, GOES_ON.format("Broken pipe")),
        ("outlives", "2>&1 | true", 0, ""),
    ],
)
def test_every_command_with_streams_as_shells_give_them(tmp_path, policy, streams, code, said):
    script = tmp_path / "command.py"
    script.write_text(COMMAND)
    done = shell(
        f"python {script} {policy} {tmp_path / 'file'} {streams}; exit ${{PIPESTATUS[0]}}",
        LC_ALL="C",
        PYTHONUTF8="0",
        PYTHONCOERCECLOCALE="0",
    )
    assert (done.returncode, done.stderr) == (code, said)
    with contextlib.suppress(ValueError):
        number, closed = pathlib.Path(tmp_path / "file").read_text().split()
        assert int(number) > 2
        assert closed == str("<&-" in streams)
