"""What decisions go with, by hand and on made cases whose answer is known; and what each byte is to Python."""

import numpy as np
import pytest

from mod_jax.analysis.decisions import agreement, correlation, fixed_tokens, groups, share_by_class
from mod_jax.analysis.syntax import CLASSES, UNKNOWN, classes_of_bytes


def named(text: str) -> str:
    """The class of each byte by its first letter, ? where it is unknown."""
    letters = {"keyword": "k", "name": "n", "number": "1", "string": "s", "comment": "c", "operator": "o", "space": "_"}
    return "".join("?" if i == UNKNOWN else letters[CLASSES[i]] for i in classes_of_bytes(text.encode()))


@pytest.mark.parametrize(
    ("text", "classes"),
    [
        ("if x == 1:  # one\n", "kk_n_oo_1o__ccccc_"),
        ('é = "ü"\n', "nn_o_ssss_"),
        ("a\\\n+ b\r\n", "n__o_n__"),
        ("x = '''a\nb'''", "n_o_" + "s" * 9),
        ("", ""),
        ("x = (1,\n", "n_o_o1o?"),
        ("def f():\n\treturn\n", "kkk_nooo__kkkkkk_"),
    ],
)
def test_the_class_of_each_byte(text, classes):
    assert named(text) == classes


def test_text_that_is_no_utf8_is_unknown():
    assert classes_of_bytes(b"x\xff").tolist() == [UNKNOWN, UNKNOWN]


def test_share_of_a_class_beside_that_of_its_identities():
    # Token 7 is selected in 3 of 4 cases, both in class 0; token 8 in 0 of 2, of classes 0 and 1.
    token = np.array([7, 7, 7, 7, 8, 8])
    selected = np.array([1, 1, 1, 0, 0, 0], bool)
    classes = np.array([0, 0, -1, 1, 0, 1])
    first, second, third = share_by_class(selected, classes, token, 3)
    assert first == (3, pytest.approx(2 / 3), pytest.approx((0.75 + 0.75 + 0) / 3))
    assert second == (2, 0.0, pytest.approx((0.75 + 0) / 2))
    assert third.count == 0
    assert np.isnan(third.selected)


def test_what_only_goes_by_identity_vanishes_within_identities():
    rng = np.random.default_rng(0)
    token, window = rng.integers(20, size=8000), np.repeat(np.arange(80), 100)
    level = rng.normal(size=20)[token]
    score, surprise = level + rng.normal(size=8000), level + rng.normal(size=8000)
    raw, within = correlation(score, surprise, window), correlation(score, surprise, window, token)
    assert raw.low > 0.3
    assert within.low < 0 < within.high
    assert within.r == pytest.approx(0, abs=0.05)


def test_what_goes_beyond_identity_stays():
    rng = np.random.default_rng(1)
    token, window, both = rng.integers(20, size=8000), np.repeat(np.arange(80), 100), rng.normal(size=8000)
    score, surprise = token + both, -5.0 * token + both
    assert correlation(score, surprise, window).r < -0.9
    assert correlation(score, surprise, window, groups(token, window % 4)).r == pytest.approx(1)


def test_agreement_beyond_chance():
    one = np.array([1, 1, 0, 0], bool)
    assert agreement(one, one) == 1
    assert agreement(one, ~one) == -1
    assert agreement(one, np.array([1, 0, 1, 0], bool)) == 0
    assert np.isnan(agreement(np.zeros(4, bool), np.zeros(4, bool)))


def test_tokens_that_always_or_never_go_through():
    token = np.repeat([1, 2, 3, 4], [100, 100, 100, 5])
    selected = np.repeat([1, 0, 1, 1, 1], [100, 100, 50, 50, 5]).astype(bool)
    selected[200:250] = False
    assert fixed_tokens(selected, token) == ([1], [2])
