"""The tables of README and docs are those that the code gives. To bring them up to date: python tests/test_readme.py"""

import pathlib
import re

import pytest

from mod_jax import config, errors

ROOT = pathlib.Path(__file__).resolve().parents[1]
README, PODS = PAGES = ROOT / "README.md", ROOT / "docs" / "pods.md"
MADE = re.compile(r"(<!-- made by: python tests/test_readme.py (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
TABLES = {
    "changes": config.change_table,
    "exit_codes": errors.exit_code_table,
    "restarts": errors.restart_table,
}


def with_tables(text):
    return MADE.sub(lambda made: made[1] + "\n".join([*TABLES[made[2]](), ""]) + made[4], text)


def test_every_table_stands_once():
    assert sorted(made[2] for page in PAGES for made in MADE.finditer(page.read_text())) == sorted(TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_what_the_code_gives(name):
    (made,) = (made[3] for page in PAGES for made in MADE.finditer(page.read_text()) if made[2] == name)
    assert made.splitlines() == TABLES[name](), "out of date; run: python tests/test_readme.py"


def test_what_to_do_is_said_of_every_exit_code():
    assert errors.RESTARTS.keys() == errors.EXIT_CODES.keys()
    assert errors.PREEMPTED not in errors.EXIT_CODES


def test_the_comparison_sees_a_change():
    text = README.read_text()
    spoilt = text.replace("`data.{", "`date.{")
    assert spoilt != text
    assert with_tables(spoilt) == text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
