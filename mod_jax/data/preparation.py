"""Prepares a large corpus: shares its shards out among processes, and goes on where a killed one stopped.

`shards` writes a single one. Hosts share the shards by number alone, `mine` of `hosts`, and need not run at once.
"""

import concurrent.futures
import datetime
import multiprocessing
import sys
import time
from collections.abc import Iterator
from typing import Any

from mod_jax import host, outputs, paths
from mod_jax.data import tokenizers
from mod_jax.data.inputs import Input, find_inputs
from mod_jax.data.shards import (
    Plan,
    finished,
    make_index,
    read_json,
    refuse_empty,
    remove_left_over,
    write_plan,
    write_shard,
)
from mod_jax.data.sources import held_out
from mod_jax.data.tokenizers import Tokenizer
from mod_jax.errors import ConfigError, DataError, OutOfMemory
from mod_jax.paths import Folder

SAY_EVERY = 10.0  # seconds
TOKENIZER = "tokenizer"  # folder in the corpus
PATIENCE = 24 * 3600.0  # seconds that a host waits for the one that trains the tokenizer


def prepare(
    source: str,
    out: Folder,
    *,
    tokenizer: str = "bytes",
    text_key: str = "text",
    one_in: int = 1000,
    first: int = 0,
    train_bytes: float = 1e9,
    processes: int = 1,
    mine: int = 0,
    hosts: int = 1,
) -> dict[str, Any] | None:
    """Writes the shards that are missing, of those that are this host's, and the index once none is missing.

    Args:
      out: a folder that was checked by `paths.folder_to_write`.
      one_in: one document in so many is held out.
      first: prepare the first so many inputs only; 0: all.
      train_bytes: of text, that `bpe:VOCAB_SIZE` is trained on.

    Returns:
      The index; None while other hosts have not finished theirs.

    Raises:
      ConfigError, DataError, StorageError, OutOfMemory: what is there stays, and the same command goes on.
    """
    start = time.monotonic()
    tokenizers.identity(tokenizer)  # refuses what is misspelt
    found = find_inputs(source, text_key)
    if first > len(found):
        raise ConfigError(f"--first = {first}: {source} has {len(found)} inputs")
    chosen = tuple(found[: first or len(found)])
    with paths.writing(out):
        paths.make_folder(out)
    made = kept_tokenizer(out, tokenizer, chosen, source, text_key, one_in, train_bytes, wait=mine > 0)
    plan = Plan(source, text_key, one_in, made, chosen)
    write_plan(plan, out)

    done = finished(plan, out)
    todo = [number for number in range(len(chosen)) if number % hosts == mine and number not in done]
    count = min(processes, len(todo) or 1)
    say(f"{len(chosen):,} shards, {len(done):,} done; {len(todo):,} to do here, in {count} process(es)")
    progress = Progress([chosen[number].size for number in todo])
    run = _in_this_process if processes == 1 or len(todo) < 2 else _in_processes
    for number, about in run(plan, todo, out, progress, processes):
        done[number] = about
        progress.finished(chosen[number].size, about["train"]["bytes"] + about["validation"]["bytes"])
    if todo:
        progress.say()
    done = finished(plan, out)
    if missing := len(chosen) - len(done):
        say(f"{missing:,} shards are missing, of other hosts: the index is written by the last")
        return None
    refuse_empty(plan, done)
    index = make_index(plan, done)
    outputs.write_json(out / "index.json", index)
    remove_left_over(out)
    say(f"PREPARED {describe(index)} in {time.monotonic() - start:,.0f} s: data.source=tokens:{out}")
    return index


def status(out: Folder) -> list[str]:
    """How far a corpus is, from what lies in its folder alone.

    Raises:
      DataError: nothing was begun there.
    """
    with paths.writing(out):
        plan, index = read_json(out / "plan.json"), read_json(out / "index.json")
        if plan is None:
            raise DataError(f"{out}: there is no plan.json, so nothing was prepared here yet")
        done = [(size, (out / f"done-{i:05d}-{key}.json").exists()) for i, (_, size, key) in enumerate(plan["inputs"])]
    total, there = sum(size for size, _ in done), sum(size for size, is_there in done if is_there)
    missing = [i for i, (_, is_there) in enumerate(done) if not is_there]
    lines = [
        f"{len(done) - len(missing):,} of {len(done):,} shards done, {there / max(1, total):.1%} of {total:,} bytes: "
        f"{plan['source']} as {plan['tokenizer']}"
    ]
    if missing:
        lines.append(f"missing: {', '.join(map(str, missing[:20]))}{' ...' if len(missing) > 20 else ''}")
    if index is not None:
        lines.append(f"index of {len(index['shards']):,} shards: {describe(index)}")
    return lines


def describe(index: dict[str, Any]) -> str:
    """A prepared corpus in a few words."""
    sums = {
        split: {name: sum(shard[split][name] for shard in index["shards"]) for name in ("tokens", "documents")}
        for split in ("train", "validation")
    }
    texts = [f"{split} {n['tokens']:,} tokens of {n['documents']:,} documents" for split, n in sums.items()]
    return f"{', '.join(texts)}, digest {index['digest'][:12]}"


