"""Writes the page of the Python interface, from the docstrings: python docs/api.py site; then open site/mod_jax.html.

Needs the extra `docs`.
"""

import pathlib
import sys

try:
    import pdoc
except ImportError:
    sys.exit("docs/api.py needs an extra: pip install -e '.[docs]'")

import mod_jax


def build(folder: pathlib.Path) -> pathlib.Path:
    """Builds the page of what `import mod_jax` gives, and returns its path."""
    for name in mod_jax.__all__:
        getattr(mod_jax, name)  # pdoc documents only what has been imported
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc("mod_jax", r"!mod_jax\.", output_directory=folder)
    return folder / "mod_jax.html"


if __name__ == "__main__":
    print(build(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "site")))
