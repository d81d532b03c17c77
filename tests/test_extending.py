"""docs/extending.md is done as it is written: each diff applies to the code of today, and what it adds works."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
DIFFS = dict(re.findall(r"^## ([^\n]*)\n(?:(?!^## ).)*?^```diff\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
# The most that each may cost: files, and lines added to files that are there already.
COSTS = {
    "A gate": (2, 4),
    "A router score": (2, 6),
    "A block": (2, 1),
    "A metric": (1, 1),
    "A data source": (2, 25),
    "An experiment": (1, 0),
}


def copy_of_the_code(folder):
    for name in ("mod_jax", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def apply(diff, folder):
    # Else a folder below another repository would count as a part of that one, and nothing would be applied.
    environment = dict(os.environ, GIT_CEILING_DIRECTORIES=str(folder.parent))
    done = subprocess.run(
        ["git", "apply", "-"], input=diff, cwd=folder, env=environment, capture_output=True, text=True
    )
    return done.stderr if done.returncode else ""


def added_lines(diff):
    """{file: number of lines added}, and which of the files are new."""
    parts = re.findall(r"^--- (\S+)\n\+\+\+ b/(\S+)\n(.*?)(?=^--- \S+\n\+\+\+ |\Z)", diff, re.DOTALL | re.MULTILINE)
    added = {path: len(re.findall(r"^\+", body, re.MULTILINE)) for _, path, body in parts}
    return added, {path for old, path, _ in parts if old == "/dev/null"}


def test_every_section_has_one_diff():
    assert list(DIFFS) == list(COSTS)
    assert PAGE.count("```diff\n") == len(COSTS)


@pytest.mark.parametrize("title", COSTS)
def test_an_addition_costs_no_more_than_it_did(title):
    added, new = added_lines(DIFFS[title])
    files, lines = COSTS[title]
    assert 1 <= len(added) <= files
    assert sum(count for path, count in added.items() if path not in new) <= lines
    assert sum(added.values()) <= 30


def test_each_diff_applies_alone_and_no_other_way(tmp_path):
    folder = copy_of_the_code(tmp_path / "copy")
    for title, diff in DIFFS.items():
        before = {path: path.read_text() for path in folder.rglob("*.py")}
        assert not apply(diff, folder), title
        assert apply(diff, folder), f"{title}: applied twice"
        changed, new = added_lines(diff)
        assert {p.relative_to(folder).as_posix() for p in folder.rglob("*.py") if p.read_text() != before.get(p)} == {
            *changed
        }
        for path in new:
            (folder / path).unlink()
        for path, text in before.items():
            path.write_text(text)


@pytest.mark.slow
def test_all_of_them_together_work(tmp_path):
    folder = copy_of_the_code(tmp_path / "copy")
    for title, diff in DIFFS.items():
        assert not apply(diff, folder), title
    command = [sys.executable, str(ROOT / "tests" / "extending_worker.py"), str(folder), str(tmp_path)]
    done = subprocess.run(
        command, cwd=folder, env=dict(os.environ, PYTHONPATH=str(folder)), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
