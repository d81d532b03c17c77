"""Notebooks rot unless they run: each is executed from top to bottom, on a fresh smoke run where it needs a run."""

import pathlib

import nbformat
import pytest
from nbclient import NotebookClient

from mod_jax.errors import StorageError
from mod_jax.trained import chosen_workdir

NOTEBOOKS = sorted((pathlib.Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.delenv("MOD_JAX_RUN", raising=False)
    monkeypatch.delenv("XLA_FLAGS")  # one device and a program that is fast, as a reader has them
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # below it, the notebook trains a run of its own
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    ).execute()
    shown = [
        output for cell in notebook.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    committed = [o for cell in nbformat.read(path, as_version=4).cells for o in cell.get("outputs", [])]
    assert len(shown) == sum("image/png" in output.get("data", {}) for output in committed)  # displayed, not only made


def test_the_run_to_show_is_found_from_the_root_or_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(NOTEBOOKS[0].parent)  # where a kernel runs
    (tmp_path / "runs" / "mod" / "checkpoints").mkdir(parents=True)
    for name in ("runs/mod", str(tmp_path / "runs" / "mod")):
        monkeypatch.setenv("MOD_JAX_RUN", name)
        assert chosen_workdir(tmp_path) == tmp_path / "runs" / "mod"
    monkeypatch.setenv("MOD_JAX_RUN", "runs/dom")
    with pytest.raises(StorageError, match=r"MOD_JAX_RUN = 'runs/dom': .*runs/dom has no folder checkpoints"):
        chosen_workdir(tmp_path)
    monkeypatch.setenv("MOD_JAX_RUN", "")
    assert chosen_workdir(tmp_path) is None


def test_there_are_notebooks():
    assert NOTEBOOKS


def test_notebooks_are_committed_with_small_outputs_in_order():
    for path in NOTEBOOKS:
        cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), path
        assert any(cell.outputs for cell in cells), path
        assert not any(output.output_type == "error" for cell in cells for output in cell.outputs), path
        assert path.stat().st_size < 500_000, path
