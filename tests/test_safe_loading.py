"""No file that is loaded can run code: nothing here unpickles, evaluates, or starts a shell."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDERS = ("mod_jax", "configs", "experiments", "tests")
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "imp"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.load", "runpy.run_path",
    "subprocess.getoutput", "subprocess.getstatusoutput", "pandas.read_pickle", "pd.read_pickle",
}  # fmt: skip
KEYWORDS = {"shell", "allow_pickle"}  # refused unless they are the constant False

# What stands in the tree for a reason, as (file, what).
ALLOWED = {
    ("tests/data/test_batches.py", "import pickle"): "sends an object to a worker as the library does",
    ("tests/test_setup.py", "runpy.run_path"): "reads what this project's own setup.py declares",
}


def dangers(tree):
    """What of a syntax tree could run code that was not written in it, as (line, what)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = []
        for name in names:
            if name.split(".")[0] in MODULES:
                yield node.lineno, f"import {name.split('.')[0]}"
            elif name in CALLS:
                yield node.lineno, name
        if isinstance(node, ast.Name) and node.id in BUILTINS and isinstance(node.ctx, ast.Load):
            yield node.lineno, node.id
        if isinstance(node, ast.Attribute) and ast.unparse(node) in CALLS:
            yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.keyword) and node.arg in KEYWORDS and ast.unparse(node.value) != "False":
            yield node.value.lineno, f"{node.arg}={ast.unparse(node.value)}"


def test_no_file_of_the_project_can_run_code_that_it_loads():
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 100
    found, used = [], set()
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        for line, what in dangers(ast.parse(path.read_bytes(), name)):
            if (name, what) in ALLOWED:
                used.add((name, what))
            else:
                found.append(f"{name}:{line}: {what}")
    assert not found, "\n".join(found)
    assert used == set(ALLOWED), "a reason that is no longer needed"


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from pickle import loads", "import dill as d", "import marshal.x", "eval('1')", "f = exec",
        "import os\nos.system('x')", "from os import system", "from torch import load", "import yaml\nyaml.load(f)",
        "np.load(f, allow_pickle=True)", "np.load(f, allow_pickle=flag)", "run('x', shell=True)", "__import__('x')",
    ],
)  # fmt: skip
def test_each_danger_is_seen(code):
    assert list(dangers(ast.parse(code)))


@pytest.mark.parametrize(
    "code", ["model.eval()", "jitted.compile()", "re.compile('x')", "np.load(f, allow_pickle=False)", "json.load(f)"]
)
def test_what_is_harmless_is_not(code):
    assert not list(dangers(ast.parse(code)))
