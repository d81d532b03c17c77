"""What is learned of text: the next token of packed rows. All that training knows of language stands here.

`Language` is the one *task* there is. The step, the loop and the planner ask it for the arrays of a batch, for their
losses, for the stream of batches and for the evaluator, and know no tokens. Log lines and the last table read
`eval/topk_loss` and `eval/topk_bits_per_byte` of what the evaluator returns. A second task is a class with these names;
`prepare.make_task` decides which one a config means. Vocabulary: B rows, T positions.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mod_jax.config import Config
from mod_jax.data.batches import MODEL_INPUTS, Batch, train_batches
from mod_jax.data.corpus import Corpus
from mod_jax.evaluation.evaluator import Evaluator
from mod_jax.models import flops
from mod_jax.models.blocks import Choice, Record
from mod_jax.models.model import Model
from mod_jax.trained import causal_selection, why_not_sampled
from mod_jax.training.losses import LossSums, loss_sums
from mod_jax.training.teacher import Teacher


class Language:
    """Next-token prediction. `units`, what lengths and rates are counted in, are tokens.

    `teacher` is what another run knows of the next token, beside the text; None without one.
    """

    def __init__(self, config: Config, model: Model, teacher: Teacher | None = None):
        self.config, self.model, self.teacher = config, model, teacher

    @property
    def inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a global batch that a step takes, int32 [B, T] each."""
        shape = self.config.train.batch_size, self.config.data.seq_len
        return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in MODEL_INPUTS}

    @property
    def units_per_step(self) -> int:
        return self.config.train.batch_size * self.config.data.seq_len

    @property
    def flops_per_step(self) -> float:
        of_row = flops.train_flops(self.config, self.model.vocab_size)
        if self.teacher is not None:
            of_row += self.teacher.flops(self.config.data.seq_len)
        return self.config.train.batch_size * of_row

    def count_units(self, batch: dict[str, jax.Array]) -> jax.Array:
        """How many units of a batch have a loss: its real tokens. Padding has segment 0."""
        return jnp.sum(batch["segment_ids_BT"] > 0)

    def loss_sums(
        self, params: dict[str, Any], batch: dict[str, jax.Array], teacher: dict[str, Any] | None = None
    ) -> tuple[LossSums, Record]:
        """The losses of a batch, summed over its units, and what its blocks did; under top-k, as in training.

        `batch["keys_B"]`: a random key for each row, or None (see `step.routing_keys`). `teacher`: its parameters.
        """
        decoder = self.model.merge(params)
        inputs = batch["tokens_BT"], batch["positions_BT"], batch["segment_ids_BT"]
        x_BTD, record = decoder.features(*inputs, Choice("topk", keys_B=batch["keys_B"]))
        losses = loss_sums(
            x_BTD,
            decoder.embedder.output_weight(),
            record,
            batch["targets_BT"],
            batch["segment_ids_BT"],
            z_loss=self.config.train.z_loss,
            chunk=self.config.train.loss_chunk,
            teacher=None if teacher is None else self.teacher.features(teacher, *inputs),
            teacher_weight=self.config.train.teacher_weight,
        )
        return losses, record

    def batches(self, corpus: Corpus, start_step: int, rows: np.ndarray) -> Iterator[Batch]:
        """The training stream from a step on: these rows of each global batch."""
        return train_batches(
            corpus,
            seq_len=self.config.data.seq_len,
            batch_size=self.config.train.batch_size,
            seed=self.config.seed,
            start_step=start_step,
            rows=rows,
            workers=self.config.data.workers,
        )

    @property
    def ranking_metric(self) -> str:
        """What ranks checkpoints: the loss of sampling's default selection; top-k's where there is no causal one."""
        if not self.config.num_routed or why_not_sampled(self.config):
            return "eval/topk_loss"
        return f"eval/causal_loss/{causal_selection(self.config)}"

    def evaluator(self, mesh: Mesh, corpus: Corpus) -> Evaluator:
        return Evaluator(self.config, self.model, mesh, corpus)
