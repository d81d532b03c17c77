"""What the cells of an isoFLOP study gave: losses, optima, figures. Called by `isoflop.py collect`.

Everything that is written is a function of the cells' results alone, so cells that were killed and run again change no
byte of it. Where `isoflop.py time` has measured step times, the figures of cost show them too.
"""

import collections
import json
import math
import pathlib
from typing import Any

import cells
import numpy as np

from mod_jax import outputs
from mod_jax.analysis import isoflop, isoflop_plots, plots
from mod_jax.analysis.isoflop import Curve, Optimum, PowerLaw, Refused
from mod_jax.analysis.isoflop_plots import Panel, budget_name
from mod_jax.errors import DataError
from mod_jax.evaluation import tables

LOSSES = ("top-k", "causal")
SIZES = {"parameters": "parameters", "FLOPs per token": "forward_flops_per_token"}  # name: key of a cell
PLANNED = ("name", "variant", "budget", "width", "depth", "heads", "rate", "learning_rate", "seed", "parameters")
PLANNED += ("forward_flops_per_token", "steps", "tokens", "flops", "epochs")


def collect(out: pathlib.Path, plan: dict[str, dict[str, Any]], planned: list[cells.Cell]) -> list[str]:
    """Writes cells.json, fits.json, table.md and figures to `out`; returns the lines of table.md.

    Raises:
      DataError: cells of different corpora, whose losses are not comparable.
    """
    found = [cells.find(cell) for cell in planned]
    records = [record(plan[f.cell.name], f) for f in found]
    check_one_corpus(records)
    done = [r for r in records if r["state"] == "done"]
    study = [r for r in done if r["rate"] == 1]
    variants = list(dict.fromkeys(row["variant"] for row in plan.values()))
    panels = {size: [panel(study, loss, size) for loss in LOSSES] for size in SIZES}
    laws = {size: [power_laws(p, variants) for p in panels[size]] for size in SIZES}

    lines = [f"{len(done)} of {len(found)} cells are done."]
    lines += [f"- not done: {line}" for line in cells.not_done(found)]
    lines += ["", *cell_table(done), "", *optimum_table(panels), "", *law_table(laws), "", *rate_table(done)]
    lines += ["", *made_by(done, found)]
    outputs.write_json(out / "cells.json", records)
    outputs.write_json(out / "fits.json", {size: fits_as_json(panels[size], laws[size]) for size in SIZES})
    outputs.write_text(out / "table.md", "\n".join(lines) + "\n")
    draw(out, panels, laws, variants, study)
    return lines


def record(row: dict[str, Any], found: cells.Found) -> dict[str, Any]:
    """What is known of a cell: its plan, its state, and of a finished one each held-out loss with what it spent."""
    known = {name: row[name] for name in PLANNED} | {"state": found.state, "detail": found.detail}
    if found.state != "done":
        return known
    stored = found.result
    topk, causal = tables.held_out_losses(stored["evaluation"])[0], tables.causal_loss(stored["evaluation"])
    return known | {
        "top-k": one_loss(topk),
        "causal": one_loss(causal) | {"selection": causal.selection if causal.selection != "topk" else None},
        "corpus_digest": stored["corpus_digest"],
        "corpus": stored["corpus"],
        "commit": stored["commit"],
        "jax": stored["jax"],
        "python": stored["python"],
        "device": stored["device"],
    }


def one_loss(loss: tables.HeldOutLoss) -> dict[str, Any]:
    return {"loss": loss.loss, "bits_per_byte": loss.bits_per_byte, "routed": loss.routed, "flops": loss.flops}


def check_one_corpus(records: list[dict[str, Any]]) -> None:
    by_digest = collections.defaultdict(list)
    for r in records:
        if "corpus_digest" in r:
            by_digest[r["corpus_digest"]].append(r["name"])
    if len(by_digest) > 1:
        parts = [f"{digest[:12]}: {', '.join(names)}" for digest, names in by_digest.items()]
        raise DataError(f"cells of different corpora, whose losses are not comparable; {'; '.join(parts)}")


def panel(study: list[dict[str, Any]], loss: str, size: str) -> Panel:
    """The curves of one kind of loss and size, and their optima. FLOPs are those of training, for either loss."""
    groups = collections.defaultdict(list)
    for r in study:
        groups[r["budget"], r["variant"]].append(r)
    curves = {}
    for key, runs in groups.items():
        curves[key] = Curve(
            np.array([r[SIZES[size]] for r in runs], np.float64), np.array([r[loss]["loss"] for r in runs])
        )
    return Panel(loss, curves, isoflop.fit_curves(curves))


