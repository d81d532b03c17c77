"""Small corpora written by a test, and batches taken from them."""

import numpy as np

from mod_jax.config import DataConfig
from mod_jax.data.corpus import prepare_corpus


def write_texts(folder, **splits):
    for split, texts in splits.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        for i, text in enumerate(texts):
            (folder / split / f"{i:03d}.txt").write_bytes(text)
    return folder


def make_corpus(tmp_path, train=(b"train",), validation=(b"validation",), **keys):
    folder = write_texts(tmp_path / "texts", train=train, validation=validation)
    return prepare_corpus(DataConfig(source=f"text:{folder}", cache_dir=str(tmp_path / "cache"), **keys))


def take(stream, count):
    batches = [next(stream) for _ in range(count)]
    if hasattr(stream, "close"):
        stream.close()
    return batches


def ids_of(batches):
    return [batch["example_ids_B"].tolist() for batch in batches]


def assert_equal_batches(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])
