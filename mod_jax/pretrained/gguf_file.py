"""Reads a GGUF file by the library `gguf`: its key-value pairs, and its tensors as float32."""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mod_jax.errors import CheckpointMismatch, ConfigError, StorageError


class GGUF(NamedTuple):
    """`shapes` has the outer dimension first, as in Hugging Face's files. `read` gives one tensor as float32."""

    fields: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]


def open_gguf(path: pathlib.Path) -> GGUF:
    """Opens a file; tensors are read from disk one by one, later.

    Raises:
      ConfigError: there is no such file, it is a part of a split model, or the library is not installed.
      StorageError: it is no GGUF file, or damaged.
    """
    if not path.is_file():
        raise ConfigError(f"--from = 'gguf:{path}': is not a file")
    library = _import_gguf()
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise StorageError(f"{path}: is no GGUF file (it does not begin with GGUF)")
        reader = library.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        for tensor in reader.tensors:
            if tensor.data.nbytes != tensor.n_bytes or tensor.data_offset + tensor.n_bytes > path.stat().st_size:
                raise ValueError(f"tensor {tensor.name} ends behind the end of the file")
    except (StorageError, ConfigError):
        raise
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # what a damaged file makes of the library
        raise StorageError(f"{path}: is damaged or truncated ({' '.join(str(error).split())[:200]})") from None
    if fields.get("split.count", 1) > 1:
        raise ConfigError(f"{path}: is one of {fields['split.count']} parts of a split model; merge them first")

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        try:
            values = library.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise CheckpointMismatch(
                f"{path}: tensor {name} is {tensor.tensor_type.name}, which the library gguf cannot turn into numbers"
            ) from None
        return np.ascontiguousarray(values, np.float32).reshape(shapes[name])

    shapes = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in tensors.items()}
    return GGUF(fields, shapes, read)


def _import_gguf():
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise ConfigError("gguf:FILE needs an extra: pip install -e '.[pretrained]'") from None
    return gguf
