"""What the command lines share: `--config=file.py:arg --config.key=value`, one-line errors, and exit codes."""

import errno
import re
import sys
import traceback
from collections.abc import Callable

import ml_collections
from absl import flags, logging
from ml_collections import config_flags

from mod_jax import config as config_lib
from mod_jax import distributed, host, streams
from mod_jax.config import Config
from mod_jax.errors import (
    EXIT_CODES,
    ConfigError,
    DistributedError,
    Interrupted,
    ModJaxError,
    OutOfMemory,
    OutputClosed,
    StorageError,
)

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


def define_config() -> flags.FlagHolder:
    """Defines --config, with every key overridable as --config.section.key=value."""
    holder = config_flags.DEFINE_config_file(
        "config",
        None,
        "Config file, with an optional argument: configs/X.py:arg. Its keys are flags: --config.train.steps=100.",
    )
    flags.declare_key_flag("config")
    return holder


def parse_flags(argv: list[str]) -> list[str]:
    """For `app.run(flags_parser=...)`: whatever is wrong with the flags is one line and exit code 2, no traceback.

    The first thing that a command does, so the process is prepared here.
    """
    streams.prepare()
    streams.keep_warnings_of_libraries()
    host.prepare()
    if asked := {"--help", "-help", "-h", "--helpshort", "--helpfull", "-helpfull"} & set(argv[1:]):
        print_help(full=any("full" in flag for flag in asked))
        sys.exit(0)
    try:
        return flags.FLAGS(argv)
    except Exception as error:  # a config file may raise anything
        print(f"error: {_flag_error(argv, error)}", file=sys.stderr)
        sys.exit(ConfigError.exit_code)


def print_help(full: bool = False) -> None:
    """What the command does, its flags (`full`: those of libraries too), and its exit codes, on stdout."""
    print(sys.modules["__main__"].__doc__)
    print(flags.FLAGS.get_help() if full else flags.FLAGS.main_module_help())
    print("\nexit codes:", *(f"  {code}  {meaning}" for code, meaning in EXIT_CODES.items()), sep="\n")


def refuse_arguments(argv: list[str]) -> None:
    """Refuses what is not a flag: most often a space inside --config.a.b = value."""
    if len(argv) > 1:
        print(f"error: unexpected argument {argv[1]!r}; flags are written --name=value", file=sys.stderr)
        sys.exit(ConfigError.exit_code)


def read_config(value: ml_collections.ConfigDict | None) -> Config:
    """Validates what --config gave."""
    if value is None:
        raise ConfigError("--config is missing; for example --config=configs/smoke.py")
    try:
        return config_lib.from_config_dict(value)
    except OSError as error:  # how ml_collections tells, on first use, of a file that it could not open
        raise ConfigError(_no_config_file(str(error), sys.argv)) from error


def define_distributed() -> dict[str, flags.FlagHolder]:
    """Defines the flags of a run with several processes."""
    return {
        "enabled": flags.DEFINE_bool("distributed", False, "Several processes; TPU pods and SLURM need no other flag."),
        "coordinator_address": flags.DEFINE_string("coordinator_address", None, "host:port of process 0."),
        "num_processes": flags.DEFINE_integer("num_processes", None, "Number of processes."),
        "process_id": flags.DEFINE_integer("process_id", None, "Which of them this is, from 0."),
        "initialization_timeout": flags.DEFINE_integer(
            "initialization_timeout", 300, "Seconds to wait at the start until all processes are there.", 1
        ),
        "heartbeat_timeout_seconds": flags.DEFINE_integer(
            "heartbeat_timeout", 100, "Seconds without a sign of life after which a process is taken for dead.", 10
        ),
    }


def define_mesh() -> dict[str, flags.FlagHolder]:
    """Defines the flags that lay a trained model out over several devices."""
    what = {
        "data": "rows of a batch, each with all weights",
        "fsdp": "rows of a batch, each with its part of the weights",
        "tensor": "heads, MLPs and vocabulary",
        "expert": "rows of a batch, each with its part of the experts",
    }
    ending = "; -1: all that are left."
    return {
        axis: flags.DEFINE_integer(f"mesh.{axis}", 1, f"Devices to split the model over: {text}{ending}", -1)
        for axis, text in what.items()
    }


