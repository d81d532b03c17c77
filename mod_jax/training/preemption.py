"""Preemption: learns that the machine is about to be taken away, so that the loop can save and leave."""

import os
import signal
import sys
import threading

import jax
from orbax.checkpoint import multihost


class PreemptionGuard:
    """Turns SIGTERM, and the first Ctrl-C, into a question that the loop asks after each step.

        with PreemptionGuard() as guard:
            for step in ...:
                ...
                if guard.requested(step):
                    save and leave

    One process: signal handlers set a flag and say so; a second Ctrl-C ends the process at once. Under
    `jax.distributed`, JAX already listens for SIGTERM and makes all processes agree on one step, so the first Ctrl-C,
    in any of them, becomes a SIGTERM. Python allows handlers in the main thread only; elsewhere nothing stops it.
    """

    def __init__(self):
        self._distributed = False
        self._received: signal.Signals | None = None
        self._previous = {}

    def __enter__(self):
        self._distributed = jax.distributed.is_initialized()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT,) if self._distributed else (signal.SIGINT, signal.SIGTERM):
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
