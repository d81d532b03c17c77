"""Signals become a question, and the handlers that were there before come back."""

import os
import signal
import subprocess
import sys
import threading

import jax
import pytest

from mod_jax.host import STOP_SIGNALS
from mod_jax.training.preemption import PreemptionGuard


def handlers():
    return [signal.getsignal(number) for number in STOP_SIGNALS]


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_requests_a_stop_and_handlers_come_back(number):
    before = handlers()
    with PreemptionGuard() as guard:
        assert not guard.requested(1)
        os.kill(os.getpid(), number)
        assert guard.requested(2)
        assert guard.requested(3)
    assert handlers() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_of_several_processes_each_signal_becomes_the_one_that_jax_shares(number, monkeypatch):
    terminated = []
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    before = signal.signal(signal.SIGTERM, lambda number, frame: terminated.append(number))
    try:
        with PreemptionGuard():
            os.kill(os.getpid(), number)
        assert terminated == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_nohup_made_it_ignore_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with PreemptionGuard() as guard:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not guard.requested(1)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_second_ctrl_c_ends_the_process():
    script = """
import signal
from mod_jax.training.preemption import PreemptionGuard
with PreemptionGuard() as guard:
    signal.raise_signal(signal.SIGINT)
    print(guard.requested(1), flush=True)
    signal.raise_signal(signal.SIGINT)
    print("still here")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "True\n"
    assert "SIGINT received" in done.stderr
    assert done.returncode == -signal.SIGINT


def test_outside_the_main_thread_it_does_nothing():
    before, asked = handlers(), []

    def work():
        with PreemptionGuard() as guard:
            asked.append((handlers() == before, guard.requested(1)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert asked == [(True, False)]
