"""A second task, no text: which of two symbols is in the majority. The loop trains, evaluates, saves and resumes it."""

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
from tiny import TINY

from mod_jax.analysis.report import Seen
from mod_jax.config import make_config
from mod_jax.models.blocks import Choice
from mod_jax.models.model import make_model
from mod_jax.training import prepare
from mod_jax.training.loop import Outcome, train
from mod_jax.training.losses import loss_sums
from mod_jax.training.rows import read_metrics

CHANGES = {"model.depth": 2, "model.vocab_size": 300, "routing.predictor": False, "optimizer.learning_rate": 1e-2}
LENGTH = {"train.steps": 60, "train.save_every": 30, "train.eval_every": 30, "train.log_every": 10}


def symbols(rng: np.random.Generator, B: int, T: int) -> dict[str, np.ndarray]:
    symbols_BT = (rng.random((B, T)) < rng.choice([0.2, 0.8], (B, 1))).astype(np.int32)
    return {"symbols_BT": symbols_BT, "majority_B": (symbols_BT.mean(axis=1) > 0.5).astype(np.int32)}


class Majority:
    """A unit is a row; the last position says which symbol the row has more of."""

    def __init__(self, config, model):
        self.config, self.model, self.teacher = config, model, None
        self.B, self.T = config.train.batch_size, config.data.seq_len
        self.inputs = {
            "symbols_BT": jax.ShapeDtypeStruct((self.B, self.T), jnp.int32),
            "majority_B": jax.ShapeDtypeStruct((self.B,), jnp.int32),
        }
        self.units_per_step, self.flops_per_step, self.ranking_metric = self.B, 1e6, "eval/topk_loss"

    def count_units(self, batch):
        return jnp.array(batch["majority_B"].size)

    def loss_sums(self, params, batch):
        decoder, (B, T) = self.model.merge(params), batch["symbols_BT"].shape
        positions_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
        segments_BT = jnp.ones((B, T), jnp.int32)
        x_BTD, record = decoder.features(
            batch["symbols_BT"], positions_BT, segments_BT, Choice("topk", keys_B=batch["keys_B"])
        )
        targets_BT = jnp.broadcast_to(batch["majority_B"][:, None], (B, T))
        last_BT = (positions_BT == T - 1).astype(jnp.int32)
        return loss_sums(x_BTD, decoder.embedder.output_weight(), record, targets_BT, last_BT), record

    def batches(self, corpus, start_step, rows):
        for step in range(start_step, 1_000):
            batch = symbols(np.random.default_rng([self.config.seed, step]), self.B, self.T)
            yield {name: x[rows] for name, x in batch.items()} | {"example_ids_B": np.full(len(rows), step)}

    def evaluator(self, mesh, corpus):
        return Held(self)


class Held:
    def __init__(self, task):
        batch = symbols(np.random.default_rng(10**6), task.B, task.T) | {"keys_B": None}
        self._loss = jax.jit(lambda params: task.loss_sums(params, batch)[0].cross_entropy / task.B)

    def evaluate(self, weights):
        nats = float(self._loss(weights.params))
        return {"eval/topk_loss": nats, "eval/topk_bits_per_byte": nats / np.log(2)}

    def records(self, weights):
        nothing = np.zeros((0, 0), np.int32)
        return Seen(nothing, nothing > 0, {}, {}, {})


def test_the_loop_trains_and_resumes_another_task(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "make_task", lambda config, size: Majority(config, make_model(config, size)))
    for steps in (30, 60):
        config = make_config(**{**TINY, **CHANGES, **LENGTH, "train.steps": steps})
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert train(config, tmp_path, extend=steps == 60) is Outcome.DONE
    assert "RESUMED step 30 of 60" in out.getvalue()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval/topk_loss" in row] == [30, 60]
    assert rows[-1]["eval/topk_loss"] < 0.3 < np.log(2) < rows[0]["train/loss"]  # of a coin: 0.69
    assert next(row for row in rows if row["step"] == 60)["train/tokens"] == 60 * TINY["train.batch_size"]
