"""A dry run: what a run would be, cost and take, without training, saving or writing anything.

Size and length come first, without data. What is missing is said next, then what the program needs and how long the run
would take here. Nothing that is missing keeps the rest from being said; it ends the command.
"""

import datetime
import os
import time

import jax
import numpy as np

from mod_jax import paths, sharding, tuning
from mod_jax.config import Config
from mod_jax.data.batches import MODEL_INPUTS
from mod_jax.errors import ConfigError, DataError
from mod_jax.training import loop, prepare, rates, trackers
from mod_jax.training.prepare import Run, say

LONGEST_STEP = 20.0  # seconds, at the devices' peak; longer ones are not run
MEASURED = 2.0  # seconds of steps that are enough


def dry_run(config: Config, workdir: str | os.PathLike) -> None:
    """Prints all that can be known.

    Raises:
      ConfigError, DataError: what is missing; last, when the rest is said.
    """
    workdir = paths.folder_to_write("--workdir", workdir)
    missing = run = None
    if (vocab_size := prepare.known_vocabulary(config)) is not None:
        run = prepare.make_run(config, workdir, vocab_size)
        say(prepare.describe(run))
    try:
        trackers.check_installed(config.train.tracker)
        run = prepare.with_corpus(run, config, workdir)
    except (ConfigError, DataError) as error:
        if run is None:
            raise
        missing = error
        say(f"MISSING   {error}")
    say(f"time      {estimate(run)}")
    say("DRY RUN: nothing was trained or saved")
    if missing is not None:
        raise missing


def estimate(run: Run) -> str:
    """How long the steps of the run would take here, measured on a few of them where that takes no longer than that."""
    with jax.set_mesh(run.mesh):
        compiled = loop.compile_step(run)
    memory, available = compiled.memory_analysis(), tuning.memory_bytes(jax.local_devices()[0])
    needed = (memory.argument_size_in_bytes + memory.temp_size_in_bytes) * prepare.sharing_devices(run)
    peak = rates.peak_of_devices(list(run.mesh.devices.flat))
    peak = peak if peak.flops else rates.measure_matmul_peak()
    at_peak = loop.from_process_0(run.task.flops_per_step / peak.flops)
    at_least = f"at least {_span(at_peak * run.num_steps)} here: {at_peak:,.3g} s a step at {peak.name}"
    if available is not None and needed > available:
        short = f"a step takes {needed / 2**30:,.1f} GiB, and here are {available / 2**30:,.1f} GiB"
        return f"{at_least}; none was run: {short}"
    if at_peak > LONGEST_STEP:
        return f"{at_least}; none was run"
    seconds = loop.from_process_0(measure(run, compiled))
    return (
        f"about {_span(seconds * run.num_steps)} here: {seconds:.3g} s a step, measured on random tokens; evaluations "
        "and saves come on top"
    )


def measure(run: Run, train_step: jax.stages.Compiled) -> float:
    """Seconds of one step, the best of a few, on a fresh state and random tokens."""
    batch_size, seq_len = run.config.train.batch_size, run.config.data.seq_len
    rows = sharding.local_rows(run.mesh, batch_size)
    tokens_BT = np.random.default_rng(0).integers(run.vocab_size, size=(batch_size, seq_len + 1), dtype=np.int32)[rows]
    positions_BT = np.broadcast_to(np.arange(seq_len, dtype=np.int32), (len(tokens_BT), seq_len))
    inputs = tokens_BT[:, :-1], tokens_BT[:, 1:], positions_BT, np.ones_like(positions_BT)
    best, spent = np.inf, 0.0
    with jax.set_mesh(run.mesh):
        state, teacher = loop.fresh_state(run), loop.load_teacher(run)
        while spent < MEASURED:
            batch = loop.put_batch(run, dict(zip(MODEL_INPUTS, inputs, strict=True)))
            start = time.perf_counter()
            state, _ = jax.block_until_ready(train_step(state, batch, *teacher))
            seconds = time.perf_counter() - start
            best, spent = min(best, seconds), spent + seconds
    return best


def _span(seconds: float) -> str:
    if seconds < 1:
        return "a second"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.1f} h"
    return f"{datetime.timedelta(seconds=seconds).days:,} days"
