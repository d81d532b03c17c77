"""The TFDS dataset `python_stdlib`: the .py files of the running interpreter's own standard library."""

import contextlib
import io
import os
import pathlib
import platform
import shutil
import sys
import uuid
from collections.abc import Sequence

import tensorflow_datasets as tfds

from mod_jax.data import sources


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
        scratch = data_dir.with_name(f"{data_dir.name}.{uuid.uuid4().hex}")
        try:
            tfds.disable_progress_bar()
            with contextlib.redirect_stdout(io.StringIO()):  # it announces a download of unknown size
                _builder(scratch).download_and_prepare()
            os.rename(scratch, data_dir)
        except OSError:
            if not data_dir.exists():  # else another process was first, with the same content
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return _builder(data_dir).as_data_source(split)


def _builder(data_dir: pathlib.Path) -> PythonStdlib:
    return PythonStdlib(data_dir=data_dir, file_format=tfds.core.FileFormat.ARRAY_RECORD)
