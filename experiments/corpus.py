"""A corpus for larger budgets that any machine can make: the Python text of pinned projects from the package index.

    python experiments/corpus.py
    python experiments/isoflop.py plan --preset=cpu --source=text:FOLDER      # the folder that it prints

experiments/corpus.txt names each project, its version and the sha256 of what is downloaded; pip checks them. The text
of .py files is laid out below FOLDER/train and FOLDER/validation, the splits of `text:`. Whole projects are held out:
those of --held_out, nothing else. Left out are files above 200 kB (tables, most of them generated), files that are not
UTF-8, empty ones, and a second file of the same text, so that no held-out file stands in train too. A corpus that is
there is not made again.
"""

import hashlib
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from absl import app, flags

from mod_jax import cli
from mod_jax.config import DataConfig
from mod_jax.data.cache import cache_root, naming_the_cache, scratch_folder
from mod_jax.errors import DataError

PROJECTS = flags.DEFINE_string(
    "projects", str(pathlib.Path(__file__).with_name("corpus.txt")), "Requirements of pip, with hashes."
)
HELD_OUT = flags.DEFINE_list("held_out", ["networkx", "pylint", "sphinx"], "Projects of the validation split.")
LARGEST = 200_000  # bytes of a file
PURE_WHEELS = ["--only-binary=:all:", "--platform=any", "--implementation=py", "--abi=none", "--python-version=3.11"]


def main(argv: list[str]) -> int:
    cli.refuse_arguments(argv)
    return cli.exit_code(make)


def make() -> None:
    """Makes the corpus, unless it is there, and prints what to give as data.source."""
    projects = pathlib.Path(PROJECTS.value).read_text()
    identity = f"{projects}{sorted(HELD_OUT.value)}{LARGEST}"
    root = cache_root(DataConfig())
    final = root / f"python_projects-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if not final.exists():
        with naming_the_cache(root), scratch_folder(final) as scratch, tempfile.TemporaryDirectory() as wheels:
            download(pathlib.Path(wheels))
            for line in lay_out(sorted(pathlib.Path(wheels).iterdir()), HELD_OUT.value, scratch):
                print(line)
            scratch.rename(final)
    print(f"text:{final}")


def download(folder: pathlib.Path) -> None:
    """Fetches every project's wheel. Nothing of a project is run.

    Raises:
      DataError: pip says what is missing, or has another hash.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", *PURE_WHEELS]
    done = subprocess.run([*command, f"--dest={folder}", f"--requirement={PROJECTS.value}"])
    if done.returncode:
        raise DataError(f"pip could not download the projects of {PROJECTS.value}; what it says stands above")


def lay_out(wheels: list[pathlib.Path], held_out: list[str], folder: pathlib.Path) -> list[str]:
    """Writes the text of each wheel to folder/SPLIT/PROJECT; returns a line per project.

    Raises:
      DataError: a project to hold out is not there, or a file would lie outside of its project.
    """
    by_name = {wheel.name.split("-")[0].replace("_", "-"): wheel for wheel in wheels}
    if missing := sorted(set(held_out) - set(by_name)):
        raise DataError(f"--held_out: {', '.join(missing)} is not one of {', '.join(by_name)}")
    seen, lines = set(), []
    for name in sorted(by_name, key=lambda name: (name not in held_out, name)):  # what is held out comes first
        split = "validation" if name in held_out else "train"
        place = folder / split / name
        num_files = num_bytes = 0
        with zipfile.ZipFile(by_name[name]) as wheel:
            for member in wheel.infolist():
                if not member.filename.endswith(".py") or not 0 < member.file_size <= LARGEST:
                    continue
                text = wheel.read(member)
                digest = hashlib.sha256(text).digest()
                if digest in seen or not is_text(text):
                    continue
                seen.add(digest)
                path = place / member.filename
                if ".." in path.parts or not path.is_relative_to(place):
                    raise DataError(f"{by_name[name].name}: {member.filename!r} lies outside of its folder")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text)
                num_files, num_bytes = num_files + 1, num_bytes + len(text)
        lines.append(f"{split:<11}{name:<20}{num_files:>6} files{num_bytes:>13,} bytes")
    return lines


def is_text(text: bytes) -> bool:
    try:
        return "\0" not in text.decode()
    except UnicodeDecodeError:
        return False


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
