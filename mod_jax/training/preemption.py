"""Preemption: learns that the machine is about to be taken away, so that the loop can save and leave."""

import signal
import threading

import jax
from absl import logging
from orbax.checkpoint import multihost


class PreemptionGuard:
    """Turns SIGTERM, and the first Ctrl-C, into a question that the loop asks after each step.

        with PreemptionGuard() as guard:
            for step in ...:
                ...
                if guard.requested(step):
                    save and leave

    One process: signal handlers set a flag; a second Ctrl-C interrupts at once, as without a guard. Under
    `jax.distributed`, JAX already listens for SIGTERM and makes all processes agree on one step; no handler is
    installed. Outside the main thread Python allows no handlers, and the guard never asks to stop.
    """

    def __init__(self):
        self._distributed = False
        self._received: signal.Signals | None = None
        self._previous = {}

    def __enter__(self):
        self._distributed = jax.distributed.is_initialized()
        if not self._distributed and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exc_info):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def requested(self, step: int) -> bool:
        """Whether to save and leave after `step`. Under `jax.distributed`, ask after every step: True comes once."""
        if self._distributed:
            return multihost.reached_preemption(step)
        if self._received is not None:
            logging.warning("%s received: stopping after step %d", self._received.name, step)
        return self._received is not None

    def _receive(self, number, frame):
        del frame
        self._received = signal.Signals(number)
        if number == signal.SIGINT:
            signal.signal(number, self._previous[number])
