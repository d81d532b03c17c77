"""Choices by platform."""

from mod_jax import tuning


def test_rows_per_pass():
    assert tuning.rows_per_pass(1, 0.125, "tpu") == 1
    assert tuning.rows_per_pass(8, 0.125, "gpu") == 3  # 1 expected, sqrt(1 * 7 / 8) = 0.94
    assert tuning.rows_per_pass(64, 0.125, "tpu") == 13  # 8 expected, sqrt(8 * 7 / 8) = 2.65
    assert tuning.rows_per_pass(64, 0.125, "cpu") == 8
    assert tuning.rows_per_pass(4, 1.0, "tpu") == 4
