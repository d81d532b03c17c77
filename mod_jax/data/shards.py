"""A prepared corpus: token files that any number of processes and hosts write, none of which talks to another.

A *shard* is what comes out of one input (`inputs`). Its files are written aside and renamed, the proof that it is
finished last of all. What they hold depends on the input and on what their names carry, and on nothing else: two that
write the same shard write the same bytes. In the folder, which may lie in a bucket:

    plan.json                  tokenizer, held-out rule, and the inputs in order
    tokenizer/                 so that neither training nor sampling needs another copy
    train-00007-KEY.bin        tokens; KEY is a digest of all that they depend on
    validation-00007-KEY.bin   likewise
    bytes-00007-KEY.bin        int32, bytes of text that each validation token stands for
    starts-00007-KEY.bin       int64, where each validation document begins in its shard
    done-00007-KEY.json        numbers and digests of these four
    index.json                 of all shards, once all are done

Memory does not grow with the number of documents.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from mod_jax import buckets, outputs, paths
from mod_jax.data import cache, tokenizers
from mod_jax.data.files import SPLITS, printable
from mod_jax.data.inputs import Input
from mod_jax.data.sources import held_out
from mod_jax.data.tokenizers import Tokenizer
from mod_jax.errors import ConfigError, DataError
from mod_jax.paths import Folder

FORMAT = 1
PARTS = (*SPLITS, "bytes", "starts")
CHECKED_BYTES = 2**17  # of validation text in each shard, for whether decoding gives it back
REPORT_EVERY = 256  # documents
LEFT_OVER = 3600.0  # seconds after which a file that was being written has no writer any more


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a prepared corpus is made of. `held_out`: one document in so many, where the source has no splits."""

    source: str
    text_key: str
    held_out: int
    tokenizer: Tokenizer
    inputs: tuple[Input, ...]

    def key(self, number: int) -> str:
        """A digest of what the tokens of a shard depend on. Files are known by name and size, wherever they lie."""
        one = self.inputs[number]
        facts = [FORMAT, one.kind, one.name, one.size, one.split, one.documents, [name for name, _ in one.files]]
        rule = None if one.split else self.held_out
        facts += [self.tokenizer.digest, self.text_key, rule]
        return hashlib.sha256(outputs.canonical(facts).encode()).hexdigest()[:16]

    def file(self, part: str, number: int) -> str:
        ending = "json" if part == "done" else "bin"
        return f"{part}-{number:05d}-{self.key(number)}.{ending}"

    def to_json(self) -> dict[str, Any]:
        about = dict(format=FORMAT, source=self.source, text_key=self.text_key, held_out=self.held_out)
        about |= dict(tokenizer=self.tokenizer.name, tokenizer_digest=self.tokenizer.digest)
        return about | dict(inputs=[[one.name, one.size, self.key(i)] for i, one in enumerate(self.inputs)])


def write_plan(plan: Plan, out: Folder) -> None:
    """Writes plan.json, or finds that the folder holds this plan, or the beginning of it.

    Raises:
      ConfigError: the folder holds another corpus.
      StorageError: it cannot be written.
    """
    mine, there = plan.to_json(), read_json(out / "plan.json")
    if there is not None:
        keys = [key for _, _, key in there.get("inputs", [])]
        ours = [key for _, _, key in mine["inputs"]]
        if there.get("format") != FORMAT or keys[: len(ours)] != ours[: len(keys)]:
            changed = [n for n in ("text_key", "held_out", "tokenizer", "tokenizer_digest") if there.get(n) != mine[n]]
            was = ", ".join(f"{name} {there.get(name)!r}" for name in changed) or f"other inputs, of {there['source']}"
            raise ConfigError(f"--out = {str(out)!r}: holds another corpus: {was}; take another folder")
        if len(keys) >= len(ours):
            return
    outputs.write_json(out / "plan.json", mine)


def finished(plan: Plan, out: Folder) -> dict[int, dict[str, Any]]:
    """What the finished shards of a plan say of themselves, by number. One whose files are not all there is not."""
    with paths.writing(out):
        there = sizes(out)
        found = {}
        for number in range(len(plan.inputs)):
            if plan.file("done", number) in there:
                about = read_json(out / plan.file("done", number))
                if about is not None and all(
                    there.get(plan.file(part, number)) == about[part]["size"] for part in PARTS
                ):
                    found[number] = about
        return found


def write_shard(plan: Plan, number: int, out: Folder, report: Callable[[int, int], None]) -> dict[str, Any]:
    """Tokenises one input. Returns what the shard says of itself.

    Args:
      report: is called now and then with the documents and bytes of text since the last call.

    Raises:
      DataError: a document cannot be read or tokenised; the message names the place.
      StorageError: files cannot be written.
    """
    with paths.writing(out), cache.scratch_folder(_scratch_root() / "shard") as scratch:
        about = _write_parts(plan, number, scratch, report)
        for part in PARTS:
            publish(scratch / part, out / plan.file(part, number))
        outputs.write_json(out / plan.file("done", number), about)
    return about


