"""What several runs have in common and where they differ: config, cost, losses. Read from workdirs; no data, no device.

Vocabulary. A run is *finished* where result.json stands; of every other the newest rows count. The *held-out set* is
what losses are taken on: the corpus, the row length and the number of windows. Only losses on one held-out set are
comparable.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from mod_jax import config as config_lib
from mod_jax import paths
from mod_jax.analysis.plots import MARKERS, PALETTE, add_title, smooth, styled
from mod_jax.config import Config
from mod_jax.errors import ConfigError, DataError, ModJaxError
from mod_jax.evaluation import tables
from mod_jax.models.model import make_model
from mod_jax.training import result
from mod_jax.training.rows import read_metrics

AXES = {"flops": "training FLOPs", "tokens": "training tokens", "seconds": "seconds in training steps"}
LINES = ("-", "--", ":", "-.")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as its workdir shows it.

    Attributes:
      step, num_steps: reached, and wanted.
      rows: of metrics.jsonl, in order.
      evaluation: the newest held-out row, {} if there is none yet.
    """

    name: str
    config: Config
    finished: bool
    step: int
    num_steps: int
    parameters: int
    digest: str
    commit: str
    rows: list[dict[str, Any]]
    evaluation: dict[str, Any]

    @property
    def held_out_set(self) -> tuple[str, int, int]:
        return self.digest, self.config.data.seq_len, self.config.data.eval_windows

    def last(self, name: str) -> float | None:
        """The newest value of a metric."""
        return next((row[name] for row in reversed(self.rows) if name in row), None)

    def curve(self, axis: str) -> np.ndarray:
        """[4, n]: cost by AXES, training loss, and held-out top-k and causal loss; NaN where a row has none."""
        cost, points, before = 0.0, [], 0
        for row in self.rows:
            if axis != "seconds":
                cost = row.get(f"train/{axis}", cost)
            elif "train/loss" in row:
                cost += (row["step"] - before) * row.get("perf/step_seconds", 0.0)
                before = row["step"]
            causal = tables.causal_loss(row) if "eval/topk_loss" in row else None
            losses = row.get("train/loss", np.nan), row.get("eval/topk_loss", np.nan)
            points.append((cost, *losses, np.nan if causal is None else causal.loss))
        return np.array(points, np.float64).reshape(-1, 4).T

    def summary(self) -> dict[str, Any]:
        """All that the table says, and the whole config."""
        losses = {}
        if self.evaluation:
            for kind, loss in (
                ("topk", tables.held_out_losses(self.evaluation)[0]),
                ("causal", tables.causal_loss(self.evaluation)),
            ):
                losses[kind] = None if loss is None else loss._asdict()
        return {
            "name": self.name,
            "finished": self.finished,
            "step": self.step,
            "num_steps": self.num_steps,
            "parameters": self.parameters,
            "flops": self.last("train/flops"),
            "tokens": self.last("train/tokens"),
            "tokens_per_second": self.last("perf/tokens_per_second"),
            "evaluated_at": self.evaluation.get("step"),
            "losses": losses,
            "corpus_digest": self.digest,
            "commit": self.commit,
            "config": config_lib.to_flat_dict(self.config),
        }


def read_runs(workdirs: Sequence[str | os.PathLike]) -> tuple[list[Run], list[str]]:
    """The runs that can be read, each once, and a line for each folder that is none.

    Raises:
      DataError: if there is not one.
    """
    folders, unreadable, runs = {}, [], []
    for given in workdirs:
        try:
            folders.setdefault(paths.folder_to_read("RUN", given), os.fspath(given))
        except ModJaxError as error:
            unreadable.append(f"not shown: {error}")
    names = [folder.name for folder in folders]
    for folder, given in folders.items():
        name = folder.name if names.count(folder.name) == 1 else given.rstrip("/")
        try:
            runs.append(read_run(folder, name))
        except ModJaxError as error:
            unreadable.append(f"not shown: {given}: {error}")
    if not runs:
        raise DataError("; ".join(unreadable))
    return runs, unreadable