def kept_tokenizer(
    out: Folder,
    spec: str,
    chosen: tuple[Input, ...],
    source: str,
    text_key: str,
    one_in: int,
    train_bytes: float,
    wait: bool,
) -> Tokenizer:
    """The tokenizer of the corpus, which lies beside it: made once, by the host of the first shard."""
    start = time.monotonic()
    while (there := tokenizers.load(out / TOKENIZER)) is None and wait and tokenizers.needs_training(spec):
        if time.monotonic() - start > PATIENCE:
            raise DataError(f"{out / TOKENIZER}: the host of shards 0 has not trained the tokenizer")
        time.sleep(1)
    if there is not None:
        trained = tokenizers.needs_training(spec)
        if there.name != spec if trained else there.digest != tokenizers.make(spec, ()).digest:
            raise ConfigError(f"--tokenizer = {spec!r}: {out} was begun with {there.name}; take another folder")
        return there
    if tokenizers.needs_training(spec):
        say(f"training {spec} on up to {train_bytes:,.0f} bytes of text")
    made = tokenizers.make(spec, _sample(chosen, source, text_key, one_in, train_bytes))
    with paths.writing(out):
        tokenizers.save(made, out / TOKENIZER)
    return made


def _sample(chosen: tuple[Input, ...], source: str, text_key: str, one_in: int, size: float) -> Iterator[bytes]:
    """Texts of the train split from the beginning, `size` bytes or all."""
    taken = 0
    for one in chosen:
        for name, text in one.read(source, text_key):
            if one.split == "train" or (one.split is None and not held_out(name, one_in)):
                taken += len(text)
                if taken > size:
                    return
                yield text


# Processes.


def _in_this_process(plan: Plan, todo: list[int], out: Folder, progress: "Progress", processes: int):
    def report(documents: int, size: int) -> None:
        progress.add(documents, size)
        progress.say_if_due()

    for number in todo:
        yield number, write_shard(plan, number, out, report)


def _in_processes(plan: Plan, todo: list[int], out: Folder, progress: "Progress", processes: int):
    context = multiprocessing.get_context("spawn")
    work = (plan.source, plan.text_key, plan.held_out, plan.inputs, str(out), progress.counters(context))
    workers = concurrent.futures.ProcessPoolExecutor(min(processes, len(todo)), context, _begin, work)
    try:
        waiting = {workers.submit(_work, number) for number in todo}
        while waiting:
            ended, waiting = concurrent.futures.wait(waiting, 1.0, concurrent.futures.FIRST_COMPLETED)
            for future in ended:
                yield future.result()
            progress.say_if_due()
        workers.shutdown()
    except BaseException as error:
        for process in multiprocessing.active_children():
            process.kill()
        workers.shutdown(cancel_futures=True)
        if isinstance(error, concurrent.futures.process.BrokenProcessPool):
            raise OutOfMemory(
                "a process that wrote a shard was killed, most often for lack of memory; fewer --processes need less, "
                "and the same command goes on"
            ) from None
        raise


def _begin(source: str, text_key: str, one_in: int, chosen: tuple[Input, ...], out: str, counters: Any) -> None:
    """In a worker: what all of its shards need."""
    global _worker
    host.follow_parent()
    folder = paths.as_folder(out)
    made = tokenizers.load(folder / TOKENIZER)

    def report(documents: int, size: int) -> None:
        with counters.get_lock():
            counters[0] += documents
            counters[1] += size

    _worker = Plan(source, text_key, one_in, made, chosen), folder, report


def _work(number: int) -> tuple[int, dict[str, Any]]:
    plan, out, report = _worker
    return number, write_shard(plan, number, out, report)


class Progress:
    """One line now and then: shards, documents, bytes of text, rate, time left."""

    def __init__(self, sizes: list[int]):
        self._total, self._shards = sum(sizes), len(sizes)
        self._start = self._said = time.monotonic()
        self._done = self._text = self._ended = 0
        self._ratio = 0.0  # bytes of text in a byte of input
        self._counts: Any = [0, 0]  # documents, bytes of text

    def counters(self, context: Any) -> Any:
        """To be added to in other processes."""
        self._counts = context.Array("q", [0, 0])
        return self._counts

    def add(self, documents: int, size: int) -> None:
        self._counts[0] += documents
        self._counts[1] += size

    def finished(self, size: int, text: int) -> None:
        """A shard is: `size` bytes of input held `text` bytes of text. From it the rest is estimated."""
        self._ended += 1
        self._done += size
        self._text += text
        self._ratio = self._text / max(self._done, 1)

    def say_if_due(self) -> None:
        if time.monotonic() - self._said > SAY_EVERY:
            self.say()

    def say(self) -> None:
        self._said = time.monotonic()
        seconds = max(self._said - self._start, 1e-9)
        left = "-"
        if self._ratio:
            share = min(1.0, self._counts[1] / (self._ratio * self._total))
            left = str(datetime.timedelta(seconds=round((1 - share) / max(share, 1e-9) * seconds)))
        say(
            f"{self._ended:,} of {self._shards:,} shards, {self._counts[0]:,} documents, "
            f"{self._counts[1] / 1e9:,.3f} GB of text, {self._counts[1] / 1e6 / seconds:,.1f} MB/s, ETA {left}"
        )


def say(text: str) -> None:
    print(text, file=sys.stdout, flush=True)
