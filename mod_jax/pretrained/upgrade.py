"""A pretrained dense model becomes a Mixture-of-Depths model, without training: convert, measure, choose, save.

1. Read and convert (`source`, `families`). With every token selected the result is the dense model, exactly.
2. Leave out each block in turn: the cheapest ones will be routed.
3. One dense pass: ridge regression gives each block a router, for how far the block turns a token (`measure`).
4. Cut-offs by one more pass for each capacity, and the table of loss against FLOPs, beside deleting blocks (`choose`,
   `table`).
5. A workdir as training leaves it, at step 0, which `train --init_from`, `evaluate` and `sample` take (`workdir`).
"""

import pathlib
import time
from typing import Any

from mod_jax import outputs
from mod_jax.data.corpus import describe_corpus, prepare_corpus
from mod_jax.pretrained import request as asked
from mod_jax.pretrained import table
from mod_jax.pretrained.choose import measure
from mod_jax.pretrained.dense import read_dense
from mod_jax.pretrained.request import Request, Say
from mod_jax.pretrained.workdir import TUNE, TUNED, new_workdir, tune, whole_or_nothing, write_run


def upgrade(request: Request, say: Say = lambda line: print(line, flush=True)) -> dict[str, Any]:
    """Upgrades a model into a new workdir, and returns what is written to its upgrade.json. Then tunes it, if asked to.

    Raises:
      ConfigError, CheckpointMismatch, StorageError, DataError: nothing is written then. While it is tuned, those of
        `loop.train`.
    """
    workdir = new_workdir(request.workdir)
    asked.check(request)
    about = _without_training(request, workdir, say)  # whose arrays are gone when tuning begins
    command = f"python -m mod_jax.train --config={workdir / TUNE} --init_from={workdir} --workdir={workdir / TUNED}"
    if request.steps:
        say(f"TUNING for {request.steps} steps; if it is stopped, this goes on with it: {command}")
        tune(workdir)
    else:
        say(f"to train it: {command}")
    return about


def _without_training(request: Request, workdir: pathlib.Path, say: Say) -> dict[str, Any]:
    start = time.monotonic()
    dense = read_dense(request, say)
    corpus = prepare_corpus(dense.config.data, dense.tokenizer)
    say(f"corpus    {describe_corpus(corpus)}")
    found = measure(dense, corpus, request, say)
    routed = list(found.config.routed_depths)
    about = {
        "source": {"name": dense.name, "sha256": dense.digest},
        "layout": found.config.model.layout,
        "capacity": request.capacity,
        "leave_one_out": found.worth_L.tolist(),
        "router_r2": found.fit_L.tolist(),
        "corpus_digest": corpus.digest,
        "cutoffs": {f"{capacity:g}": cutoffs_L[routed].tolist() for capacity, cutoffs_L in found.cutoffs.items()},
        **table.to_json(found.whole, found.routed, found.deleted),
    }
    with whole_or_nothing(workdir) as scratch:
        seconds = time.monotonic() - start
        write_run(scratch, dense, found, corpus, request, seconds)
        name = dense.name.split("/")[-1]
        caption = f"{name}, sha256 {dense.digest[:12]}; {corpus.source}, digest {corpus.digest[:12]}; no training"
        table.draw(scratch / "report", caption, found.whole, found.routed, found.deleted)
        outputs.write_json(scratch / "upgrade.json", about)
    what = f"at capacity {request.capacity:g}" if routed else "of the dense model"
    say(f"DONE in {seconds:.0f} s: step 0 {what} in {workdir}, plot in {workdir / 'report'}")
    return about
