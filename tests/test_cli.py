"""The command line as a person meets it: one readable line and the right exit code for every slip."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

from mod_jax import cli
from mod_jax.errors import (
    EXIT_CODES,
    CheckpointMismatch,
    ConfigError,
    DataError,
    DistributedError,
    Interrupted,
    ModJaxError,
    NumericsError,
    OutputClosed,
    ResumeRefused,
    StorageError,
)

ROOT = pathlib.Path(__file__).resolve().parents[1]
SMOKE = "--config=configs/smoke.py"

# Imports once, then runs each command in a child of its own: a fork before JAX has a backend or a thread.
RUNNER = """
import json, os, sys
from absl import app
from mod_jax import cli, train
from mod_jax.training import loop

for number, arguments in enumerate(json.loads(sys.argv[1])):
    if (child := os.fork()) == 0:
        for stream in (1, 2):
            os.dup2(os.open(f"{sys.argv[2]}/{number}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
        sys.argv = ["mod_jax.train", *arguments]
        sys.modules["__main__"].__doc__ = train.__doc__
        app.run(train.main, flags_parser=cli.parse_flags)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

REFUSED = {
    "unknown_key": (
        [SMOKE, "--config.model.widht=3"],
        "config.model.widht: unknown key; did you mean config.model.width?",
    ),
    "unknown_section": (
        [SMOKE, "--config.modle.width=3"],
        "config.modle.width: unknown key; did you mean config.model.width",
    ),
    "wrong_type": (
        [SMOKE, "--config.model.width=wide"],
        "config.model.width = 'wide': must be an integer in [1, 1048576]",
    ),
    "fraction": ([SMOKE, "--config.model.width=2.5"], "config.model.width = 2.5: must be an integer in [1, 1048576]"),
    "nan": ([SMOKE, "--config.optimizer.learning_rate=nan"], "config.optimizer.learning_rate = "),
    "out_of_range": (
        [SMOKE, "--config.routing.capacity=1.5"],
        "config.routing.capacity = 1.5: must be a number in (0, 1]",
    ),
    "wrong_choice": (
        [SMOKE, "--config.routing.gate=relu"],
        "config.routing.gate = 'relu': must be one of raw, sigmoid",
    ),
    "no_bool": ([SMOKE, "--config.model.scan=maybe"], "config.model.scan = 'maybe': must be True or False"),
    "tuple": (
        [SMOKE, "--config.routing.capacity=(0.5,0.25)"],
        "config.routing.capacity = (0.5, 0.25): must be one number",
    ),
    "section": ([SMOKE, "--config.model=3"], "config.model"),
    "unknown_no": ([SMOKE, "--noconfig.model.scam"], "config.model.scam: unknown key; did you mean config.model.scan?"),
    "no_file": (["--config=configs/nowhere.py"], "No such file or directory: 'configs/nowhere.py'"),
    "no_file_edited": (
        ["--config=configs/nowhere.py", "--config.model.width=3"],
        "error: --config: [Errno 2] No such file or directory: 'configs/nowhere.py'",
    ),
    "colon_in_a_path": (
        ["--config=dir:1/x.py"],
        "what follows the colon, '1/x.py', is an argument, and 'dir' the file",
    ),
    "no_integer": ([SMOKE, "--process_id=x"], "flag --process_id=x: invalid literal for int() with base 10: 'x'"),
    "no_flag_value": ([SMOKE, "--dry_run=maybe"], "flag --dry_run=maybe: Non-boolean argument to boolean flag 'maybe'"),
    "bad_file": (["--config=BAD.py"], "bad.py, line 5)"),
    "no_python": (["--config=LICENSE"], "(LICENSE, line "),
    "missing_config": ([], "--config is missing; for example --config=configs/smoke.py"),
    "no_argument": (["--config=configs/smoke.py:big"], "get_config() takes 0 positional arguments"),
    "unknown_argument": (["--config=configs/cpu_demo.py:mood"], "configs/cpu_demo.py:mood: must be one of dense, mod"),
    "stray": ([SMOKE, "--config.model.width", "=", "3"], "unexpected argument '='; flags are written --name=value"),
    "stray_word": ([SMOKE, "resume"], "unexpected argument 'resume'; flags are written --name=value"),
    "unknown_flag": ([SMOKE, "--workdri=x"], "Unknown command line flag 'workdri'. Did you mean: workdir ?"),
    "unknown_source": (
        [SMOKE, "--config.data.source=wikipedia"],
        "config.data.source = 'wikipedia': must be python_stdlib",
    ),
    "mesh": ([SMOKE, "--config.data.source=synthetic", "--config.mesh.data=3"], "config.train.batch_size = 8: "),
    "alone": ([SMOKE, "--process_id=1"], "--process_id needs --distributed"),
    "alone_heartbeat": ([SMOKE, "--heartbeat_timeout=20"], "--heartbeat_timeout needs --distributed"),
    "length": ([SMOKE, "--config.train.tokens=9"], "config.train: exactly one of steps, tokens, flops must be > 0"),
}
DRY = [SMOKE, "--dry_run", "--config.data.source=synthetic"]
ACCEPTED = {
    "plain": DRY,
    "edited": [
        *DRY,
        "--config.model.tie_embedding=True",
        "--noconfig.model.qk_norm",
        "--config.model.depth=4",
        "--config.routing.capacity=(0.5,0.25)",
    ],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of every command above: (exit code, stdout, stderr), and the folder that held all workdirs."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "out").mkdir()
    commands = {f"refused {n}": a for n, (a, _) in REFUSED.items()} | {f"accepted {n}": a for n, a in ACCEPTED.items()}
    bad = folder / "out" / "bad.py"
    bad.write_text(
        "from mod_jax.config import default_config\n\ndef get_config():\n    config = default_config()\n"
        "    config.modle.width = 3\n    return config\n"
    )
    arguments = [[*command, f"--workdir={folder / 'runs' / name}"] for name, command in commands.items()]
    arguments = [[argument.replace("BAD.py", str(bad)) for argument in command] for command in arguments]
    arguments += [[SMOKE], ["--help"]]  # the first without a workdir
    runner = [sys.executable, "-c", RUNNER, json.dumps(arguments), str(folder / "out")]
    done = subprocess.run(runner, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    codes = [int(code) for code in done.stdout.split()]
    texts = [[(folder / "out" / f"{i}.{stream}").read_text() for stream in (1, 2)] for i in range(len(arguments))]
    named = dict(
        zip([*commands, "no workdir", "help"], [(c, *t) for c, t in zip(codes, texts, strict=True)], strict=True)
    )
    return named, folder


def assert_one_line(result, expected):
    code, _, stderr = result
    assert code == ConfigError.exit_code, stderr
    lines = stderr.strip().splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("error: ")
    assert expected in lines[0]
    assert len(lines[0]) < 400


@pytest.mark.parametrize("name", REFUSED)
def test_a_slip_is_one_readable_line_and_exit_code_2(results, name):
    assert_one_line(results[0][f"refused {name}"], REFUSED[name][1])


def test_the_workdir_is_required(results):
    assert_one_line(results[0]["no workdir"], "--workdir is missing; for example --workdir=runs/mod")


def test_quotes_are_balanced(results):
    for name in REFUSED:
        assert results[0][f"refused {name}"][2].count("'") % 2 == 0, name


def test_help_is_no_error(results):
    code, stdout, stderr = results[0]["help"]
    assert (code, stderr) == (0, "")
    for text in ("--workdir:", "--config:", "--[no]extend:", "--init_from:"):
        assert text in stdout
    assert all(f"  {number}  {meaning}" in stdout.splitlines() for number, meaning in EXIT_CODES.items())


def test_the_commands_are_listed_one_a_line():
    listed = subprocess.run([sys.executable, "-m", "mod_jax"], cwd=ROOT, capture_output=True, text=True, check=True)
    *lines, _ = listed.stdout.splitlines()
    written = (ROOT / "mod_jax").glob("*.py")
    endings = re.compile(r"app\.run\(main\b|sys\.exit\(main\(\)\)")
    commands = {path.stem for path in written if endings.search(path.read_text())}
    assert {line.partition("python -m mod_jax.")[2].split()[0] for line in lines} == commands
    assert len(lines) == len(commands)


def test_every_exit_code_of_an_error_is_explained():
    classes = [ModJaxError]
    for known in classes:
        classes += known.__subclasses__()
    assert {known.exit_code for known in classes} | {0} == EXIT_CODES.keys()


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_dry_run_prints_size_and_cost_and_trains_nothing(results, name):
    code, stdout, stderr = results[0][f"accepted {name}"]
    assert code == 0, stderr
    for word in (" parameters (", " training FLOPs (", "MiB per device", "DRY RUN: nothing was trained or saved"):
        assert word in stdout


def test_overrides_arrive(results):
    plain, edited = (results[0][f"accepted {name}"][1] for name in ("plain", "edited"))
    for text in ("model.tie_embedding=True", "model.qk_norm=False", "model.depth=4", "routing.capacity=(0.5, 0.25)"):
        assert text in edited
        assert text not in plain


def test_nothing_was_written(results):
    assert [path.name for path in results[1].iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError, 2),
        (NumericsError, 3),
        (StorageError, 4),
        (DataError, 5),
        (DistributedError, 6),
        (CheckpointMismatch, 7),
        (ResumeRefused, 7),
        (Interrupted, 130),
        (ZeroDivisionError, 1),
    ],
)
def test_exit_codes(error, code, capsys):
    def run():
        raise error("what happened")

    assert cli.exit_code(run) == code
    stderr = capsys.readouterr().err
    assert "error: what happened" in stderr
    assert ("Traceback" in stderr) == (code == 1)  # an unknown failure shows where it came from
    assert cli.exit_code(lambda: None) == 0


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (MemoryError(), 1, "error: out of memory (of the host); "),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 9 bytes"), 1, "memory allocating 9 bytes); "),
        (OSError(28, "No space left on device", "/data/x"), 4, "error: /data/x: No space left on device"),
        (OutputClosed(32, "nobody reads stdout any more"), 141, ""),
    ],
)
def test_what_ends_any_program_is_one_line_or_none(error, code, line, capsys):
    def run():
        raise error

    assert cli.exit_code(run) == code
    stderr = capsys.readouterr().err
    assert line in stderr
    assert len(stderr.splitlines()) == bool(line)
