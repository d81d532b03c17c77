"""stdin, stdout and stderr of a command as shells, pipes, services and old terminals hand them over.

A stream may be closed, may have lost its reader, may lie on a full disk, may know ASCII only. None of that is worth a
traceback, and none of it may end a training run.
"""

import atexit
import contextlib
import errno
import io
import os
import select
import sys
import warnings

from mod_jax.errors import OutputClosed, StorageError

_BROKEN = {errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO}  # nobody reads: a closed pipe, a terminal that is gone


class _Output(io.FileIO):
    """A file descriptor to write to. When that fails, it leads to nowhere from then on, for native code too."""

    ends_the_command = True

    def __init__(self, descriptor: int):
        super().__init__(descriptor, "w", closefd=False)

    def write(self, data) -> int:
        try:
            while (written := super().write(data)) is None:  # somebody made the descriptor non-blocking
                select.select([], [self], [])
            return written
        except OSError as error:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            if self.fileno() != 1:  # what cannot be said on stderr cannot be said
                return len(data)
            if self.ends_the_command:
                if error.errno in _BROKEN:
                    raise OutputClosed(errno.EPIPE, "nobody reads stdout any more") from None
                raise StorageError(f"stdout cannot be written ({error.strerror})") from None
            print(f"WARNING stdout cannot be written ({error.strerror}); the run goes on without", file=sys.stderr)
            return len(data)


def prepare() -> None:
    """Call first thing in a command. What somebody else has put in the place of a stream is left alone.

    Closed descriptors lead to nowhere, or the next file opened, a checkpoint for example, would get the number of
    stdout and what others write there. Text that a stream cannot encode is written with replacement.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if descriptor == 0 else os.O_WRONLY)  # takes the lowest free number
    for descriptor, name, errors in ((1, "stdout", "replace"), (2, "stderr", "backslashreplace")):
        old = getattr(sys, name)
        if old is not getattr(sys, f"__{name}__"):
            continue
        if old is not None:
            old.flush()
        new = io.TextIOWrapper(
            io.BufferedWriter(_Output(descriptor)),
            encoding=old.encoding if old is not None else "utf-8",
            errors=errors,
            line_buffering=descriptor == 2 or (old is not None and old.line_buffering),
            write_through=old is not None and old.write_through,
        )
        setattr(sys, name, new)
    atexit.register(_flush)


def outlive_stdout() -> None:
    """From now on a command goes on when nobody can read its stdout any more; it says so once, on stderr."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _Output):
        raw.ends_the_command = False


def keep_warnings_of_libraries() -> None:
    """Under PYTHONWARNINGS=error only warnings that this package causes are errors: others are not ours to mend."""
    if any(option.split(":")[0] in ("e", "er", "err", "erro", "error") for option in sys.warnoptions):
        warnings.simplefilter("default")
        warnings.filterwarnings("error", module=r"mod_jax\.")
        os.environ["PYTHONWARNINGS"] = "default"  # for processes that libraries start


def _flush() -> None:
    """The interpreter would give its own last words to a stream that broke."""
    with contextlib.suppress(OSError, StorageError, ValueError):
        sys.stdout.flush()
