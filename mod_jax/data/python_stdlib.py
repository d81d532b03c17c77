"""The TFDS dataset `python_stdlib`: the .py files of the running interpreter's own standard library."""

import contextlib
import io
import os
import pathlib
import platform
import sys
from collections.abc import Sequence

import tensorflow_datasets as tfds

from mod_jax.data import cache, sources
from mod_jax.data.files import one_line
from mod_jax.errors import DataError


class PythonStdlib(tfds.core.GeneratorBasedBuilder):
    """Whole source files, one in ten held out for validation by a hash of its path."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = (
        tfds.core.BuilderConfig(
            name=f"{sys.implementation.name}-{platform.python_version()}",
            description="The standard library of this Python version.",
        ),
    )

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({"path": tfds.features.Text(), "text": tfds.features.Text()})
        return self.dataset_info_from_configs(
            features=features,
            description=type(self).__doc__,
            disable_shuffling=True,  # keep the order of the paths
        )

    def _split_generators(self, dl_manager):
        del dl_manager  # nothing to download
        return {split: self._generate_examples(split) for split in sources.SPLITS}

    def _generate_examples(self, split: str):
        for path, text in sources.stdlib_documents():
            if sources.held_out(path) == (split == "validation"):
                yield path, {"path": path, "text": text}


def prepare(data_dir: pathlib.Path, split: str) -> Sequence[dict[str, bytes]]:
    """Returns the examples of a split, first building the dataset in `data_dir` if it is not there.

    Built beside its final place and renamed into it, so that any number of processes may call this at once.
    """
    if not data_dir.exists():
        with cache.scratch_folder(data_dir) as scratch:
            _build(scratch)
            try:
                os.rename(scratch, data_dir)
            except OSError:
                if not data_dir.exists():  # else another process was first, with the same content
                    raise
    try:
        return _builder(data_dir).as_data_source(split)
    except Exception as error:  # whatever a damaged folder raises
        raise DataError(
            f"python_stdlib: {data_dir} is damaged ({one_line(error)}); remove it, and it is made again"
        ) from error


def _build(directory: pathlib.Path) -> None:
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it announces a download of unknown size
            _builder(directory).download_and_prepare()
    except (DataError, OSError):
        raise
    except Exception as error:  # the writer of its files raises RuntimeError, for a full disk too
        raise DataError(
            f"python_stdlib: cannot be prepared in {directory.parent} ({one_line(error)}); "
            "set MOD_JAX_CACHE to another folder"
        ) from error


def _builder(data_dir: pathlib.Path) -> PythonStdlib:
    return PythonStdlib(data_dir=data_dir, file_format=tfds.core.FileFormat.ARRAY_RECORD)
