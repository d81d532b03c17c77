"""What a process sets up in its system: the platform, threads and memory before JAX starts, signals, its parent."""

import ctypes
import glob
import importlib.util
import multiprocessing
import os
import pathlib
import re
import signal
import sys
import threading

# What ends a run by way of a save. SLURM sends SIGUSR1 before the time limit; SIGHUP is a terminal that closes.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

# Each says that there is a TPU, or that somebody wants JAX to look for one.
TPU_VARIABLES = ("TPU_NAME", "TPU_WORKER_ID", "TPU_LIBRARY_PATH", "TPU_ACCELERATOR_TYPE", "JAX_FORCE_TPU_INIT")
TPU_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")
PCI = pathlib.Path("/sys/bus/pci/devices")
GPU_FILES = ("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def prepare() -> None:
    """Call first thing, before anything touches a device."""
    spare_search_for_tpu()
    spare_threads()
    if computes_on_cpu():
        keep_freed_memory()


def follow_parent() -> None:
    """In a worker process: ends when its parent does, even by SIGKILL, and leaves to it the signals that stop a run.

    Such a signal often goes to all processes of a job; the parent still needs batches for the step in progress.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)

    def wait_for_the_end() -> None:
        multiprocessing.parent_process().join()
        os._exit(0)

    threading.Thread(target=wait_for_the_end, daemon=True).start()


def spare_search_for_tpu() -> None:
    """Chooses the CPU on a machine with neither TPU nor GPU, though libtpu is installed, for planning for example.

    There JAX starts libtpu, which writes pages about a TPU that it does not find, before it falls back to the CPU.
    A choice that was made already is kept.
    """
    if os.environ.get("JAX_PLATFORMS") or not importlib.util.find_spec("libtpu"):
        return
    if not has_tpu() and not any(map(glob.glob, GPU_FILES)):
        os.environ["JAX_PLATFORMS"] = "cpu"
        if jax := sys.modules.get("jax"):  # it has read the variable
            jax.config.update("jax_platforms", "cpu")


def has_tpu() -> bool:
    """Whether this machine may have a TPU: in doubt, yes."""
    if any(map(os.environ.get, TPU_VARIABLES)) or any(map(glob.glob, TPU_FILES)):
        return True
    for device in PCI.glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == "0x1ae0" and kind[:4] not in ("0x01", "0x02"):  # Google also makes virtual disks and networks
            return True
    return False


def computes_on_cpu() -> bool:
    """Whether JAX will choose the CPU, told without starting it: asked to, or no other platform is installed."""
    asked = os.environ.get("JAX_PLATFORMS", "")
    return asked == "cpu" or not (asked or any(map(importlib.util.find_spec, ("libtpu", "jax_plugins"))))


def load_no_programs() -> None:
    """From now on this process compiles its programs itself, whatever JAX_COMPILATION_CACHE_DIR holds."""
    import jax  # not before `prepare`
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it asks the setting only once


def spare_threads() -> None:
    """Gives XLA two threads for each virtual device of a CPU.

    XLA runs those devices, and launches their next program, on one pool of max(cores, devices) threads. On a machine
    with fewer cores than devices a collective can then wait for a device that finds no thread. PJRT_NPROC is the
    number of threads; a value that is set already is kept.
    """
    counts = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if counts and int(counts[-1]) > 1:
        os.environ.setdefault("PJRT_NPROC", str(max(2 * int(counts[-1]), os.cpu_count() or 1)))


def keep_freed_memory() -> bool:
    """Makes glibc's malloc keep what is freed; False where there is no glibc.

    XLA frees a program's memory after every call. By default malloc hands such large blocks back to the kernel, which
    maps and clears them page by page at the next call: 150 000 page faults and 15-20 % of a training step (measured,
    width 256, 12 blocks, two cores). One arena, because only the main one can hold blocks of any size.
    """
    M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    return all([mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, -1), mallopt(M_ARENA_MAX, 1)])