def read_run(workdir: paths.Folder, name: str) -> Run:
    """Reads one run.

    Raises:
      DataError, ConfigError, StorageError: saying in one line why it is none.
    """
    if not workdir.is_dir():
        raise DataError("is not a folder" if workdir.exists() else "does not exist")
    try:
        about = json.loads((workdir / "config.json").read_text(encoding="utf-8"))
        config = config_lib.from_flat_dict(about["config"])
        facts = {key: about[key] for key in ("vocab_size", "num_steps", "corpus_digest", "commit")}
    except FileNotFoundError:
        raise DataError("has no config.json, so no run was started there") from None
    except ConfigError as error:
        raise DataError(f"config.json is of another version: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"config.json cannot be read ({type(error).__name__}: {error})") from None
    metrics = workdir / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.exists() else []
    shapes = make_model(config, facts["vocab_size"]).plain.abstract_params
    return Run(
        name=name,
        config=config,
        finished=result.read(workdir) is not None,
        step=max((row["step"] for row in rows), default=0),
        num_steps=facts["num_steps"],
        parameters=sum(leaf.size for leaf in jax.tree.leaves(shapes)),
        digest=facts["corpus_digest"],
        commit=facts["commit"],
        rows=rows,
        evaluation=next((row for row in reversed(rows) if "eval/topk_loss" in row), {}),
    )


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """Keys that differ between the runs and affect what is learned; not those that follow from another key."""
    first = runs[0].config
    differ = {name for run in runs[1:] for name in config_lib.difference(first, run.config)}
    set_somewhere = {name for run in runs for name in config_lib.changed_from_default(run.config)}
    shown = differ & set_somewhere
    return [name for name in config_lib.FIELDS if name in shown and not config_lib.may_change(name, "free")]


def table(runs: Sequence[Run], markdown: bool = False) -> list[str]:
    """One line per run: where configs differ, what it cost, its losses; then what the losses cannot be compared for."""
    keys = differing_keys(runs)
    groups = list(dict.fromkeys(run.held_out_set for run in runs))
    titles = ["run", "step", *keys, "parameters", "FLOPs", "tokens", "top-k loss", "causal loss", "by"]
    titles += ["bits/byte", "causal", "tokens/s"] + (["held-out set"] if len(groups) > 1 else [])
    lines = [titles]
    for run in runs:
        flat = config_lib.to_flat_dict(run.config)
        step = f"{run.step}" if run.finished else f"{run.step} of {run.num_steps}"
        cells = [run.name, step, *(_value(flat[key]) for key in keys), f"{run.parameters:,}"]
        cells += [_form(run.last(f"train/{name}"), ".3g") for name in ("flops", "tokens")]
        topk = tables.held_out_losses(run.evaluation)[0] if run.evaluation else None
        causal = tables.causal_loss(run.evaluation) if run.evaluation else None
        earlier = f" at {run.evaluation['step']}" if run.evaluation and run.evaluation["step"] != run.step else ""
        cells += [_form(topk and topk.loss, ".4f") + earlier, _form(causal and causal.loss, ".4f")]
        cells += ["" if causal is None or causal.selection == "topk" else causal.selection]
        cells += [_form(loss and loss.bits_per_byte, ".4f") for loss in (topk, causal)]
        cells += [_form(run.last("perf/tokens_per_second"), ",.0f")]
        if len(groups) > 1:
            cells.append(_letter(groups.index(run.held_out_set)))
        lines.append(cells)
    return [*(_markdown(lines) if markdown else _aligned(lines)), *_warnings(runs, groups)]


def _warnings(runs: Sequence[Run], groups: list[tuple[str, int, int]]) -> list[str]:
    if len(groups) == 1:
        return [f"all on corpus {groups[0][0][:12]}, {groups[0][2]} held-out windows of {groups[0][1]} tokens"]
    sets = [
        f"{_letter(i)}: corpus {digest[:12]}, {windows} windows of {length} tokens"
        for i, (digest, length, windows) in enumerate(groups)
    ]
    return [f"WARNING losses on different held-out sets are not comparable: {'; '.join(sets)}"]


@styled
def draw(runs: Sequence[Run], axis: str = "flops") -> Figure:
    """Loss against cost: training loss as a smoothed line, held-out loss as markers, filled for top-k, else hollow."""
    fig = Figure(figsize=(8.4, 4.6))
    ax = fig.subplots()
    several = len({run.held_out_set for run in runs}) > 1
    settled, last = [], 0.0
    for i, run in enumerate(runs):
        cost, training, topk, causal = run.curve(axis)
        look = dict(color=PALETTE[i % len(PALETTE)])
        line = dict(linestyle=LINES[i // len(PALETTE) % len(LINES)], marker=MARKERS[i % len(MARKERS)])
        name = run.name + (f" (corpus {run.digest[:6]})" if several else "")
        ax.plot([], [], **look, **line, label=name + ("" if np.isfinite(topk).any() else ": no evaluation yet"))
        known = np.isfinite(training) & (cost > 0)
        smoothed = smooth(training[known])
        ax.plot(cost[known], smoothed, **look | line | dict(marker="none"), linewidth=0.8)
        ax.plot(cost, causal, **look | line | dict(linestyle="none"), markerfacecolor="white", markersize=7)
        ax.plot(cost, topk, **look | line | dict(linestyle="none"))
        late = cost[known] >= cost.max(initial=0.0) / 10
        settled += [smoothed[late], topk[np.isfinite(topk)], causal[np.isfinite(causal)]]
        last = max(last, cost.max(initial=0.0))
    ax.set(xlabel=AXES[axis], ylabel="loss, nats per token")
    if last:
        ax.set(xscale="log", xlim=(last / 50, last * 1.2))
    if len(values := np.concatenate(settled)):  # the first moments of a run would flatten all that follows
        pad = 0.05 * (values.max() - values.min()) or 0.05
        ax.set_ylim(values.min() - pad, values.max() + pad)
    fig.legend(loc="outside right center", fontsize=8)
    title = "Training loss (lines), held-out loss: top-k (filled), causal (hollow)"
    add_title(fig, title + ("; NOT one held-out set" if several else ""))
    return fig


def _value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _form(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else f"set {index}"


def _aligned(lines: list[list[str]]) -> list[str]:
    """Columns as wide as their widest cell; names and settings to the left, numbers to the right."""
    columns = list(zip(*lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [i > 0 and all(not cell or cell[0] in "-+.0123456789" for cell in c[1:]) for i, c in enumerate(columns)]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    ]


def _markdown(lines: list[list[str]]) -> list[str]:
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    return [head, "|" + "---|" * len(lines[0]), *body, ""]
