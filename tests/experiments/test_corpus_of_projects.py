"""Projects become two splits by whole projects; what is no text, too large, or there already is left out."""

import pathlib
import re
import zipfile

import corpus
import pytest

from mod_jax.config import DataConfig
from mod_jax.data import sources
from mod_jax.errors import DataError

PINNED = pathlib.Path(corpus.__file__).with_name("corpus.txt").read_text()


def wheel(folder, name, files):
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in files.items():
            archive.writestr(member, text)
    return path


@pytest.fixture
def wheels(tmp_path):
    (tmp_path / "wheels").mkdir()
    first = {"first/a.py": "a = 1\n", "first/copy.py": "held = 1\n", "first/data.json": "{}", "first/empty.py": ""}
    first |= {"first/latin.py": "# é\n".encode("latin-1"), "first/big.py": "x" * (corpus.LARGEST + 1)}
    second = {"second/held.py": "held = 1\n", "second/sub/b.py": "b = 2\n"}
    return [wheel(tmp_path / "wheels", "first_one", first), wheel(tmp_path / "wheels", "second", second)]


def test_whole_projects_are_held_out_and_no_text_is_in_both(wheels, tmp_path):
    lines = corpus.lay_out(wheels, ["second"], tmp_path / "out")
    found = {str(p.relative_to(tmp_path / "out")): p.read_text() for p in (tmp_path / "out").rglob("*.py")}
    assert found == {
        "validation/second/second/held.py": "held = 1\n",
        "validation/second/second/sub/b.py": "b = 2\n",
        "train/first-one/first/a.py": "a = 1\n",
    }
    assert [line.split()[:3] for line in lines] == [["validation", "second", "2"], ["train", "first-one", "1"]]
    source = sources.load(DataConfig(source=f"text:{tmp_path / 'out'}"), tmp_path)
    assert [name for name, _ in source.documents("train")] == ["train/first-one/first/a.py"]
    assert len(list(source.documents("validation"))) == 2


def test_a_project_to_hold_out_must_be_there(wheels, tmp_path):
    with pytest.raises(DataError, match="third is not one of first-one, second"):
        corpus.lay_out(wheels, ["third"], tmp_path / "out")


@pytest.mark.parametrize("member", ["../out.py", "/tmp/out.py"])
def test_a_file_cannot_leave_its_project(tmp_path, member):
    bad = wheel(tmp_path, "bad", {member: "x = 1\n"})
    with pytest.raises(DataError, match="lies outside of its folder"):
        corpus.lay_out([bad], ["bad"], tmp_path / "out")


def test_every_project_is_pinned_by_version_and_hash():
    lines = [line for line in PINNED.splitlines() if not line.startswith("#")]
    assert len(lines) > 10
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    assert set(corpus.HELD_OUT.default) < {line.split("==")[0] for line in lines}
