"""What running the prompts would take on TPU chips that nobody here owns: the time until the first token.

`make_report` compiles `Programs.prefill` as `Sampler` would run it there; `describe` is the report for a person. As in
`decode`, memory is the compiler's own figure, FLOPs and traffic are read from the compiled program, and the time is an
estimate, never a measurement.

All prompts are of one length here. A routed block takes passes of C tokens of each row until no row has any left (see
`serving`). Vocabulary: B rows, T tokens of a prompt.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from mod_jax import sharding, tuning
from mod_jax.config import Config, MeshConfig
from mod_jax.data.cache import cache_root
from mod_jax.errors import ConfigError
from mod_jax.layout import is_routed
from mod_jax.models import flops
from mod_jax.models.moe import BLOCK, SERVED
from mod_jax.planning import program, roofline, serving, serving_report, topology
from mod_jax.planning.report import count, line, moved_by_chip, size
from mod_jax.planning.serving import Arguments, Serving, expected_passes
from mod_jax.sampling import cache as cache_lib
from mod_jax.sampling.generate import MIN_BUCKET, bucket


def make_report(
    config: Config,
    topology_name: str,
    batch_size: int,
    context: int | None = None,
    prompt: int | None = None,
    mesh: MeshConfig | Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Compiles the prefill of `config` for TPU chips; what it takes, as JSON-ready numbers of bytes and seconds.

    Args:
      batch_size: prompts that are run together.
      context, mesh: as for `serving.prepare`.
      prompt: tokens of each prompt; None: as many as the context. Rounded up as the sampler does.

    Raises:
      ConfigError: the slice does not exist, libtpu is missing, or this config cannot be sampled like this.
    """
    plan = serving.prepare(config, topology_name, batch_size, context, mesh)
    if prompt is not None and not 1 <= prompt <= plan.num_positions:
        raise ConfigError(f"--prompt={prompt}: must be in [1, {plan.num_positions}], the positions of a row")
    length = bucket(prompt or plan.num_positions, config.model.context)
    if prompt not in (None, length):
        plan.notes.append(f"--prompt={prompt} is rounded up to {length}, as the sampler does")
    # On one chip too over a mesh, which tells the program that it is for a TPU: there long prompts go by a kernel.
    traced, arguments = trace_prefill(config, plan.selection, plan.batch_size, length, plan.num_positions, plan.mesh)
    compiled = topology.compile_for(traced.lower(), plan.product, plan.mesh, cache_root(config.data) / "plans")

    kept = [cache_lib.routed_slots(length, block.capacity) if block.routed else length for block in config.blocks]
    passes = [
        expected_passes(length, block.capacity, C, plan.batch_size) if block.routed else 1.0
        for block, C in zip(config.blocks, kept, strict=True)
    ]
    vocab_size = config.model.vocab_size
    row = flops.forward_flops(config, vocab_size, length, causal_half=True, unembed=False).total
    slots = cache_lib.slot_counts(config, plan.num_positions)
    report = {
        **serving_report.begin(config, plan, arguments, compiled, slots),
        "program": "prefill",
        "prompt": length,
        "passes": passes,
        "tokens_per_pass": kept,
        "flops": {"model": plan.batch_size * (row + 2 * config.model.width * vocab_size)},  # logits of the last token
    }
    if not compiled.refused:
        _add_measures(report, config, plan, compiled)
    smaller = {"batch": (plan.batch_size // 2, 1), "prompt": (length // 2, MIN_BUCKET)}
    report["fits"] = serving_report.fits(report, compiled)
    report["verdict"] = serving_report.verdict(report, "prefill", smaller)
    return report


def trace_prefill(
    config: Config, selection: str, batch_size: int, length: int, num_positions: int, place: jax.Device | Mesh
) -> tuple[jax.stages.Traced, Arguments]:
    """`Programs.prefill` as `Sampler` compiles it for prompts of this length; and what it is given."""
    arguments = serving.make_arguments(config, selection, batch_size, place)
    programs = arguments.programs
    sizes = dict(num_positions=num_positions, slots=cache_lib.slot_counts(config, num_positions))
    shardings = programs.state_shardings(place), None
    prefill = jax.jit(programs.prefill, static_argnames=tuple(sizes), out_shardings=shardings)
    with sharding.within(place if isinstance(place, Mesh) else None):
        given = arguments.of_rows((batch_size, length), (batch_size,), (batch_size,))
        return prefill.trace(arguments.weights, arguments.request, *given, **sizes), arguments


def _add_measures(report: dict[str, Any], config: Config, plan: Serving, compiled: topology.Compiled) -> None:
    """Adds what only a compiled program can tell: memory, FLOPs, traffic, and the estimate made from them."""
    peak = tuning.peak_flops(plan.product.chip.kind)
    tokens = [plan.rows * C for C in report["tokens_per_pass"]]
    step = read_prefill(compiled.text, dict(plan.mesh.shape), report["passes"], config, tokens)
    report["memory"] |= {**compiled.memory, "needed": compiled.hbm_bytes}
    report["flops"] |= {"compiled": step.flops * plan.mesh.size}
    report["read"] = {"compiled": step.hbm_bytes}
    report["collectives"] = moved_by_chip(step)
    if step.kernels:
        report["notes"].append(f"{step.kernels:g} runs of kernels that are not known here count as no FLOPs")
    times = roofline.estimate(step, plan.product, peak, topology.coordinates(plan.mesh))
    report["estimate"] = {
        **serving_report.terms(times),
        "seconds_hidden": times.seconds_hidden,
        "seconds": times.seconds_exposed,
        "tokens_per_second": report["batch"] * report["prompt"] / times.seconds_exposed,
        "mfu": report["flops"]["model"] / (peak * plan.mesh.size * times.seconds_exposed),
    }


def read_prefill(
    text: str, mesh_shape: dict[str, int], passes: list[float], config: Config, tokens: list[int]
) -> program.Step:
    """The compiled program, routed blocks as often as `passes` says by depth. Experts are taken to be used alike.

    Args:
      tokens: of one pass on one chip, by depth.
    """
    e = config.experts

    def odds(source: str) -> float:
        if found := re.search(rf"/block(\d+)/(?:.*/)?{SERVED}/while(/body/.*while)?$", source):
            claims = tokens[int(found[1])] * (e.capacity if e.choice == "expert" else e.chosen) / e.count  # of one
            blocks = math.ceil(claims / BLOCK)
            return blocks if found[2] else e.count * (1 if claims * e.count > BLOCK else blocks)
        block = re.search(r"/block(\d+)/while$", source)
        return passes[int(block[1])] if block else 1.0

    return program.read_step(text, mesh_shape, odds=odds)


def describe(report: dict[str, Any]) -> str:
    """The report for a person, the verdict last."""
    prompts = count(report["batch"], "prompt")
    what = f"{prompts} of {report['prompt']:,} tokens, in caches for {report['context']:,}"
    return serving_report.describe(report, what, "prefill", _measures)


def _measures(report: dict[str, Any]) -> list[str]:
    flops = report["flops"]
    return [
        *([line("routed", _routed(report))] if any(map(is_routed, report["layout"])) else []),
        line(
            "flops",
            f"{flops['model']:.4g} by our count, of the pairs that the causal mask allows; {flops['compiled']:.4g} "
            "in the matrix products of the compiled program",
        ),
        line("read", f"{size(report['read']['compiled'])} to and from HBM, a chip, in the compiled program"),
        line("estimate", _estimate(report)),
    ]


def _routed(report: dict[str, Any]) -> str:
    by_depth = zip(report["layout"], report["passes"], report["tokens_per_pass"], strict=True)
    kinds = sorted({(passes, tokens) for kind, passes, tokens in by_depth if is_routed(kind)})
    expected = " or ".join(f"{passes:.3g} passes of {count(tokens, 'token')} a row" for passes, tokens in kinds)
    return f"{expected} and block, expected if each token enters by chance, with the block's capacity"


def _estimate(report: dict[str, Any]) -> str:
    e = report["estimate"]
    return (
        f"{1e3 * e['seconds']:.3g} ms to the first token of all rows, {e['tokens_per_second']:,.0f} tokens/s of "
        f"prompts; MFU {e['mfu']:.0%}. A roofline, optimistic, not a measurement, no TPU ran it: matrix unit "
        f"{1e3 * e['compute']:.3g} ms, HBM {1e3 * e['hbm']:.3g} ms{serving_report.links(report)}"
    )
