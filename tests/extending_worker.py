"""What docs/extending.md adds, in use: test_extending.py starts it on a copy of the code with every diff applied.

python tests/extending_worker.py COPY SCRATCH
"""

import csv
import importlib.util
import pathlib
import sys

import jax
import numpy as np
import pytest
import untrained
from tiny import TINY

import mod_jax
from mod_jax import host
from mod_jax.config import from_config_dict, make_config
from mod_jax.data import sources
from mod_jax.data.batches import train_batches
from mod_jax.data.corpus import prepare_corpus
from mod_jax.errors import DataError
from mod_jax.models.flops import forward_flops
from mod_jax.models.model import make_model
from mod_jax.sampling import Sampler
from mod_jax.training import loop
from mod_jax.training.rows import read_metrics

TOKENS_BT = untrained.random_tokens(2, 12)


def check_the_gate() -> None:
    """softplus(r) = log(1 + exp r)."""
    scores, gate = scores_and_gate(untrained.build_model(**{"routing.gate": "softplus", "model.depth": 2}))
    assert scores.std() > 0.1
    np.testing.assert_allclose(gate, np.log1p(np.exp(scores)), rtol=1e-5)


def check_the_score() -> None:
    """The RMS of what enters the block, here an embedding, times the one number that the router has learned."""
    model = untrained.build_model(**{"routing.score": "norm", "model.layout": "R", "model.depth": 1})
    scores, _ = scores_and_gate(model)
    table_VD = np.asarray(model.params["embedder"]["table_VD"])
    x_BTD = table_VD[TOKENS_BT] * table_VD.shape[1] ** 0.5
    weight = np.asarray(model.params["units"]["blocks"][0]["router"]["weight_D"]).item()
    np.testing.assert_allclose(scores[0], weight * np.sqrt(np.mean(x_BTD**2, axis=-1)), rtol=1e-4)
    assert forward_flops(model.config, 260).router == 2 * model.config.data.seq_len


def scores_and_gate(model) -> tuple[np.ndarray, np.ndarray]:
    routing = jax.jit(model.model.run)(model.params, TOKENS_BT).routing
    return np.asarray(routing.router_logits_BT), np.asarray(routing.gate_BT)


def check_the_block() -> None:
    """Cached and uncached, whole and routed, and it samples."""
    model = untrained.build_model(**{"model.layout": "Cc", "model.depth": 2})
    expected_BTV, expected_LBT = untrained.uncached(model, "threshold", TOKENS_BT)
    logits_BTV, selected_LBT, cache = untrained.replay(model, "threshold", TOKENS_BT, [4, 6], kept=12, rows=2)
    np.testing.assert_array_equal(selected_LBT, expected_LBT)
    np.testing.assert_allclose(logits_BTV, expected_BTV, atol=2e-5)
    assert 0 < selected_LBT.mean() < 1
    np.testing.assert_array_equal(cache[1].lengths_B, selected_LBT[0].sum(axis=1))
    (generated,) = Sampler(model, "threshold").generate("ab", temperature=0, max_new_tokens=3)
    assert len(generated.tokens) == 3


def write_csv(path: pathlib.Path) -> list[str]:
    texts = [f'{i}, "quoted",\nand {"again " * 20}' for i in range(60)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("number", "body"), *enumerate(texts)])
    return texts


def check_the_source(config, texts: list[str], scratch: pathlib.Path) -> None:
    """Every record is a document of one of the two splits."""
    source = sources.load(config.data, scratch)
    train, held_out = (dict(source.documents(split)) for split in sources.SPLITS)
    assert len(train) > len(held_out) > 0
    assert sorted([*train.values(), *held_out.values()]) == sorted(text.encode() for text in texts)
    misspelt = make_config(**{**TINY, "data.source": config.data.source, "data.text_key": "boby"})
    with pytest.raises(DataError, match=r"no column data\.text_key = 'boby'"):
        list(sources.load(misspelt.data, scratch).documents("train"))


def check_the_metric(config, row: dict) -> None:
    """The first row's, worked out from what the untrained model does with the first batch."""
    model = make_model(config, config.model.vocab_size)
    corpus = prepare_corpus(config.data)
    batch = next(train_batches(corpus, seq_len=config.data.seq_len, batch_size=8, seed=config.seed))
    inputs = batch["tokens_BT"], batch["positions_BT"], batch["segment_ids_BT"]
    routing = jax.jit(model.run)(jax.jit(model.init)(), *inputs).routing
    gate, selected = np.asarray(routing.gate_BT)[0], np.asarray(routing.selected_BT)[0]
    np.testing.assert_allclose(row["routing/block01/gate_square"], np.mean(gate[selected] ** 2), rtol=1e-4)
    np.testing.assert_allclose(row["routing/block01/gate_mean"], np.mean(gate[selected]), rtol=1e-4)


def check_the_config(path: pathlib.Path) -> None:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    configs = {name: from_config_dict(module.get_config(name)) for name in module.LAYOUTS}
    assert {name: config.routed_depths for name, config in configs.items()} == {
        "early": (1, 2),
        "late": (2, 3),
        "turns": (1, 3),
    }
    assert len({forward_flops(config, 260).total for config in configs.values()}) == 1


def main() -> None:
    copy, scratch = map(pathlib.Path, sys.argv[1:])
    assert pathlib.Path(mod_jax.__file__).is_relative_to(copy)
    host.prepare()
    check_the_gate()
    check_the_score()
    check_the_block()
    check_the_config(copy / "configs" / "where.py")

    texts = write_csv(scratch / "table.csv")
    ours = {"model.layout": "Fc", "routing.gate": "softplus", "routing.score": "norm", "model.vocab_size": 260}
    ours |= {"data.source": f"csv:{scratch / 'table.csv'}", "data.text_key": "body", "train.log_every": 1}
    config = make_config(**{**TINY, **ours, "model.depth": 2, "train.steps": 2})
    check_the_source(config, texts, scratch)
    assert loop.train(config, scratch / "run") is loop.Outcome.DONE
    rows = [row for row in read_metrics(scratch / "run" / "metrics.jsonl") if "train/loss" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["train/grad_norm"] > 0
    check_the_metric(config, rows[0])


if __name__ == "__main__":
    main()