def _write_parts(plan: Plan, number: int, scratch: pathlib.Path, report: Callable[[int, int], None]) -> dict[str, Any]:
    one, tokenizer = plan.inputs[number], plan.tokenizer
    dtype = token_dtype(tokenizer)
    dtypes = dict(train=dtype, validation=dtype, bytes=np.dtype("<i4"), starts=np.dtype("<i8"))
    digests = {part: hashlib.sha256() for part in PARTS}
    counts = {split: collections.Counter() for split in SPLITS}
    documents = unreported = checked = altered = 0
    with contextlib.ExitStack() as files:
        open_files = {part: files.enter_context((scratch / part).open("wb")) for part in PARTS}

        def append(part: str, values: np.ndarray) -> None:
            written = values.astype(dtypes[part]).tobytes()
            open_files[part].write(written)
            digests[part].update(written)

        for name, text in one.read(plan.source, plan.text_key):
            split = one.split or ("validation" if held_out(name, plan.held_out) else "train")
            ids = tokenizers.encode_document(tokenizer, text, f"{plan.source}, document {printable(name)}")
            count = counts[split]
            if split == "validation":
                append("starts", np.array([count["tokens"]]))
                append("bytes", np.append(np.int32(0), tokenizer.count_bytes(text, ids)))
                if count["bytes"] + len(text) <= CHECKED_BYTES:
                    checked, altered = checked + 1, altered + (tokenizer.decode(ids) not in (text, b" " + text))
            append(split, np.append(np.int32(tokenizer.separator_id), ids))
            count.update(tokens=ids.size + 1, documents=1, bytes=len(text))
            documents, unreported = documents + 1, unreported + len(text)
            if documents % REPORT_EVERY == 0:
                report(REPORT_EVERY, unreported)
                unreported = 0
        report(documents % REPORT_EVERY, unreported)
    about: dict[str, Any] = dict(name=one.name, checked=checked, altered=altered)
    for part in PARTS:
        size = (scratch / part).stat().st_size
        about[part] = dict(size=size, sha256=digests[part].hexdigest())
    for split in SPLITS:
        about[split] |= {name: counts[split][name] for name in ("tokens", "documents", "bytes")}
    return about


def make_index(plan: Plan, shards: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """What index.json says: a function of the plan and the finished shards, whoever finished them."""
    rows = []
    for number in range(len(plan.inputs)):
        files = {part: plan.file(part, number) for part in PARTS}
        rows.append(shards[number] | {"files": files})
    return dict(
        format=FORMAT,
        source=plan.source,
        text_key=plan.text_key,
        held_out=plan.held_out,
        tokenizer=plan.tokenizer.name,
        tokenizer_digest=plan.tokenizer.digest,
        vocab_size=plan.tokenizer.vocab_size,
        separator_id=plan.tokenizer.separator_id,
        dtype=token_dtype(plan.tokenizer).str,
        digest=digest(rows),
        shards=rows,
    )


def digest(shards: list[dict[str, Any]]) -> str:
    """Of the tokens of some shards, in their order."""
    whole = hashlib.sha256()
    for shard in shards:
        for split in SPLITS:
            whole.update(bytes.fromhex(shard[split]["sha256"]))
    return whole.hexdigest()


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


# Files of the folder.


def sizes(folder: Folder) -> dict[str, int]:
    """The size in bytes of each file directly in the folder."""
    if buckets.is_bucket(folder):
        return {name: size for name, size in buckets.sizes(folder).items() if "/" not in name}
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}


def read_json(path: Folder) -> dict[str, Any] | None:
    """A JSON object; None if it is not there, or is none."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def publish(file: pathlib.Path, final: Folder) -> None:
    """Puts a finished file in its place, whole or not at all. Raises what the disk or the bucket raises."""
    if buckets.is_bucket(final):
        buckets.upload(file, final)
        return
    aside = final.with_name(f".{final.name}.{uuid.uuid4().hex}.tmp")
    try:
        with file.open("rb") as source, aside.open("wb") as target:
            shutil.copyfileobj(source, target, 2**20)
            target.flush()
            os.fsync(target.fileno())
        aside.replace(final)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def remove_left_over(out: Folder) -> None:
    """Removes what killed processes were writing. Their scratch folders are removed with the next shard."""
    if not buckets.is_bucket(out):
        for path in out.glob(".*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > LEFT_OVER:
                    path.unlink()


def _scratch_root() -> pathlib.Path:
    root = pathlib.Path(os.environ.get("TMPDIR") or "/tmp") / f"mod_jax_prepare-{os.getuid()}"
    root.mkdir(parents=True, exist_ok=True)
    return root


def refuse_empty(plan: Plan, shards: dict[int, dict[str, Any]]) -> None:
    """Raises DataError if a split has no text."""
    for split in SPLITS:
        if not any(shard[split]["documents"] for shard in shards.values()):
            rule = f"one document in {plan.held_out} is held out"
            raise DataError(f"{plan.source}: no text in split {split!r}; {rule}: another --held_out, or more text")
