"""Prepares a large corpus, in shards: python -m mod_jax.prepare --source=jsonl:gs://B/c4/en --out=gs://B/c4-bytes

Killed, the same command goes on. Several hosts give --shards=0/3, 1/3 and 2/3, in any order. Training then reads
--config.data.source=tokens:gs://B/c4-bytes. Source and result lie in a folder or in a bucket.
"""

import os
import re

from absl import app, flags

from mod_jax import cli, paths, streams
from mod_jax.errors import ConfigError

SOURCE = flags.DEFINE_string(
    "source", None, "jsonl:PATH (.jsonl or .json, plain, .gz or .zst), parquet:PATH, text:PATH or tfds:NAME."
)
OUT = flags.DEFINE_string("out", None, "Folder of the prepared corpus.", required=True)
TOKENIZER = flags.DEFINE_string("tokenizer", "bytes", "As in config.data.tokenizer.")
TEXT_KEY = flags.DEFINE_string("text_key", "text", "Field or column that holds the text.")
HELD_OUT = flags.DEFINE_integer(
    "held_out", 1000, "One document in so many is held out, where files do not say to which split they belong.", 2
)
FIRST = flags.DEFINE_integer("first", 0, "Prepare the first so many inputs only, more of them later; 0: all.", 0)
TRAIN_BYTES = flags.DEFINE_float("train_bytes", 1e9, "Bytes of text that bpe:VOCAB_SIZE is trained on.", 1.0)
PROCESSES = flags.DEFINE_integer("processes", os.cpu_count(), "Processes on this host.", 1)
SHARDS = flags.DEFINE_string("shards", "0/1", "I/N: the I-th of N hosts, from 0.")
STATUS = flags.DEFINE_bool("status", False, "Say how far the corpus in --out is; prepare nothing.")


def main(argv: list[str]) -> int:
    cli.refuse_arguments(argv)

    def run() -> None:
        from mod_jax.data import preparation

        if STATUS.value:
            print("\n".join(preparation.status(paths.folder_to_read("--out", OUT.value))))
            return
        if not SOURCE.value:
            raise ConfigError("--source is missing; for example --source=jsonl:FOLDER")
        mine, hosts = share(SHARDS.value)
        streams.outlive_stdout()
        preparation.prepare(
            SOURCE.value,
            paths.folder_to_write("--out", OUT.value),
            tokenizer=TOKENIZER.value,
            text_key=TEXT_KEY.value,
            one_in=HELD_OUT.value,
            first=FIRST.value,
            train_bytes=TRAIN_BYTES.value,
            processes=PROCESSES.value,
            mine=mine,
            hosts=hosts,
        )

    return cli.exit_code(run)


def share(text: str) -> tuple[int, int]:
    """(I, N) of "I/N"."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
    if not match or not int(match[1]) < int(match[2]):
        raise ConfigError(f"--shards = {text!r}: must be I/N with 0 <= I < N, such as 0/4")
    return int(match[1]), int(match[2])


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
