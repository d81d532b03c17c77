"""The line of numbers by hand, in a file and on a terminal."""

import fcntl
import io
import math
import os
import pty
import struct
import sys
import termios

import pytest

from mod_jax.training.console import Console, format_line
from mod_jax.tuning import Peak

PEAK = Peak(1e12, "TPU v9 bf16")


ROW = {
    "train/loss": 1.64841,
    "train/learning_rate": 2.913e-3,
    "perf/tokens_per_second": 412_345.0,
    "perf/flops_per_second": 1.214e12,
    "perf/mfu": 0.3824,
    "perf/eta_seconds": 3753.4,
    "routing/block01/topk_fraction": 0.12,
    "routing/block03/topk_fraction": 0.14,
    "routing/block01/update_ratio": 0.3,
    "routing/block03/update_ratio": 34.0,
}


def test_line_by_hand():
    assert format_line(1200, 40000, ROW, PEAK) == (
        "step  1200/40000  loss 1.6484  lr 2.91e-03  412 ktok/s  1.21 TFLOP/s  MFU 38.2% of TPU v9 bf16  "
        "ETA 1:02:33  routed 13.0%  update/residual 34 in block03 (!)"
    )
    assert format_line(1, 8, {"train/loss": math.nan}, PEAK) == "step 1/8  loss nan"


def test_line_of_experts_by_hand():
    row = {
        f"experts/block{depth:02d}/{name}": value
        for depth, values in ((0, (1.0, 0.03, 0.7)), (1, (0.9, 0.05, 0.02)))
        for name, value in zip(("computed", "dropped", "smallest_load"), values, strict=True)
    }
    assert format_line(1, 8, row, PEAK) == "step 1/8  experts 95.0%  dropped 4.0%  smallest load 0.02 in block01 (!)"
    row["experts/block01/smallest_load"] = 0.9
    assert format_line(1, 8, row, PEAK).endswith("smallest load 0.7 in block00")


def test_mfu_without_a_published_peak_carries_an_asterisk():
    unknown = Peak(None, "no published peak for TPU v99", published=False)
    rates = {"perf/flops_per_second": 1e12}
    assert "MFU unknown (no published peak for TPU v99)" in format_line(1, 8, rates, unknown)
    measured = Peak(1e11, "measured float32 matmul", published=False)
    assert "MFU 31.0%* of measured float32 matmul" in format_line(1, 8, {"perf/mfu": 0.31}, measured)


@pytest.mark.parametrize(
    ("ratios", "shown"),
    [
        ((0.3, 0.002), "update/residual 0.002 in block01 (!)"),  # dead
        ((6.0, 0.3), "update/residual 6 in block00 (!)"),  # takes over
        ((0.3, 0.0), "update/residual 0 in block01 (!)"),
        ((0.3, math.nan), "update/residual nan in block01 (!)"),
        ((0.2, 1.5), "update/residual 1.5 in block01"),
    ],
)
def test_line_shows_the_least_healthy_block(ratios, shown):
    row = {f"routing/block{i:02d}/update_ratio": ratio for i, ratio in enumerate(ratios)}
    assert format_line(1, 8, row, PEAK).endswith(shown)


def test_console_prints_lines_to_a_file_and_redraws_one_on_a_terminal():
    log_file = io.StringIO()
    console = Console(100, 0, PEAK, log_file)
    console.log(10, ROW)
    console.say("saved step 10")
    console.close()
    assert log_file.getvalue().splitlines() == [format_line(10, 100, ROW, PEAK), "saved step 10"]

    shown = on_a_terminal(rows=24, columns=120)
    assert "\r 40% " in shown  # resumed at step 40
    assert "\r 50% " in shown  # of the whole run, not of this process
    assert "step  50/100  loss 1.5000" in shown
    assert "saved step 50\r\n" in shown


@pytest.mark.parametrize(
    ("columns", "variable", "value"), [(0, "TERM", "xterm"), (120, "COLUMNS", "0"), (120, "TERM", "dumb")]
)
def test_a_terminal_without_width_gets_plain_lines(monkeypatch, columns, variable, value):
    monkeypatch.setenv(variable, value)
    assert on_a_terminal(rows=0, columns=columns).splitlines() == ["step  50/100  loss 1.5000", "saved step 50"]


def on_a_terminal(rows, columns):
    """What a run of 100 steps, resumed at 40, shows on a terminal of this size."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with open(slave, "w") as terminal:
        console = Console(100, 40, PEAK, terminal)
        console.log(50, {"train/loss": 1.5})
        console.say("saved step 50")
        console.close()
        shown, wanted = b"", b"saved step 50\r\n"
        while wanted not in shown:
            shown += os.read(master, 1 << 16)
    os.close(master)
    return shown.decode()


def test_without_a_stdout_the_console_is_silent(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    console = Console(100, 0, PEAK)
    console.log(10, ROW)
    console.say("saved step 10")
    console.close()


def test_the_asterisk_is_explained_once_at_the_start():
    log_file = io.StringIO()
    Console(100, 0, Peak(1e11, "measured float32 matmul", published=False), log_file)
    assert "* MFU is the share of the measured float32 matmul rate" in log_file.getvalue()
