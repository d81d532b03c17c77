"""What a person who installs the package sees of it: typed, and documented in public names alone."""

import importlib.resources
import pathlib
import pydoc
import re

from mod_jax import sampling


def test_help_shows_public_names_as_they_are_written():
    text = pydoc.plain(pydoc.render_doc(sampling))
    shown = [line for line in text.splitlines() if "__dataclass_" not in line]  # how Python keeps a dataclass
    private = {name for line in shown for name in re.findall(r"[\w.]*\b_(?!_)\w+", line)}
    assert private == set()
    assert "jaxlib" not in text
    assert "Prompt | Sequence[Prompt]" in text
    for name in sampling.__all__:
        assert name in text


def test_the_package_says_that_it_is_typed():
    assert importlib.resources.files("mod_jax").joinpath("py.typed").is_file()
    setup = pathlib.Path(__file__).parents[2] / "setup.py"
    assert '"mod_jax": ["py.typed"]' in setup.read_text()