def power_laws(of: Panel, variants: list[str]) -> dict[tuple[str, str], PowerLaw | Refused]:
    laws = {}
    for variant in variants:
        found = {b: o for (b, v), o in of.optima.items() if v == variant and isinstance(o, Optimum)}
        for what in ("size", "loss"):
            laws[variant, what] = isoflop.fit_power_law(np.array(list(found)), list(found.values()), what)
    return laws


def cell_table(done: list[dict[str, Any]]) -> list[str]:
    titles = ("budget", "variant", "width x depth", "rate", "seed", "parameters", "FLOPs/token", "tokens")
    titles += ("top-k loss", "causal loss", "by", "routed", "top-k bits/byte", "causal")
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for r in done:
        topk, causal = r["top-k"], r["causal"]
        routed = "" if causal["routed"] is None else f"{causal['routed']:.1%}"
        entries = (budget_name(r["budget"]), r["variant"], f"{r['width']} x {r['depth']}", f"{r['rate']:g}", r["seed"])
        entries += (f"{r['parameters']:,}", f"{r['forward_flops_per_token']:.3g}", f"{r['tokens']:.3g}")
        entries += (f"{topk['loss']:.4f}", f"{causal['loss']:.4f}", causal["selection"] or "", routed)
        entries += (f"{topk['bits_per_byte']:.4f}", f"{causal['bits_per_byte']:.4f}")
        lines.append(f"| {' | '.join(map(str, entries))} |")
    return lines


