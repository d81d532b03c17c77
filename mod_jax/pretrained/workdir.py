"""The workdir of an upgrade: whole or not there, as training leaves one at step 0."""

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import shutil
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from mod_jax import config as config_lib
from mod_jax import paths
from mod_jax.config import Config
from mod_jax.data.corpus import Corpus
from mod_jax.errors import ConfigError
from mod_jax.pretrained.choose import Measured, routed_params
from mod_jax.pretrained.dense import Dense
from mod_jax.pretrained.request import Request, tuning_keys
from mod_jax.trained import CHECKPOINTS, keep_tokenizer
from mod_jax.training import loop, prepare, result
from mod_jax.training.checkpoint import Checkpointer

TUNE = "tune.py"  # in the workdir: a config that continues from it
TUNED = "tuned"  # in the workdir: the run that does so, with --steps


def new_workdir(workdir: str | os.PathLike) -> pathlib.Path:
    # On a disk: in a bucket nothing appears whole or not at all.
    path = paths.folder_to_write("--workdir", paths.local_folder("--workdir", workdir))
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"--workdir = {os.fspath(workdir)!r}: {path} is not empty; an upgrade needs a new folder")
    return path


@contextlib.contextmanager
def whole_or_nothing(workdir: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder beside `workdir` that becomes it at the end; until then nothing looks like a finished run."""
    scratch = workdir.with_name(f".{workdir.name}.{os.getpid()}.tmp")
    with paths.writing(workdir):
        scratch.mkdir(parents=True)
    try:
        yield scratch
        with paths.writing(workdir):
            scratch.rename(workdir)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_run(
    folder: pathlib.Path, dense: Dense, found: Measured, corpus: Corpus, request: Request, seconds: float
) -> None:
    """What training would have left at step 0, but the optimizer's moments: the run is finished, and never resumed."""
    run = prepare.make_run(found.config, folder, found.config.model.vocab_size)
    began = {"workdir": dense.name, "sha256": dense.digest, "positions": dense.positions}
    run = dataclasses.replace(run, corpus=corpus, num_steps=0, init_from=began)
    routed = list(found.config.routed_depths)
    cutoffs_L = found.cutoffs[request.capacity][routed] if routed else np.zeros(0)
    params = routed_params(dense.params, found.config, found.routers_LD)
    state = dict(params=params, cutoffs_L=jnp.asarray(cutoffs_L, jnp.float32))
    about = prepare.metadata(run, seconds)
    keep_tokenizer(folder, dense.tokenizer)
    metric = "eval/causal_loss/threshold" if routed else "eval/topk_loss"
    with Checkpointer(folder / CHECKPOINTS, metric=metric) as checkpointer:
        checkpointer.save(0, state, about, found.evaluation)
    prepare.write_config(run)
    (folder / TUNE).write_text(tune_config(found.config, request), encoding="utf-8")
    result.write(folder, {"step": 0, "tokens": 0, "flops": 0.0, "evaluation": found.evaluation, **about})


def tune_config(config: Config, request: Request) -> str:
    """A config file, to be edited, for a run that begins with the upgraded weights.

    With loss "kl" its teacher is the upgraded model with every token selected: the model that was read.
    """
    keys = config_lib.changed_from_default(config) | tuning_keys(request)
    lines = [f"            {name!r}: {value!r}," for name, value in keys.items()]
    if request.loss == "kl" and config.num_routed:
        lines.append('            "train.teacher": str(pathlib.Path(__file__).resolve().parent),')
    return f'''"""Training that begins with an upgraded model. Edit it, then, with the folder that this file lies in:

python -m mod_jax.train --config=FOLDER/{TUNE} --init_from=FOLDER --workdir=FOLDER/{TUNED}
"""

import pathlib

from mod_jax.config import default_config


def get_config():
    config = default_config()
    config.update_from_flattened_dict(
        {{
{
        """
""".join(lines)
    }
        }}
    )
    return config
'''


def tune(workdir: pathlib.Path) -> None:
    """Runs the workdir's own config of tuning, into a workdir inside it."""
    spec = importlib.util.spec_from_file_location("tune", workdir / TUNE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loop.train(config_lib.from_config_dict(module.get_config()), workdir / TUNED, init_from=workdir)
