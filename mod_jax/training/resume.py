"""What may change when a run goes on, and what the change does.

A run is resumed by the same command. `--extend` allows another length. `config.CHANGES` says for every key what it
takes to change it.
"""

from typing import Any

from mod_jax import config as config_lib
from mod_jax.config import Config
from mod_jax.errors import ConfigError, ResumeRefused
from mod_jax.training.optimizer import make_schedule


def saved_config(metadata: dict[str, Any]) -> Config:
    """The config in a checkpoint's metadata.

    Raises:
      ResumeRefused: this version cannot read it.
    """
    try:
        return config_lib.from_flat_dict(metadata["config"])
    except ConfigError as error:
        raise ResumeRefused(f"the checkpoint was written by mod_jax {metadata['mod_jax']}: {error}") from error


def check_same_run(saved: dict[str, Any], config: Config, digest: str, num_steps: int, extend: bool) -> list[str]:
    """Refuses to continue a checkpoint under a config or corpus that would make it another run.

    Args:
      saved: the metadata of the checkpoint.
      config: the config at hand.
      digest: of the corpus at hand.
      num_steps: length of the run at hand.
      extend: whether the length may change.

    Returns:
      A line for each key that is spelled otherwise and means the same.

    Raises:
      ResumeRefused: with one line per difference, `key: old -> new`.
    """
    changed = config_lib.difference(saved_config(saved), config)
    by_change = {change: {} for change in config_lib.CHANGES}
    for name, pair in changed.items():
        by_change[config_lib.FIELDS[name].metadata["change"]][name] = pair
    corpus, length = by_change["corpus"], by_change["length"]
    same_corpus, same_length = saved["corpus_digest"] == digest, saved["num_steps"] == num_steps

    refused = _lines(by_change["never"] | by_change["weights"])
    if not same_corpus:
        refused += _lines(corpus | {"corpus digest": (saved["corpus_digest"], digest)})
    if not same_length and not extend:
        refused += [f"{line}  (allowed with --extend)" for line in _lines(length)]
    if refused:
        lines = "\n".join(f"  {line}" for line in refused)
        raise ResumeRefused(
            f"the checkpoint was written by another run (checkpoint -> now):\n{lines}\n"
            "  another --workdir starts a new run, with --init_from from these weights if they fit"
        )
    same = [f"{line}: the same text, corpus digest {digest[:12]}" for line in _lines(corpus)]
    return same + [f"{line}: the same {num_steps} steps" for line in _lines(length if same_length else {})]


def check_same_tokenizer(saved: dict[str, Any], digest: str) -> None:
    """Refuses another tokenizer, though it gave this corpus the same tokens: older checkpoints could not be decoded.

    Raises:
      ResumeRefused: with both digests.
    """
    old = saved.get("tokenizer_digest", digest)  # earlier versions did not note it
    if old != digest:
        raise ResumeRefused(f"the checkpoint was trained with another tokenizer: digest {old[:12]} -> {digest[:12]}")


def check_length(saved: dict[str, Any], step: int, num_steps: int) -> None:
    """Refuses a length that the run has already passed.

    Raises:
      ResumeRefused: naming the step that it has reached.
    """
    if step > num_steps:
        raise ResumeRefused(
            f"the run has done {step} of {saved['num_steps']} steps, and is now asked for {num_steps}: "
            f"--extend takes a length of at least {step} steps"
        )


def describe_extension(saved: dict[str, Any], config: Config, step: int, num_steps: int) -> str | None:
    """One line on what another length does to the learning rate; None if the length is the same."""
    old_steps = saved["num_steps"]
    if old_steps == num_steps or step == num_steps:
        return None
    old, new = (make_schedule(config.optimizer, length) for length in (old_steps, num_steps))
    return (
        f"EXTENDED from {old_steps} to {num_steps} steps: the learning rate was {old(step - 1):.2e} at step {step}, is "
        f"{new(step):.2e} at step {step + 1} and {new(num_steps - 1):.2e} at step {num_steps}"
    )


def _lines(changed: dict[str, tuple[Any, Any]]) -> list[str]:
    return [f"{name}: {old!r} -> {new!r}" for name, (old, new) in changed.items()]