def optimum_table(panels: dict[str, list[Panel]]) -> list[str]:
    """Per kind of size, budget and variant: the optimum by each loss, and how far it is from dense."""
    lines = [
        "| budget | variant | loss | by | optimum | loss there | residual | minus dense |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size, both in panels.items():
        for of in both:
            for (budget, variant), optimum in of.optima.items():
                start = f"| {budget_name(budget)} | {variant} | {of.name} | {size} |"
                if isinstance(optimum, Refused):
                    lines.append(f"{start} none: {optimum.reason} | | | |")
                    continue
                dense = of.optima.get((budget, "dense"))
                against = ""
                if variant != "dense" and isinstance(dense, Optimum):
                    difference, interval = isoflop.loss_difference(optimum, dense)
                    against = f"{difference:+.4f} {span(interval, '+.4f')}"
                lines.append(
                    f"{start} {optimum.size:.3g} {size_span(optimum)} | {optimum.loss:.4f} "
                    f"{span(optimum.loss_interval, '.4f')} | {optimum.residual:.4f} | {against} |"
                )
    return lines


def law_table(laws: dict[str, list[dict]]) -> list[str]:
    if not any(isinstance(law, PowerLaw) for both in laws.values() for of in both for law in of.values()):
        return ["No variant has optima at two budgets, so nothing can be said of how they grow."]
    lines = ["| variant | loss | value | exponent of the budget | residual of its log |", "|---|---|---|---|---|"]
    for size, both in laws.items():
        for loss, of in zip(LOSSES, both, strict=True):
            for (variant, what), law in of.items():
                name = size if what == "size" else f"loss at optimal {size}"
                if isinstance(law, Refused):
                    lines.append(f"| {variant} | {loss} | {name} | none: {law.reason} | |")
                    continue
                residual = "" if law.residual is None else f"{law.residual:.4f}"
                interval = span(law.exponent_interval, ".3f")
                lines.append(f"| {variant} | {loss} | {name} | {law.exponent:.3f} {interval} | {residual} |")
    return lines


def rate_table(done: list[dict[str, Any]]) -> list[str]:
    """Of sizes that were run with several learning rates: losses by the factor on the rule's."""
    groups = collections.defaultdict(dict)
    for r in done:
        groups[r["budget"], r["variant"], r["width"], r["seed"]][r["rate"]] = r
    groups = {key: by_rate for key, by_rate in groups.items() if len(by_rate) > 1}
    if not groups:
        return ["No size was run with several learning rates."]
    factors = sorted({rate for by_rate in groups.values() for rate in by_rate})
    lines = [
        "| budget | variant | width | seed | " + " | ".join(f"top-k, causal at {f:g} x rate" for f in factors) + " |",
        "|" + "---|" * (4 + len(factors)),
    ]
    for (budget, variant, width, seed), by_rate in groups.items():
        losses = [
            f"{by_rate[f]['top-k']['loss']:.4f}, {by_rate[f]['causal']['loss']:.4f}" if f in by_rate else ""
            for f in factors
        ]
        lines.append(f"| {budget_name(budget)} | {variant} | {width} | {seed} | {' | '.join(losses)} |")
    return lines


def made_by(done: list[dict[str, Any]], found: list[cells.Found]) -> list[str]:
    if not done:
        return ["No cell is done."]
    names = ("commit", "jax", "python", "device")
    several = [f"{name} {', '.join(sorted({r[name] for r in done}))}" for name in names]
    seeds = ", ".join(map(str, sorted({r["seed"] for r in done})))
    return [f"{done[0]['corpus']}; seeds {seeds}; {'; '.join(several)}. {len(found)} cells planned."]


def measured_seconds(out: pathlib.Path, study: list[dict[str, Any]]) -> dict[tuple[float, str], np.ndarray] | None:
    """Seconds per token of each run of each curve, NaN where not measured; None if nothing was."""
    path = out / "times.json"
    if not path.exists():
        return None
    known = json.loads(path.read_text(encoding="utf-8"))["seconds_per_token"]
    seconds = collections.defaultdict(list)
    for r in study:
        seconds[r["budget"], r["variant"]].append(known.get(f"{r['variant']}-w{r['width']}", math.nan))
    return {key: np.array(values) for key, values in seconds.items()}


def draw(out, panels, laws, variants, study) -> None:
    if not study:
        return
    digest = study[0]["corpus_digest"][:12]
    caption = f"corpus {digest}; commit {', '.join(sorted({r['commit'] for r in study}))}; {study[0]['device']}"

    def save(figure, name: str) -> None:
        plots.add_caption(figure, caption)
        plots.save(figure, out / f"{name}.png")

    for size, name in zip(SIZES, ("parameters", "flops"), strict=True):
        save(isoflop_plots.loss_against_size(panels[size], variants, size), f"loss_by_{name}")
        if any(isinstance(law, PowerLaw) for both in laws[size] for law in both.values()):
            save(isoflop_plots.optima_against_budget(panels[size], laws[size], variants, size), f"optima_by_{name}")
    by_flops = panels["FLOPs per token"]
    seconds = measured_seconds(out, study)
    for budget in dict.fromkeys(r["budget"] for r in study):
        if all(isinstance(of.optima.get((budget, "dense")), Optimum) for of in by_flops):
            figure = isoflop_plots.loss_against_cost(budget, by_flops, variants, seconds)
            save(figure, f"cost_{budget_name(budget)}")


def fits_as_json(both: list[Panel], laws: list[dict]) -> dict[str, Any]:
    """Every optimum and law, without the draws."""
    found = {}
    for of, of_laws in zip(both, laws, strict=True):
        optima = [
            {"budget": budget, "variant": variant}
            | ({"refused": o.reason} if isinstance(o, Refused) else optimum_as_json(o))
            for (budget, variant), o in of.optima.items()
        ]
        lines = [
            {"variant": variant, "of": what} | ({"refused": law.reason} if isinstance(law, Refused) else law._asdict())
            for (variant, what), law in of_laws.items()
        ]
        found[of.name] = {"optima": optima, "power_laws": lines}
    return found


def optimum_as_json(optimum: Optimum) -> dict[str, Any]:
    names = ("size", "size_interval", "loss", "loss_interval", "residual", "reach", "skew", "coefficients", "centre")
    return {name: getattr(optimum, name) for name in names}


def size_span(optimum: Optimum) -> str:
    """The interval of the size; a bound at the end of the sizes is open."""
    if optimum.size_interval is None:
        return ""
    low, high = optimum.size_interval
    smallest, largest = optimum.reach
    low_text = "below" if math.isclose(low, smallest) else f"{low:.3g}"
    high_text = "above" if math.isclose(high, largest) else f"{high:.3g}"
    return f"[{low_text}, {high_text}]"


def span(interval: tuple[float, float] | None, form: str) -> str:
    return "" if interval is None else f"[{interval[0]:{form}}, {interval[1]:{form}}]"
