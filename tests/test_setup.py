"""setup.py declares what is imported, and nothing that is not."""

import ast
import importlib.metadata
import pathlib
import re
import runpy
import sys
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
OURS = {"mod_jax", "configs", "experiments", "notebooks"}
OWN_ENVIRONMENT = "hf_peer.py"  # it says itself what it needs


@pytest.fixture(scope="module")
def requirements():
    """The lists of setup.py, by name: "install_requires" and the extras."""
    given = {}
    stub = types.SimpleNamespace(setup=given.update, find_packages=lambda **_: [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "setuptools", stub)
        runpy.run_path(str(ROOT / "setup.py"))
    return {"install_requires": given["install_requires"], **given["extras_require"]}


@pytest.fixture(scope="module")
def declared(requirements):
    """A function of names of such lists: the packages that they ask, as normalised names."""
    return lambda *names: {normal(requirement) for name in names for requirement in requirements[name]}


def imported(*folders):
    """Top-level names of other packages that the files of these folders import, anywhere in them."""
    found = set()
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path.name != OWN_ENVIRONMENT]
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.split(".")[0])
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "_import":
                found |= {
                    argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)
                }  # trackers
    siblings = {name for path in paths for name in (path.stem, path.parent.name)} | {
        OWN_ENVIRONMENT.removesuffix(".py")
    }
    scripts = {path.stem for path in (ROOT / "experiments").glob("*.py")}  # which tests import as modules
    return found - set(sys.stdlib_module_names) - OURS - siblings - scripts


def distributions(modules):
    by_module = importlib.metadata.packages_distributions()
    return {module: {normal(name) for name in by_module.get(module, [module])} for module in modules}


def normal(name):
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", name)[0]).lower()


def test_the_package_declares_what_it_imports_and_imports_what_it_requires(declared):
    optional = declared(
        *(
            "wandb",
            "trackio",
            "tensorboard",
            "bpe",
            "sentencepiece",
            "pretrained",
            "transformers",
            "gcs",
            "parquet",
            "zst",
            "tpu",
            "cuda",
        ),
        "lm-eval",
    )
    found = distributions(imported("mod_jax", "configs"))
    assert [module for module, names in found.items() if not names & (declared("install_requires") | optional)] == []
    assert declared("install_requires") - set().union(*found.values()) == {"importlib-resources"}  # datasets needs it


@pytest.mark.parametrize(("folder", "extras"), [("tests", ["test", "peers"]), ("experiments", ["bench"])])
def test_tests_and_experiments_declare_what_they_import(declared, folder, extras):
    known = declared("install_requires", *extras)
    assert [module for module, names in distributions(imported(folder)).items() if not names & known] == []


def test_the_test_command_of_readme_is_the_one_that_ci_runs(requirements):
    readme, script = ((ROOT / name).read_text() for name in ("README.md", ".ci/run"))
    extra, command = re.search(r"pip install -e '(\.\[test\])' && (\.venv/bin/python -m pytest.*)", readme).groups()
    assert f".venv/bin/pip install --quiet -e '{extra}'\n" in script
    assert "\nexport MOD_JAX_TESTS_SKIP_NOTHING=1\n" in script
    assert script.endswith(f"\n{command} || {command} --last-failed --last-failed-no-failures=none\n")
    assert "jax[tpu]" in requirements["test"]  # or the tests of plans would be skipped
