"""Several processes in one run: how each ends when another is missing, dies, hangs, fails or is another program.

JAX's coordination service notices a lost process. Its client then aborts this process from a native thread: no Python
exception, pages on stderr, SIGABRT. So stderr goes through a second process, the *reader*, which says the cause in one
line instead; whatever else is written passes unchanged.
"""

import codecs
import contextlib
import ctypes
import hashlib
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import time

PATIENCE = 3.0  # seconds without a fatal word, after which lines held back are shown
LONGEST_WAIT = 7 * 24 * 3600.0  # seconds
GOODBYE = 10.0  # seconds that a process which failed waits for the others to fail alike
NATIVE = re.compile(r"^[WEF]\d{4} .*\b(coordination_service|preemption_sync_manager|client\.h)", re.MULTILINE)
FATAL = "the JAX distributed service detected fatal errors"
LOST = re.compile("gloo|nccl|connection|coordination|barrier|UNAVAILABLE|DEADLINE_EXCEEDED", re.IGNORECASE)
RESUME = "the same command on all processes resumes from the newest checkpoint"


def start_reader() -> None:
    """Sends stderr through a reader, and turns an abort into exit code 6."""
    # Isolated, since it needs no package; in a session of its own, since signals to the group must not end it.
    command = [sys.executable, "-I", __file__]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    os.dup2(reader.stdin.fileno(), 2)
    reader.stdin.close()

    # SIGABRT is number 6 and a handler gets its number, so libc's _exit, as the handler, exits with 6. It needs neither
    # the interpreter nor the heap, which a process that aborts may not have.
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(signal.SIGABRT, ctypes.cast(libc._exit, ctypes.c_void_p))


def check_same_program(seconds: float) -> None:
    """Compares what each process of this run is, before any of them touches a device.

    Raises:
      RuntimeError: they differ, or one did not answer.
    """
    import jax

    state = _coordination()
    if state is None:
        print(
            "WARNING: this version of JAX hides what is needed to compare the processes; each must run the same code",
            file=sys.stderr,
        )
        return
    mine = f"{state.num_processes} processes, jax {jax.__version__}, code {code_digest()}"
    state.client.key_value_set(f"mod_jax/program/{state.process_id}", mine)
    for i in range(state.num_processes):
        other = state.client.blocking_key_value_get(f"mod_jax/program/{i}", int(1000 * seconds))
        if other != mine:
            raise RuntimeError(f"process {i} has {other}, process {state.process_id} has {mine}")


def wait_for_others(what: str) -> None:
    """Waits, however long it takes, until every process of this run has done `what`; each name serves once.

    Collectives between CPUs give up when a process comes to the first one 30 s late, which preparing and compiling can
    make it. A process that has died ends the wait, by the heartbeat.
    """
    state = _coordination() if _is_one_of_several() else None
    if state is not None:
        state.client.wait_at_barrier(f"mod_jax/{what}", int(1000 * LONGEST_WAIT))


def code_digest() -> str:
    """Of every source file of this package."""
    here, digest = pathlib.Path(__file__).parent, hashlib.sha256()
    for path in sorted(here.rglob("*.py")):
        digest.update(path.relative_to(here).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def explanation(error: Exception) -> str | None:
    """What to say of an error of JAX that another process caused; None of any other error.

    On CPU a collective may notice before the coordination service does.
    """
    if not _is_one_of_several() or not isinstance(error, sys.modules["jax"].errors.JaxRuntimeError):
        return None
    text = " ".join(str(error).split())
    return f"another process failed, died or cannot be reached ({text}); {RESUME}" if LOST.search(text) else None


def leave(code: int) -> None:
    """Ends a process of several that failed. Returns if there is only one.

    JAX's own shutdown would wait minutes for processes that wait for this one. If all fail alike, each gets to say so.
    """
    if not _is_one_of_several():
        return
    state = _coordination()
    if state is not None:
        with contextlib.suppress(RuntimeError):  # the others are well, or gone
            state.client.wait_at_barrier("mod_jax/failed", int(1000 * GOODBYE))
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it is where the process was started with it closed
            stream.flush()
    time.sleep(
        0.2 if state is not None and state.process_id else 1
    )  # for the reader; and the end of process 0 ends the others
    os._exit(code)


def _is_one_of_several() -> bool:
    """Whether this process has joined others. Imports nothing: without JAX it has not."""
    return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()


def _coordination():
    """JAX's coordination client and what belongs to it; None where a version of JAX has it elsewhere.

    It is private to JAX. Nothing public reaches the other processes without their devices.
    """
    try:
        from jax._src.distributed import global_state
    except ImportError:
        return None
    return global_state if getattr(global_state, "client", None) is not None else None


def main() -> None:
    """The reader: copies stdin to stderr, but for the last words of the coordination client."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # host.STOP_SIGNALS
        signal.signal(number, signal.SIG_IGN)
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")  # what is no UTF-8 comes out as it went in
    held, ended, failed, deadline = "", False, False, None
    while not ended:
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([0], [], [], patience)
        read = os.read(0, 1 << 16) if ready else b""
        ended = bool(ready) and not read
        held += decoder.decode(read, final=ended)
        found = None if ended or not ready else NATIVE.search(held)
        shown, held = (held[: found.start()], held[found.start() :]) if found else (held, "")
        deadline = (deadline or time.monotonic() + PATIENCE) if held else None
        write(shown)
        failed = failed or bool(re.search("^error: ", shown, re.MULTILINE))  # it has named its own cause
        if FATAL in held and held.endswith("\n"):
            write("" if failed else f"error: {cause(held)}\n")
            while os.read(0, 1 << 16):  # stack traces
                pass
            return


def write(text: str) -> None:
    data = text.encode(errors="surrogateescape")
    while data:
        data = data[os.write(2, data) :]


def cause(words: str) -> str:
    """The last words of the coordination client in one line."""
    lost = f"failed, died, hangs or cannot be reached (see its own output); {RESUME}"
    if match := re.search(r"stopped sending heartbeats\):\n((?:\d+\n)+)", words):
        return f"process {', '.join(match[1].split())} {lost}"
    if match := re.search(r"(\d+) unexpectedly tried to connect", words):
        return f"process_id {match[1]} was given twice, or started again while the others still ran"
    status = words.split(FATAL)[1].split("absl::Status: ")[-1].split("*** Check")[0]
    if "RegisterTask" in status:
        return (
            "not all processes came before --initialization_timeout ran out; was each started, with the same "
            "coordinator_address and num_processes, and its own process_id?"
        )
    if "Heartbeat" in status or "leader task" in status:
        return f"process 0, which coordinates the others, {lost}"
    return f"the processes lost each other: {' '.join(status.split())}; {RESUME}"


if __name__ == "__main__":
    main()
