"""A profile of a few training steps, for xprof: what the devices and the host did, and when.

Vocabulary. The *window* is the steps that are traced. It leaves out the first steps of this process, which warm up.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

import jax
import tqdm

from mod_jax.paths import as_folder

SKIP = 5  # steps of this process before the window, if the run is long enough
STEPS = 5  # in the window, if the run is long enough


def window(first_step: int, last_step: int) -> range:
    """The steps to trace of a process that trains first_step to last_step. Never its first; empty if it has no other.

    A run too short for SKIP and STEPS gives up warm-up before it gives up steps.
    """
    start = min(first_step + SKIP, max(first_step + 1, last_step + 1 - STEPS))
    return range(start, min(start + STEPS, last_step + 1))


class Profiler:
    """Writes one trace of the steps in the window, and says where it is and how to see it.

        with Profiler(folder, enabled) as profiler:
            for step in ...:
                with profiler.step(step, last_step, pause):
                    train

    Process 0 traces and speaks for all: every process runs the same program. A trace that cannot be written costs a
    warning, not the run. Leaving the outer block, also by an exception, ends a trace that is still open.
    """

    def __init__(self, folder: str | os.PathLike, enabled: bool):
        self._folder = as_folder(folder)
        self._enabled = enabled and jax.process_index() == 0
        self._window: range | None = None
        self._traced: list[int] = []
        self._open = False

    def __enter__(self):
        return self

    def __exit__(self, error_type, *_):
        self._stop()
        if self._enabled and not self._traced and error_type is None:
            _say("profile: nothing traced, for this process trained no step after its first")

    @contextlib.contextmanager
    def step(self, step: int, last_step: int, pause: Callable[[], contextlib.AbstractContextManager]) -> Iterator[None]:
        """Around one training step, its data included. `last_step`: of the run. `pause()` marks the writing's time."""
        self._window = self._window or window(step, last_step)
        if not self._enabled or step not in self._window:
            yield
            return
        if not self._open:
            jax.block_until_ready(jax.live_arrays())  # earlier steps may still be running
            try:
                jax.profiler.start_trace(self._folder)
            except (RuntimeError, OSError) as error:  # somebody else is tracing, for example
                _say(f"WARNING profile: not started: {' '.join(str(error).split())}")
                self._enabled = False
                yield
                return
            self._open = True
        self._traced.append(step)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield
        if step == self._window[-1]:
            jax.block_until_ready(jax.live_arrays())  # this step has only been dispatched
            with pause():
                self._stop()

    def _stop(self) -> None:
        if not self._open:
            return
        self._open = False
        try:
            jax.profiler.stop_trace()
        except (RuntimeError, OSError) as error:
            _say(f"WARNING profile: not written to {self._folder}: {' '.join(str(error).split())}")
            return
        first, last = self._traced[0], self._traced[-1]
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        _say(f"profile of {steps} in {self._folder}; to see it: pip install xprof; xprof --logdir={self._folder}")


def _say(text: str) -> None:
    if sys.stdout is not None:
        tqdm.tqdm.write(text, file=sys.stdout)  # above the progress bar, if there is one
        sys.stdout.flush()
