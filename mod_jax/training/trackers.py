"""Where else metrics go, if asked: TensorBoard, wandb or trackio, each behind `log(metrics, step)` and `finish()`."""

import importlib
import tempfile
import uuid
from typing import Any

from mod_jax import buckets
from mod_jax.errors import ConfigError
from mod_jax.paths import Folder, make_folder


class _TensorBoard:
    """tensorboardX behind the two methods that the runs of wandb and trackio have."""

    def __init__(self, workdir: Folder, config: dict[str, Any], run_name: str, resumed: bool, resumed_at: int | None):
        del run_name, resumed
        # TensorBoard then forgets the steps after `resumed_at` that a killed process had written.
        purge_step = None if resumed_at is None else resumed_at + 1
        writer = _import("tensorboardX", "tensorboard").SummaryWriter
        self._writer = writer(str(workdir / "tensorboard"), purge_step=purge_step, flush_secs=1)
        self._writer.add_text("config", "\n".join(f"    {name} = {value!r}" for name, value in config.items()))

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()


def _start_wandb(workdir: Folder, config: dict[str, Any], run_name: str, resumed: bool, resumed_at: int | None) -> Any:
    del resumed_at  # it takes no step twice
    wandb = _import("wandb", "wandb")
    id_file = workdir / "wandb" / "run_id"  # wandb continues a run by its id only
    if not (resumed and id_file.exists()):
        make_folder(id_file.parent)
        id_file.write_text(uuid.uuid4().hex[:12])
    folder = tempfile.mkdtemp(prefix="mod_jax-wandb-") if buckets.is_bucket(workdir) else workdir
    return wandb.init(
        project="mod_jax", name=run_name, config=config, dir=folder, id=id_file.read_text(), resume="allow"
    )


def _start_trackio(
    workdir: Folder, config: dict[str, Any], run_name: str, resumed: bool, resumed_at: int | None
) -> Any:
    del workdir, resumed_at
    trackio = _import("trackio", "trackio")
    return trackio.init(project="mod_jax", name=run_name, config=config, resume="allow" if resumed else "never")


TRACKERS = dict(tensorboard=_TensorBoard, wandb=_start_wandb, trackio=_start_trackio)
PACKAGES = dict(tensorboard="tensorboardX", wandb="wandb", trackio="trackio")


def check_installed(tracker: str) -> None:
    """Raises ConfigError if the package of this tracker, as in train.tracker, is missing. Call before the work."""
    if tracker != "none":
        _import(PACKAGES[tracker], tracker)


def _import(package: str, extra: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"config.train.tracker = {extra!r}: {error}; pip install -e '.[{extra}]'") from error
