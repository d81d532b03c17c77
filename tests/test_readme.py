"""README's tables are those that the code gives. To bring them up to date: python tests/test_readme.py"""

import pathlib
import re

import pytest

from mod_jax import config, errors

README = pathlib.Path(__file__).resolve().parents[1] / "README.md"
MADE = re.compile(r"(<!-- made by: python tests/test_readme.py (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
TABLES = {"changes": config.change_table, "exit_codes": errors.exit_code_table}


def with_tables(text):
    return MADE.sub(lambda made: made[1] + "\n".join([*TABLES[made[2]](), ""]) + made[4], text)


def test_every_table_stands_once():
    assert sorted(made[2] for made in MADE.finditer(README.read_text())) == sorted(TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_what_the_code_gives(name):
    (made,) = (made[3] for made in MADE.finditer(README.read_text()) if made[2] == name)
    assert made.splitlines() == TABLES[name](), "out of date; run: python tests/test_readme.py"


def test_the_comparison_sees_a_change():
    text = README.read_text()
    spoilt = text.replace("`data.{", "`date.{")
    assert spoilt != text
    assert with_tables(spoilt) == text


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
