"""Every error of mod_jax that a person can do something about, each with the exit code of a command that it ends."""

EXIT_CODES = {
    0: "done; of training also preempted and saved, the last line says which",
    1: "anything else, with its traceback",
    2: "a config key, a flag or a request that cannot be used",
    3: "too many steps whose loss or gradient is not finite",
    4: "files that cannot be written or read",
    5: "data that cannot be used",
    6: "processes of one run that do not find each other, or lost one",
    7: "a checkpoint of another run, or of another model",
    130: "interrupted, and nothing was saved",
    141: "nobody reads the output",
}

# What a launcher should do after each code: the same command again, or not.
RESTARTS = {
    0: "no: it is done. A preempted run has this code too, unless `--preempted_exit_code` gives it another",
    1: "a few times: most often it comes again, but memory or a driver may not",
    2: "**never**: it would be refused again",
    3: "**never**: the loss would not be finite again",
    4: "a few times: a disk or a bucket may come back",
    5: "**never**: the data would still be unusable",
    6: "**always**, all processes together",
    7: "**never**: it would be refused again",
    130: "no: somebody stopped it",
    141: "no: training does not end with this code",
}
PREEMPTED = 42  # what `--preempted_exit_code` gives where 0 stands for finished; xpk restarts on it by itself


def restart_table() -> list[str]:
    """What to do after each exit code, as a Markdown table."""
    rows = [(str(code), what) for code, what in RESTARTS.items()]
    rows.insert(-2, (str(PREEMPTED), "**always**: with `--preempted_exit_code=42`, preempted and saved"))
    rows.insert(-2, ("128 and more", "**always**: a signal ended it, the lack of memory for example"))
    return ["| exit code | start it again? |", "|---|---|", *(f"| {code} | {what} |" for code, what in rows)]


def exit_code_table() -> list[str]:
    """The exit codes as a Markdown table."""
    return ["| exit code | |", "|---|---|", *(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())]


class ModJaxError(Exception):
    """The base of all errors below. A command prints its message as one line and exits with `exit_code`."""

    exit_code = 1


class ConfigError(ModJaxError, ValueError):
    """A config key, flag or argument holds a value that cannot be used. The message names it and what is allowed."""

    exit_code = 2


class RequestError(ConfigError):
    """What was asked of the sampler cannot be done. The message names the argument, its value and what is allowed."""


class NumericsError(ModJaxError, RuntimeError):
    """Too many consecutive steps had a loss, gradient or router score that is not finite."""

    exit_code = 3


class StorageError(ModJaxError, RuntimeError):
    """Checkpoints cannot be written, or none that would serve can be read. The message names directory and cause."""

    exit_code = 4


class DataError(ModJaxError, RuntimeError):
    """Data that cannot be used. The message names the source, the place in it, and what to do."""

    exit_code = 5


class DistributedError(ModJaxError, RuntimeError):
    """The processes of a run did not find each other, or do not agree on what to run."""

    exit_code = 6


class CheckpointMismatch(ModJaxError, ValueError):
    """A good checkpoint is of another model, or tokenizer, than the one at hand. The message names what differs."""

    exit_code = 7


class ResumeRefused(ModJaxError, ValueError):
    """The config or the corpus is not the one that wrote the checkpoint. The message lists every difference."""

    exit_code = 7


class OutOfMemory(ModJaxError, RuntimeError):
    """The host or a device has not the memory that was asked for."""


class Interrupted(ModJaxError, RuntimeError):
    """Ctrl-C, where there was nothing to save."""

    exit_code = 130


class OutputClosed(ModJaxError, BrokenPipeError):
    """Nobody reads stdout any more, as after `| head`. A command ends on it without a word; training goes on."""

    exit_code = 141  # what a shell says of a program that SIGPIPE ended


class CausalityError(ModJaxError, RuntimeError):
    """A selection that must be causal let a later token change an earlier logit."""


class PathMismatchError(ModJaxError, RuntimeError):
    """Two paths of one causal selection gave different log-likelihoods to the same text."""


class CacheOverflowError(ModJaxError, RuntimeError):
    """A routed block selected more tokens of a row than its cache has slots, and growing was ruled out."""