def mesh_of(holders: dict[str, flags.FlagHolder]) -> dict[str, int]:
    """The mesh that those flags ask for, as `restore` takes it."""
    return {axis: holder.value for axis, holder in holders.items()}


def start_distributed(holders: dict[str, flags.FlagHolder]) -> None:
    """Connects the processes, if asked to. Call before JAX is imported."""
    values = {name: holder.value for name, holder in holders.items() if holder.value is not None}
    if not values.pop("enabled"):
        for name, holder in holders.items():
            if holder.present and name != "enabled":
                raise ConfigError(f"--{holder.name} needs --distributed")
        return
    distributed.start_reader()
    import jax

    try:
        jax.distributed.initialize(**values)
        distributed.check_same_program(values["initialization_timeout"])
    except (RuntimeError, ValueError) as error:
        raise DistributedError(f"the processes could not connect: {' '.join(str(error).split())}") from error


def exit_code(run: Callable[[], int | None]) -> int:
    """Runs a command and returns its exit code. A known failure prints one line; an unknown one its traceback.

    A command that ends well may return a code of its own.
    """
    logging.set_verbosity(logging.WARNING)  # Orbax narrates at INFO
    try:
        code = run() or 0
        if sys.stdout is not None:
            sys.stdout.flush()  # here a broken stream still counts
        return code
    except (Exception, KeyboardInterrupt) as raised:
        error = _as_known(raised)
        code = error.exit_code if isinstance(error, ModJaxError) else 1
        if not isinstance(error, ModJaxError):
            traceback.print_exc()
        if not isinstance(error, OutputClosed):
            print(f"error: {error}", file=sys.stderr, flush=True)
        distributed.leave(code)
        return code


def _as_known(error: BaseException) -> BaseException:
    """The error of this project that says the same to a person, where there is one."""
    text = " ".join(str(error).split())
    if isinstance(error, ModJaxError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("interrupted")
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        return OutOfMemory(f"out of memory ({text or 'of the host'}); smaller batches or a smaller model need less")
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        where = f"{error.filename}: " if error.filename else ""
        return StorageError(f"{where}{error.strerror}")
    if lost := distributed.explanation(error):
        return DistributedError(lost)
    return error


def _flag_error(argv: list[str], error: Exception) -> str:
    """The error in one line; for an unknown config key, in the words of the config itself."""
    for argument in argv[1:]:
        name = argument.lstrip("-").removeprefix("no").split("=")[0]
        if name.startswith("config.") and name.removeprefix("config.") not in config_lib.FIELDS:
            return config_lib.unknown_key(name.removeprefix("config."))
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error).strip()
    if missing := re.search(r"Flag --(\w+) must have a value other than None", text):
        return f"--{missing[1]} is missing; for example --{missing[1]}=runs/mod"
    if "[Errno" in text and "config file" in text:
        return _no_config_file(text, argv)
    text = re.sub(r"\('([^']*)', ('[^']*')\)$", r"\1 \2", text)  # two arguments of an exception, shown as a tuple
    # What a config file raised comes with its place; ml_collections turns some of it into the text of a traceback.
    trace = text + "".join(traceback.format_tb(error.__traceback__))
    files = {
        argument.partition("=")[2].split(":")[0] for argument in argv if argument.lstrip("-").startswith("config=")
    }
    places = [place for place in re.findall(r'File "([^"]+)", line (\d+)', trace) if place[0] in files]
    if "Traceback (most recent call last)" in text:
        text = text.splitlines()[-1]
    text = " ".join(text.split()) or type(error).__name__
    return f"{text} ({places[-1][0]}, line {places[-1][1]})" if places else text


def _no_config_file(text: str, argv: list[str]) -> str:
    """What to say of a config file that cannot be opened: the system's words and, for a path with a colon, why."""
    given = [argument.partition("=")[2] for argument in argv if argument.lstrip("-").startswith("config=")]
    message = f"--config: {text[text.rfind('[Errno') :].splitlines()[0].strip()}"
    path, colon, rest = given[-1].partition(":") if given else ("", "", "")
    if colon:
        message += f"; of {given[-1]!r}, what follows the colon, {rest!r}, is an argument, and {path!r} the file"
    return message
