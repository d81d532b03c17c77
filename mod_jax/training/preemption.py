"""Preemption: learns that the machine is about to be taken away, so that the loop can save and leave."""

import os
import signal
import sys
import threading

import jax
from orbax.checkpoint import multihost

from mod_jax.host import STOP_SIGNALS


class PreemptionGuard:
    """Turns the signals that stop a run, and the first Ctrl-C, into a question that the loop asks after each step.

        with PreemptionGuard() as guard:
            for step in ...:
                ...
                if guard.requested(step):
                    save and leave

    One process: signal handlers set a flag and say so; a second Ctrl-C ends the process at once. Under
    `jax.distributed`, JAX already listens for SIGTERM and makes all processes agree on one step, so the other signals,
    in any of them, become a SIGTERM. Python allows handlers in the main thread only; elsewhere nothing stops it.

    A process that was started to ignore SIGHUP or SIGINT (`nohup`, `&` in a script) goes on ignoring it.
    """

    def __init__(self):
        self._distributed = False
        self._received: signal.Signals | None = None
        self._previous = {}

    def __enter__(self):
        self._distributed = jax.distributed.is_initialized()
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in STOP_SIGNALS if not _is_ignored(number)]
            if self._distributed:
                handled.remove(signal.SIGTERM)
            for number in handled:
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exc_info):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def requested(self, step: int) -> bool:
        """Whether to save and leave after `step`. Under `jax.distributed`, ask after every step: True comes once."""
        if self._distributed:
            return multihost.reached_preemption(step)
        return self._received is not None

    def _receive(self, number, frame):
        del frame
        self._received = signal.Signals(number)
        message = f"\n{self._received.name} received: will save and stop after the step in progress"
        if number == signal.SIGINT:
            # The default action, not Python's: a KeyboardInterrupt inside a compilation ends in a crash.
            signal.signal(number, signal.SIG_DFL)
            message += "; Ctrl-C again quits at once, without saving"
        if self._distributed:
            os.kill(os.getpid(), signal.SIGTERM)
        print(message, file=sys.stderr, flush=True)


def _is_ignored(number: signal.Signals) -> bool:
    return number in (signal.SIGHUP, signal.SIGINT) and signal.getsignal(number) is signal.SIG_IGN
