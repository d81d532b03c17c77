"""Continues prompts with a trained model: python -m mod_jax.sample --workdir=runs/mod --prompt="def main("

Without --prompt or --prompt_file the prompt is read from stdin. Text goes to stdout as it is chosen, everything else to
stderr.
"""

import os
import pathlib
import sys

from absl import app, flags

from mod_jax import cli

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
STEP = flags.DEFINE_integer("step", None, "Step of the checkpoint; default: the newest.")
PROMPT = flags.DEFINE_multi_string(
    "prompt", [], "Text to continue, which is not printed again; may be repeated, then all go in one batch."
)
PROMPT_FILE = flags.DEFINE_multi_string("prompt_file", [], "File whose whole text is a prompt; may be repeated.")
MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", None, "Per prompt; default: up to the model's context.", 1)
TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "0: greedy, always the likeliest token.")
TOP_K = flags.DEFINE_integer("top_k", None, "Choose among the k likeliest tokens; default: all.")
TOP_P = flags.DEFINE_float("top_p", 1.0, "Choose among the likeliest tokens that together have this probability.")
SEED = flags.DEFINE_integer("seed", 0, "Of the random choices: the same prompt and seed give the same text.")
STOP = flags.DEFINE_multi_string(
    "stop", [], "Text that ends a completion; may be repeated. As typed: \\n is two letters, $'\\n' in bash a line end."
)
STOP_TOKEN = flags.DEFINE_multi_integer("stop_token", [], "Token id that ends a completion; may be repeated.")
TRUNCATE = flags.DEFINE_bool("truncate", False, "Keep the end of a prompt that is too long, in place of refusing it.")
SELECTION = flags.DEFINE_string(
    "selection",
    None,
    "router, predictor or threshold; default: the one that was calibrated best at the last evaluation.",
)
CONTEXT = flags.DEFINE_integer(
    "context", None, "Longest sequence, prompt and new tokens together; default: model.context of the run."
)
CAPACITY = flags.DEFINE_float(
    "capacity", None, "Compute budget in (0, 1]: shifts the cut-offs of selection `threshold`, on held-out text."
)
DRAFTS = flags.DEFINE_integer(
    "drafts", 0, "Draft so many tokens per step without the routed blocks, then verify them at once; 0: do not."
)
MESH = cli.define_mesh()
flags.adopt_module_key_flags(cli)  # so that --help shows them

MAX_PROMPT_BYTES = 2**24


def main(argv: list[str]) -> int:
    cli.refuse_arguments(argv)
    return cli.exit_code(run)


def run() -> None:
    from mod_jax import sampling  # after flag errors: importing JAX takes seconds

    options = dict(
        max_new_tokens=MAX_NEW_TOKENS.value,
        temperature=TEMPERATURE.value,
        top_k=TOP_K.value,
        top_p=TOP_P.value,
        seed=SEED.value,
        stop_strings=STOP.value,
        stop_tokens=STOP_TOKEN.value,
        truncate=TRUNCATE.value,
    )
    sampling.Options(**options)  # refuses bad values before anything is loaded
    prompts = read_prompts()
    sampler, notes = make_sampler()
    sampler.check(prompts, **options)
    for note in [sampler.describe(len(prompts)), *notes]:
        say(note)

    single = len(prompts) == 1
    completions = sampler.generate(prompts, on_text=show if single else None, **options)
    for prompt, completion in zip(prompts, completions, strict=True):
        if single:
            print(flush=True)
        else:
            print(f"=== {prompt.decode(errors='replace')!r}\n{completion.text}", flush=True)
        line = f"{len(completion.tokens)} tokens in {completion.steps} steps, ended by {completion.finish_reason}"
        if sampler.config.num_routed:
            line += f"; its tokens entered {completion.routed_fraction:.1%} of the routed blocks"
        say(line)


def make_sampler():
    """(the sampler of the run, under the budget asked for; what a person should know of it)."""
    from mod_jax import sampling
    from mod_jax.evaluation import budget, tables

    budget.check_selection(SELECTION.value, CAPACITY.value)  # before anything is loaded
    model = sampling.restore(WORKDIR.value, STEP.value, context=CONTEXT.value, mesh=cli.mesh_of(MESH))
    sampler = budget.budgeted_sampler(model, SELECTION.value, CAPACITY.value, num_drafts=DRAFTS.value)
    if CAPACITY.value is None:
        return sampler, tables.warnings(model.evaluation or {}, [sampler.selection])
    cutoffs = ", ".join(f"{cutoff:.4f}" for cutoff in sampler.cutoffs_L)
    return sampler, [f"cut-offs for capacity {CAPACITY.value:g}: {cutoffs}"]


def read_prompts() -> list[bytes]:
    """The prompts of the command line, then those of files; without any, all of stdin."""
    from mod_jax.errors import RequestError

    prompts = [os.fsencode(prompt) for prompt in PROMPT.value]
    for path in PROMPT_FILE.value:
        name = f"prompt_file = {path!r}"
        try:
            file = pathlib.Path(path).expanduser().open("rb")
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise RequestError(f"{name}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
        with file:
            prompts.append(read_prompt(file, name))
    if not prompts and sys.stdin is None:  # so Python starts where it was closed
        raise RequestError("stdin: no prompt can be read from it (it is closed); give --prompt or --prompt_file")
    return prompts or [read_prompt(sys.stdin.buffer, "stdin")]


def read_prompt(file, name: str) -> bytes:
    """Everything in an open file; refused where it is more than any prompt, or without end."""
    from mod_jax.errors import RequestError

    try:
        text = file.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise RequestError(f"{name}: cannot be read ({error.strerror})") from None
    if len(text) > MAX_PROMPT_BYTES:
        raise RequestError(f"{name}: more than {MAX_PROMPT_BYTES:,} bytes, which no context holds")
    return text


def show(_: int, text: str) -> None:
    print(text, end="", flush=True)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
