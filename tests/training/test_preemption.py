"""Signals become a question, and the handlers that were there before come back."""

import os
import signal
import threading

import pytest

from mod_jax.training.preemption import PreemptionGuard


def handlers():
    return signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_requests_a_stop_and_handlers_come_back(number):
    before = handlers()
    with PreemptionGuard() as guard:
        assert not guard.requested(1)
        os.kill(os.getpid(), number)
        assert guard.requested(2)
        assert guard.requested(3)
    assert handlers() == before


def test_the_second_ctrl_c_interrupts():
    with PreemptionGuard() as guard:
        os.kill(os.getpid(), signal.SIGINT)
        assert guard.requested(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_outside_the_main_thread_it_does_nothing():
    before, asked = handlers(), []

    def work():
        with PreemptionGuard() as guard:
            asked.append((handlers() == before, guard.requested(1)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert asked == [(True, False)]
