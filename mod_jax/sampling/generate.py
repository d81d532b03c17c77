"""Text from a trained model: `generate("runs/mod", "def ")`, or a `Sampler` kept for many calls.

This is the host side; `programs` is the device's. A batch of prompts is one prefill, then one compiled loop of decoding
steps that runs until every row has ended, or for as many steps as the caller wants to wait: one when streaming, a few
when stop strings are looked for. Lengths are rounded up to buckets, so that the number of compiled programs is bounded
by the context and not by the prompts.
"""

import os
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mod_jax.errors import CacheOverflowError, RequestError
from mod_jax.sampling import cache as cache_lib
from mod_jax.sampling.choice import Options, row_keys
from mod_jax.sampling.programs import GenerationState, Programs, Request, serving_layers
from mod_jax.sampling.text import Completion, Prompt, Row, TextStream, encode_prompt
from mod_jax.trained import TrainedModel, causal_selection, restore

MIN_BUCKET = 32
STEPS_BETWEEN_STOP_CHECKS = 16


class Sampler:
    """A trained model with its compiled programs."""

    def __init__(
        self,
        model: TrainedModel,
        selection: str | None = None,
        *,
        cutoffs_L: jax.Array | None = None,
        capacity_L: tuple[float, ...] | None = None,
        overflow: str = "grow",
        num_drafts: int = 0,
    ):
        """Prepares `model` for sampling.

        Args:
          selection: a causal one that was trained; None for the default (see `causal_selection`).
          cutoffs_L: in place of the model's own, for selection "threshold" (see `budget.calibrate`).
          capacity_L: the fraction that each routed block is expected to select, to size caches; None: as in training.
          overflow: what to do when a row needs more slots than it has: "grow" the cache, or raise an "error".
          num_drafts: draft so many tokens per step by the full blocks alone, and verify them at once (`speculative`).
        """
        if isinstance(num_drafts, bool) or not isinstance(num_drafts, int) or not 0 <= num_drafts < MIN_BUCKET:
            raise RequestError(f"num_drafts = {num_drafts!r}: must be an integer in [0, {MIN_BUCKET - 1}]")
        if num_drafts and not model.config.num_routed:
            raise RequestError(f"num_drafts = {num_drafts}: a dense model has no routed blocks to leave out")
        if overflow not in ("grow", "error"):
            raise RequestError(f"overflow = {overflow!r}: must be grow or error")
        self.config, self.tokenizer = model.config, model.tokenizer
        self.selection = causal_selection(model.config, selection)
        self._cutoffs_L = model.cutoffs_L if cutoffs_L is None else jnp.asarray(cutoffs_L, jnp.float32)
        self._capacity_L = capacity_L or tuple(block.capacity for block in self.config.blocks if block.kind == "R")
        self._overflow, self._growth = overflow, 0

        on = jax.default_backend()
        layers = jax.jit(lambda params: serving_layers(self.config, model.model, params, on))(model.params)
        # Flat, because passing modules through `jit` costs more time than a small model's step.
        self._weights, structure = jax.tree.flatten(layers)
        programs = Programs(
            self.config, structure, self.selection, self._capacity_L, self.tokenizer.vocab_size, num_drafts, on
        )
        lies = programs.state_shardings(self._weights[0].sharding)
        self._prefill = jax.jit(
            programs.prefill, static_argnames=("num_positions", "slots"), out_shardings=(lies, None)
        )
        self._advance = jax.jit(programs.advance, donate_argnames="state", out_shardings=lies)
        self._grow = jax.jit(
            lambda cache, slots: cache_lib.grow(cache, slots),
            static_argnames="slots",
            out_shardings=lies and lies.cache,
        )
        self._score = jax.jit(programs.score)
        self._score_stepwise = jax.jit(programs.score_stepwise)

    @property
    def num_programs(self) -> int:
        """Programs compiled so far."""
        return sum(
            f._cache_size() for f in (self._prefill, self._advance, self._grow, self._score, self._score_stepwise)
        )

    def describe(self, batch_size: int, num_positions: int | None = None) -> str:
        """The selection and the memory of the caches, dense against routed, for a person."""
        positions = num_positions or self.config.model.context
        slots = self._slots(positions)
        ours = cache_lib.cache_bytes(self.config, batch_size, slots)
        full = cache_lib.cache_bytes(self.config, batch_size, (positions,) * len(slots))
        trained = ", ".join(self.config.causal_selections) or "none, the model is dense"
        return (
            f"selection {self.selection} (trained: {trained}); cache for {batch_size} x {positions} positions "
            f"{ours / 2**20:.2f} MiB, {ours / full:.3f} of a dense model's {full / 2**20:.2f} MiB"
        )

    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, on_text: Callable[[int, str], None] | None = None, **options
    ) -> list[Completion]:
        """Completes prompts, all in one batch.

        Args:
          prompts: one prompt or several: text, or token ids. A list of integers is one prompt.
          on_text: called with (row, new text) after every step.
          **options: see `Options`.

        Raises:
          RequestError: naming what cannot be done.
          CacheOverflowError: only if this sampler was told not to grow its caches.
        """
        options = Options(**options)
        rows = self._rows(_as_list(prompts), options)
        steps = 1 if on_text else STEPS_BETWEEN_STOP_CHECKS if options.stop_strings else self.config.model.context
        for _ in self._run(rows, options, steps):
            for index, row in enumerate(rows):
                if on_text and row.new_text:
                    on_text(index, row.new_text)
        return [row.completion() for row in rows]

    def stream(self, prompt: Prompt, **options) -> Iterator[str]:
        """Yields the completion of one prompt piece by piece."""
        options = Options(**options)
        rows = self._rows([prompt], options)
        for _ in self._run(rows, options, 1):
            if rows[0].new_text:
                yield rows[0].new_text

    def log_likelihoods(self, prompts: Prompt | Sequence[Prompt], *, stepwise: bool = False) -> list[np.ndarray]:
        """log p of each token behind the separator given those before it: by one prefill, or `stepwise` by decoding."""
        prompts = [encode_prompt(self.tokenizer, p, self.config.model.context, False) for p in _as_list(prompts)]
        tokens_BT, lengths_B = _pad(prompts, self._bucket(max(map(len, prompts))))
        score = self._score_stepwise if stepwise else self._score
        scores_BT = jax.device_get(score(self._weights, self._cutoffs_L, tokens_BT, lengths_B))
        return [scores_T[: length - 1] for scores_T, length in zip(scores_BT, lengths_B, strict=True)]

    # The host side of a generation.

    def _rows(self, prompts: list[Prompt], options: Options) -> list[Row]:
        context, wanted = self.config.model.context, options.max_new_tokens
        if wanted is not None and wanted >= context:
            raise RequestError(f"max_new_tokens = {wanted}: must be < {context}, the model's context")
        for token in options.stop_tokens:
            is_id = isinstance(token, int | np.integer) and not isinstance(token, bool)
            if not is_id or not 0 <= token < self.tokenizer.vocab_size:
                raise RequestError(f"stop_tokens: {token!r} must be an id in [0, {self.tokenizer.vocab_size})")
        rows = []
        for prompt in prompts:
            ids = encode_prompt(self.tokenizer, prompt, context - (wanted or 1), options.truncate)
            text = TextStream(self.tokenizer, options.stop_strings)
            rows.append(Row(ids, wanted or context - ids.size, text, self.config.num_routed))
        return rows

    def _run(self, rows: list[Row], options: Options, steps: int) -> Iterator[None]:
        """Generates for all rows; yields after every `steps` steps, with what is new in the rows."""
        if not rows:
            return
        num_positions = self._bucket(max(row.ids.size + row.limit for row in rows))
        stop_V = np.zeros(self.tokenizer.vocab_size, bool)
        stop_V[[self.tokenizer.separator_id, *options.stop_tokens]] = True
        request = Request(self._cutoffs_L, options.knobs(), row_keys(options.seed, len(rows)), stop_V)
        state = self._start(rows, request, num_positions)
        target = 0  # decoding steps wanted by now
        while True:
            self._take(rows, state, stop_V)
            ended_B = np.array([bool(row.finish_reason) for row in rows])
            if int(state.steps) >= target or ended_B.all():
                yield
                if ended_B.all():
                    return
                target = int(state.steps) + steps
            else:  # some row's cache is full
                state = state._replace(cache=self._grow(state.cache, slots=self._more_slots(num_positions)))
            # By a stop string, too, of which the device knows nothing.
            state = state._replace(done_B=state.done_B | ended_B)
            state = self._advance(self._weights, request, state=state, target=np.int32(target))

    def _take(self, rows: list[Row], state: GenerationState, stop_V: np.ndarray) -> None:
        """Reads from the device what each row has by now."""
        fields = (state.produced_B, state.output_BN, state.fed_B, state.selected_B, state.steps_B)
        for row, produced, tokens_N, *counts in zip(rows, *jax.device_get(fields), strict=True):
            row.take(tokens_N[:produced], stop_V, *map(int, counts))

    def _start(self, rows: list[Row], request: Request, num_positions: int) -> GenerationState:
        """Runs the prompts, in a cache as large as they need; each row has then one token produced."""
        tokens_BT, lengths_B = _pad([row.ids for row in rows], self._bucket(max(row.ids.size for row in rows)))
        limits_B = np.array([row.limit for row in rows], np.int32)
        slots = self._slots(num_positions)
        while True:
            sizes = dict(num_positions=num_positions, slots=slots)
            state, overflowed = self._prefill(self._weights, request, tokens_BT, lengths_B, limits_B, **sizes)
            if not overflowed:
                return state
            slots = self._more_slots(num_positions)

    def _slots(self, num_positions: int) -> tuple[int, ...]:
        return cache_lib.slot_counts(self.config, num_positions, self._capacity_L, self._growth)

    def _more_slots(self, num_positions: int) -> tuple[int, ...]:
        """The next larger size, for this call and all later ones.

        Raises:
          CacheOverflowError: if this sampler was told not to grow its caches.
        """
        if self._overflow == "error":
            routed = ", ".join(str(self._slots(num_positions)[depth]) for depth in self.config.routed_depths)
            raise CacheOverflowError(
                f"a row needs more slots than its routed blocks have ({routed} for {num_positions} positions): "
                "raise capacity_L, or let the cache grow (overflow = 'grow')"
            )
        self._growth += 1
        return self._slots(num_positions)

    def _bucket(self, length: int) -> int:
        return bucket(length, self.config.model.context)


