"""What gets routed? The popular claims about a trained model's routing, each with its control, in one figure.

    python -m mod_jax.train --config=configs/cpu_demo.py:mod --workdir=runs/mod
    python experiments/routing_claims.py --workdir=runs/mod --out=runs/mod/claims

Reads the run's held-out windows. For a Python corpus as bytes it also says what each byte is to Python. Writes
claims.png, claims.json and claims.md to OUT, and prints the last. The claims:

  keywords are routed, space is skipped   share of each class, beside the share that its bytes alone would give
  hard tokens get compute                 correlation of the score with surprise, raw, and within the tokens of one
                                          identity and one tenth of the row, with 95 % of resamples over windows
  blocks share the work                   agreement of two blocks' decisions beyond chance
  the router reads the context            share of the score's variance that the current token alone explains

Surprise is taken three ways, in nats: of the token itself given those before it, of the next token (the model's loss
there), and the entropy of what the model expects next.
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from matplotlib.figure import Figure

import mod_jax
from mod_jax import host, outputs
from mod_jax.analysis import decisions, plots, syntax
from mod_jax.analysis.routing_stats import NUM_DECILES, explained_by_token
from mod_jax.data.batches import eval_window_starts
from mod_jax.data.corpus import Corpus, prepare_corpus
from mod_jax.errors import ConfigError
from mod_jax.evaluation import budget
from mod_jax.trained import causal_selection

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
SELECTION = flags.DEFINE_string("selection", None, "Default: the one that sampling takes.")
OUT = flags.DEFINE_string("out", None, "Folder of what is written.", required=True)

SURPRISES = {"token": "of the token itself", "next": "of the next token", "entropy": "expected of the next token"}


def main(_) -> None:
    host.prepare()
    logging.set_verbosity(logging.ERROR)
    out = outputs.check_folder("out", OUT.value)
    model = mod_jax.restore(WORKDIR.value)
    if not model.config.num_routed:
        raise ConfigError(f"--workdir = {WORKDIR.value}: no block of this model is routed")
    selection = SELECTION.value or causal_selection(model.config)
    corpus = prepare_corpus(model.config.data, model.tokenizer)
    seen = look(model, corpus, selection)
    claims = judge(seen, model.config.routed_depths) | {
        "run": pathlib.Path(WORKDIR.value).name,
        "selection": selection,
        "seed": model.config.seed,
        "step": model.step,
        "corpus_digest": corpus.digest[:12],
        "tokens": int(seen["token_N"].size),
    }
    for name in ("always", "never"):
        claims[name] = [[visible(model, i) for i in ids] for ids in claims[name]]
    outputs.write_json(out / "claims.json", claims)
    outputs.write_text(out / "claims.md", "\n".join(table(claims)) + "\n")
    plots.save(draw(claims), out / "claims.png")
    print("\n".join(table(claims)))


def look(model: mod_jax.TrainedModel, corpus: Corpus, selection: str) -> dict[str, np.ndarray]:
    """What is known of each of the N real held-out tokens, and [L, N] of its routing."""

    @jax.jit
    def run(weights, batch):
        inputs = batch["tokens_BT"], batch["positions_BT"], batch["segment_ids_BT"]
        output = model.model.run(weights.params, *inputs, weights.choice(selection))
        log_p_BTV = jax.nn.log_softmax(output.logits_BTV)
        next_BT = -jnp.take_along_axis(log_p_BTV, batch["targets_BT"][..., None], -1)[..., 0]
        entropy_BT = -jnp.sum(jnp.exp(log_p_BTV) * log_p_BTV, axis=-1)
        return next_BT, entropy_BT, output.routing.router_logits_BT, output.routing.selected_BT

    T = model.config.data.seq_len
    starts_W, _ = eval_window_starts(corpus, T, model.config.data.eval_windows)
    class_M = classes(corpus)
    found: dict[str, list[np.ndarray]] = {}
    for batch in budget.held_out_batches(model, corpus):
        next_BT, entropy_BT, score_LBT, selected_LBT = jax.device_get(run(model.weights, batch))
        real_BT = batch["segment_ids_BT"] > 0
        real_BT[:, 0] = False  # the surprise of a row's first token is not known
        window_BT = np.broadcast_to(batch["example_ids_B"][:, None], real_BT.shape)
        place_T = np.arange(T)
        at_BT = starts_W[np.maximum(batch["example_ids_B"], 0)][:, None] + place_T
        of_token = {
            "token_N": batch["tokens_BT"],
            "window_N": window_BT,
            "tenth_N": np.broadcast_to(place_T * NUM_DECILES // T, real_BT.shape),
            "class_N": class_M[at_BT],
            "surprise_token_N": np.roll(next_BT, 1, axis=1),
            "surprise_next_N": next_BT,
            "surprise_entropy_N": entropy_BT,
        }
        for name, value_BT in of_token.items():
            found.setdefault(name, []).append(value_BT[real_BT])
        found.setdefault("score_LN", []).append(score_LBT[:, real_BT])
        found.setdefault("selected_LN", []).append(selected_LBT[:, real_BT])
    return {name: np.concatenate(parts, axis=-1) for name, parts in found.items()}


def classes(corpus: Corpus) -> np.ndarray:
    """The syntactic class of each held-out token, where tokens are the bytes of Python files; else unknown."""
    tokens_M, starts = np.asarray(corpus.validation_tokens), corpus.validation_starts
    class_M = np.full(tokens_M.size, syntax.UNKNOWN, np.int8)
    if corpus.tokenizer.name != "bytes":
        return class_M
    for start, end in zip(starts, [*starts[1:], tokens_M.size], strict=True):
        class_M[start + 1 : end] = syntax.classes_of_bytes(corpus.tokenizer.decode(tokens_M[start + 1 : end]))
    return class_M


def judge(seen: dict[str, np.ndarray], depths: tuple[int, ...]) -> dict[str, Any]:
    token_N, window_N = seen["token_N"], seen["window_N"]
    alike_N = decisions.groups(token_N, seen["tenth_N"])
    scores, selected = seen["score_LN"], seen["selected_LN"]
    fixed = [decisions.fixed_tokens(block, token_N) for block in selected]
    return {
        "depths": list(depths),
        "selected": [float(block.mean()) for block in selected],
        "shares": [
            [
                share._asdict()
                for share in decisions.share_by_class(block, seen["class_N"], token_N, len(syntax.CLASSES))
            ]
            for block in selected
        ],
        "correlations": {
            name: [
                {
                    "raw": decisions.correlation(score, seen[f"surprise_{name}_N"], window_N)._asdict(),
                    "within": decisions.correlation(score, seen[f"surprise_{name}_N"], window_N, alike_N)._asdict(),
                }
                for score in scores
            ]
            for name in SURPRISES
        },
        "agreement": [[decisions.agreement(one, other) for other in selected] for one in selected],
        "explained_by_token": [explained_by_token(score, token_N) for score in scores],
        "always": [always for always, _ in fixed],
        "never": [never for _, never in fixed],
    }


def visible(model: mod_jax.TrainedModel, token: int) -> str:
    return (
        "(separator)"
        if token == model.tokenizer.separator_id
        else repr(model.tokenizer.decode([token]).decode("utf-8", "replace"))
    )


def table(claims: dict[str, Any]) -> list[str]:
    depths = claims["depths"]
    heads = "".join(f" block {depth} |" for depth in depths)
    lines = [f"| |{heads}", "|---|" + "---|" * len(depths)]

    def row(name: str, cells: list[str]) -> None:
        lines.append(f"| {name} | {' | '.join(cells)} |")

    row("selected", [f"{share:.1%}" for share in claims["selected"]])
    for index, name in enumerate(syntax.CLASSES):
        shares = [block[index] for block in claims["shares"]]
        if shares[0]["count"]:
            row(
                f"{name}: selected (by its bytes alone)",
                [f"{s['selected']:.1%} ({s['by_identity']:.1%})" for s in shares],
            )
    for name, words in SURPRISES.items():
        pairs = claims["correlations"][name]
        row(f"score and surprise {words}: raw", [_interval(pair["raw"]) for pair in pairs])
        row(f"score and surprise {words}: within token and tenth", [_interval(pair["within"]) for pair in pairs])
    row("score's variance explained by the token", [f"{share:.1%}" for share in claims["explained_by_token"]])
    for i, depth in enumerate(depths[:-1]):
        row(
            f"agreement with block {depth} beyond chance",
            ["" if j <= i else f"{claims['agreement'][i][j]:.2f}" for j in range(len(depths))],
        )
    row("tokens always routed", [" ".join(ids) or "none" for ids in claims["always"]])
    row("tokens never routed", [str(len(ids)) for ids in claims["never"]])
    about = "{run}, seed {seed}, step {step}, selection {selection}, corpus {corpus_digest}, {tokens:,} held-out tokens"
    return [*lines, "", about.format(**claims) + "; [x, y]: 95 % of resamples over windows."]


def _interval(found: dict[str, float]) -> str:
    return f"{found['r']:+.2f} [{found['low']:+.2f}, {found['high']:+.2f}]"


@plots.styled
def draw(claims: dict[str, Any]) -> Figure:
    """Left: the share of each class. Right: the score and surprise, raw and within tokens of one identity and place."""
    depths = claims["depths"]
    figure = Figure(figsize=(10, 4.2))
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    colours = plots.block_colours(depths)
    known = [i for i in range(len(syntax.CLASSES)) if claims["shares"][0][i]["count"]]
    height = 0.8 / len(depths)
    for j, (depth, colour) in enumerate(zip(depths, colours, strict=True)):
        places = np.arange(len(known)) + (j - (len(depths) - 1) / 2) * height
        shares = [claims["shares"][j][i] for i in known]
        left.barh(places, [100 * s["selected"] for s in shares], 0.9 * height, color=colour, label=f"block {depth}")
        left.plot(
            [100 * s["by_identity"] for s in shares], places, "|", color=plots.INK, markersize=9, markeredgewidth=1.8
        )
    left.plot([], [], "|", color=plots.INK, markersize=9, markeredgewidth=1.8, label="if only the byte counted")
    left.set_yticks(range(len(known)), [syntax.CLASSES[i] for i in known])
    left.invert_yaxis()
    left.set(xlabel="tokens routed, %", title="What the byte is to Python")
    left.legend(loc="best")

    rows = [(name, kind) for name in SURPRISES for kind in ("raw", "within")]
    for j, colour in enumerate(colours):
        for place, (name, kind) in enumerate(rows):
            found = claims["correlations"][name][j][kind]
            y = place + (j - (len(depths) - 1) / 2) * 0.25
            right.plot([found["low"], found["high"]], [y, y], color=colour)
            right.plot(
                found["r"],
                y,
                marker=plots.MARKERS[j % len(plots.MARKERS)],
                color=colour,
                fillstyle="full" if kind == "raw" else "none",
            )
    right.axvline(0, color=plots.MUTED, linewidth=0.8)
    labels = {"raw": "surprise {}", "within": "  within token and place"}
    right.set_yticks(range(len(rows)), [labels[kind].format(SURPRISES[name]) for name, kind in rows])
    right.invert_yaxis()
    right.set(xlabel="correlation with the router's score", title="Do hard tokens get compute?")
    caption = "{run}, seed {seed}, step {step}, selection {selection}, corpus {corpus_digest}"
    plots.add_caption(figure, caption.format(**claims))
    return figure


if __name__ == "__main__":
    app.run(main)
