"""Scripts in experiments/ are no package: they import each other by their folder."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "experiments"))