def bucket(length: int, context: int) -> int:
    """`length` rounded up to a power of two, at least MIN_BUCKET, at most the context."""
    return min(max(MIN_BUCKET, 1 << (length - 1).bit_length()), context)


def generate(
    model: str | os.PathLike | Sampler, prompts: Prompt | Sequence[Prompt], *, selection: str | None = None, **options
) -> list[Completion]:
    """Completes prompts with the newest checkpoint of a workdir, or with a `Sampler`. For `options` see `Options`."""
    sampler = model if isinstance(model, Sampler) else Sampler(restore(model), selection)
    return sampler.generate(prompts, **options)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if not isinstance(prompts, str | bytes | np.ndarray | Sequence):
        raise RequestError(f"prompts = {prompts!r}: must be text, token ids, or a list of such")
    one = isinstance(prompts, str | bytes | np.ndarray) or (
        len(prompts) > 0 and isinstance(prompts[0], int | np.integer)
    )
    return [prompts] if one else list(prompts)


def _pad(rows: list[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [B, length] with zeros behind each row, lengths [B])."""
    lengths_B = np.array([row.size for row in rows], np.int32)
    tokens_BT = np.stack([np.pad(row, (0, length - row.size)) for row in rows]).astype(np.int32)
    return tokens_BT, lengths_B
