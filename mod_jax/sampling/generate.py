"""Text from a trained model: `generate("runs/mod", "def ")`, or a `Sampler` kept for many calls.

This is the host side; `programs` is the device's. A batch of prompts is one prefill, then one compiled loop of decoding
steps that runs until every row has ended, or for as many steps as the caller wants to wait: one when streaming, a few
when stop strings are looked for. Lengths and batch sizes are rounded up to *buckets*, so that few programs are compiled
whatever is asked for. What fills a batch up is never run, and changes no result.
"""

from __future__ import annotations  # help() then shows types as they are written here

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mod_jax import sharding
from mod_jax.errors import CacheOverflowError, ConfigError, RequestError
from mod_jax.models.blocks import Choice
from mod_jax.sampling import cache as cache_lib
from mod_jax.sampling.choice import Options, check_integer, make_knobs, make_options, row_keys, shown
from mod_jax.sampling.programs import GenerationState, Programs, Request, Scores, serving_stack, stack_shardings
from mod_jax.sampling.text import Completion, Prompt, Row, TextStream, encode_prompt, list_prompts
from mod_jax.trained import TrainedModel, as_model, best_selection, causal_selection

MIN_BUCKET = 32
STEPS_BETWEEN_STOP_CHECKS = 16


class Sampler:
    """A trained model with its compiled programs."""

    def __init__(
        self,
        model: TrainedModel | str | os.PathLike,
        selection: str | None = None,
        *,
        cutoffs_L: Sequence[float] | jax.Array | None = None,
        capacity_L: Sequence[float] | None = None,
        overflow: str = "grow",
        num_drafts: int = 0,
    ):
        """Prepares `model` for sampling.

        Args:
          model: as `restore` gives it, or the workdir of a run.
          selection: a causal one that was trained; None for the one that is calibrated best (see `best_selection`).
          cutoffs_L: in place of the model's own, for selection "threshold" (see `budget.calibrate`).
          capacity_L: the fraction that each routed block is expected to select, to size caches; None: as in training.
          overflow: what to do when a row needs more slots than it has: "grow" the cache, or raise an "error".
          num_drafts: draft so many tokens per step by the full blocks alone, and verify them at once (`speculative`).
        """
        if isinstance(num_drafts, bool) or not isinstance(num_drafts, int) or not 0 <= num_drafts < MIN_BUCKET:
            raise RequestError(f"num_drafts = {num_drafts!r}: must be an integer in [0, {MIN_BUCKET - 1}]")
        if overflow not in ("grow", "error"):
            raise RequestError(f"overflow = {overflow!r}: must be grow or error")
        model = as_model(model)
        if num_drafts and not model.config.num_routed:
            raise RequestError(f"num_drafts = {num_drafts}: this model has no routed blocks to leave out")
        if model.config.experts_choose and model.expert_cutoffs_LE is None:
            raise ConfigError(
                "experts.choice = 'expert': sampling needs expert_cutoffs_LE, the cut-off of each expert that training "
                "averages; without it experts look at later tokens"
            )
        self.config, self.tokenizer = model.config, model.tokenizer
        self._trained_positions = model.trained_positions
        for name, values_L, kind, allowed in (
            ("cutoffs_L", cutoffs_L, "numbers", lambda x_L: ~np.isnan(x_L)),
            ("capacity_L", capacity_L, "numbers in [0, 1]", lambda x_L: (x_L >= 0) & (x_L <= 1)),
        ):
            if values_L is not None and not _are_numbers(values_L, model.config.num_routed, allowed):
                raise RequestError(
                    f"{name} = {shown(values_L)}: must be {model.config.num_routed} {kind}, one per routed block"
                )
        if selection is None and model.config.num_routed:
            if cutoffs_L is not None:
                selection, self._why = "threshold", "which the given cut-offs are for"
            else:
                selection, self._why = best_selection(model)
        else:
            self._why = ""
        self.selection = causal_selection(model.config, selection)
        cutoffs_L = model.cutoffs_L if cutoffs_L is None else jnp.asarray(cutoffs_L, jnp.float32)
        self._choice = Choice(self.selection, cutoffs_L, expert_cutoffs_LE=model.expert_cutoffs_LE)
        self._capacity_L = tuple(capacity_L or ()) or self.config.capacity_L
        self._overflow, self._growth = overflow, 0

        platform, self._mesh = jax.default_backend(), model.mesh
        self.row_groups = 1 if model.mesh is None else sharding.row_ways(model.mesh.shape)

        def serve(params):
            return serving_stack(self.config, model.model, params, platform)

        with sharding.within(self._mesh):
            lies = self._mesh and stack_shardings(jax.eval_shape(serve, model.params), self._mesh)
            stack = jax.jit(serve, out_shardings=lies)(model.params)
        # Flat, because passing modules through `jit` costs more time than a small model's step.
        self._weights, structure = jax.tree.flatten(stack)
        vocab_size = self.tokenizer.vocab_size
        programs = Programs(self.config, structure, self._capacity_L, vocab_size, num_drafts, platform)
        shardings = programs.state_shardings(self._mesh or next(iter(self._weights[0].devices())))
        self._prefill = jax.jit(
            programs.prefill, static_argnames=("num_positions", "slots"), out_shardings=(shardings, None)
        )
        self._advance = jax.jit(programs.advance, donate_argnames="state", out_shardings=shardings)
        self._grow = jax.jit(
            lambda cache, slots: cache_lib.grow(cache, slots),
            static_argnames="slots",
            out_shardings=shardings and shardings.cache,
        )
        self._score = jax.jit(programs.score)
        self._score_stepwise = jax.jit(programs.score_stepwise)

    @property
    def cutoffs_L(self) -> jax.Array:
        """The cut-offs of selection "threshold" that it uses."""
        return self._choice.cutoffs_L

    @property
    def num_programs(self) -> int:
        """Programs compiled so far."""
        return sum(
            f._cache_size() for f in (self._prefill, self._advance, self._grow, self._score, self._score_stepwise)
        )

    def describe(self, batch_size: int, num_positions: int | None = None) -> str:
        """The selection and why it is this one, the memory of the caches, dense against routed; for a person.

        Raises:
          RequestError: a size is no integer >= 1.
        """
        check_integer("batch_size", batch_size, "an integer >= 1", lambda x: x >= 1)
        if num_positions is not None:
            check_integer("num_positions", num_positions, "None (the context) or an integer >= 1", lambda x: x >= 1)
        positions = num_positions or self.config.model.context
        slots, rows = self._slots(positions), batch_bucket(batch_size, self.row_groups)
        ours = cache_lib.cache_bytes(self.config, rows, slots)
        full = cache_lib.cache_bytes(self.config, rows, (positions,) * len(slots))
        trained = ", ".join(self.config.causal_selections) or "none, the model is dense"
        text = (
            f"selection {self.selection} (trained: {trained}){self._why and ', ' + self._why}; cache for {rows} x "
            f"{positions} positions {ours / 2**20:.2f} MiB, {ours / full:.3f} of a dense model's {full / 2**20:.2f} MiB"
        )
        if self._mesh is not None:
            axes = " x ".join(f"{axis} {size}" for axis, size in self._mesh.shape.items() if size > 1)
            text += f"; over {self._mesh.size} devices, {axes}"
        trained = self._trained_positions
        return text + (f"; positions from {trained} on were never trained" if positions > trained else "")

    def warm_up(
        self, batch_sizes: Sequence[int] = (1,), prompt_lengths: Sequence[int] = (1,), max_new_tokens: int | None = None
    ) -> int:
        """Compiles now what `generate` and `stream` would compile at their first call. Returns how many programs.

        A cache that grows is compiled anew all the same (see `overflow`).

        Args:
          batch_sizes: numbers of prompts; each stands for its bucket (see `batch_bucket`).
          prompt_lengths: of the longest prompt of a batch, in tokens with the separator; each stands for its bucket.
          max_new_tokens: as in the calls to come; None: up to the context.
        """
        context, before = self.config.model.context, self.num_programs
        Options(max_new_tokens=max_new_tokens)  # refuses a bad one
        for name, sizes, largest in (
            ("batch_sizes", batch_sizes, math.inf),
            ("prompt_lengths", prompt_lengths, context - (max_new_tokens or 1)),
        ):
            if not isinstance(sizes, Sequence | np.ndarray):
                raise RequestError(f"{name} = {shown(sizes)}: must be a list of integers")
            for size in sizes:
                if isinstance(size, bool) or not isinstance(size, int | np.integer) or not 1 <= size <= largest:
                    raise RequestError(f"{name}: {shown(size)} must be an integer in [1, {largest}]")
        for batch_size, length in itertools.product(batch_sizes, prompt_lengths):
            prompts = [[1] * (length - 1)] * batch_size
            request, state, _ = self._start(*self._rows(prompts, None, dict(max_new_tokens=max_new_tokens)))
            with sharding.within(self._mesh):
                self._advance(self._weights, request, state=state, target=np.int32(0))
        return self.num_programs - before

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        options: Options | Sequence[Options] | None = None,
        *,
        on_text: Callable[[int, str], None] | None = None,
        **changes,
    ) -> list[Completion]:
        """Completes prompts, all in one batch.

        Args:
          prompts: one prompt or several: text, or token ids. A list of integers is one prompt.
          options: for all prompts, or one per prompt.
          on_text: called with (row, new text) after every step.
          **changes: fields of `Options`, in place of `options`: `temperature=0, max_new_tokens=20`.

        Raises:
          RequestError: naming what cannot be done.
          CacheOverflowError: only if this sampler was told not to grow its caches.
        """
        rows, options = self._rows(prompts, options, changes)
        stops = any(o.stop_strings for o in options)
        steps = 1 if on_text else STEPS_BETWEEN_STOP_CHECKS if stops else self.config.model.context
        for _ in self._run(rows, options, steps):
            for index, row in enumerate(rows):
                if on_text and row.new_text:
                    on_text(index, row.new_text)
        return [row.completion() for row in rows]

    def stream(self, prompt: Prompt, options: Options | None = None, **changes) -> Iterator[str]:
        """Yields the completion of one prompt piece by piece. Arguments, checked at once, as for `generate`."""
        rows, options = self._rows([prompt], options, changes)
        return (row.new_text for _ in self._run(rows, options, 1) for row in rows if row.new_text)

    def check(
        self, prompts: Prompt | Sequence[Prompt], options: Options | Sequence[Options] | None = None, **changes
    ) -> None:
        """Raises the RequestError that `generate` would raise; computes nothing."""
        self._rows(prompts, options, changes)

    def log_likelihoods(self, prompts: Prompt | Sequence[Prompt], *, stepwise: bool = False) -> list[np.ndarray]:
        """log p of each token given those before it: by one prefill, or `stepwise` by decoding.

        The first token that is run, which is the separator where prompts start with it, has none. All prompts go in one
        batch. For many texts, and for what stands in another's context, see `evaluation.likelihoods`.
        """
        prompts, context = list_prompts(prompts), self.config.model.context
        ids = self._encode(prompts, [context] * len(prompts), [Options()] * len(prompts))
        return [scores.log_p for scores in self.score(ids, stepwise=stepwise)]

    def score(self, rows: Sequence[np.ndarray], *, stepwise: bool = False) -> list[Scores]:
        """What the model says of each token of these rows but the first, given those before it. All in one batch.

        Args:
          rows: token ids, int32 [2 .. context + 1], taken as they are: nothing is put in front. The first id stands at
            position 0.
        """
        if not rows:
            return []
        length = self._bucket(max(row.size for row in rows) - 1)
        tokens_BT, lengths_B = self._pad([row[:-1] for row in rows], length)
        targets_BT, _ = self._pad([row[1:] for row in rows], length)
        score = self._score_stepwise if stepwise else self._score
        with sharding.within(self._mesh):
            given = self._by_rows((tokens_BT, targets_BT, lengths_B))
            scores = jax.device_get(score(self._weights, self._choice, *given))
        return [Scores(*(a_BT[index, : row.size - 1] for a_BT in scores)) for index, row in enumerate(rows)]

    # The host side of a generation.

    def _encode(self, prompts: list[Prompt], max_tokens: list[int], options: list[Options]) -> list[np.ndarray]:
        name = "prompts[{}]" if len(prompts) > 1 else "prompt"
        return [
            encode_prompt(self.tokenizer, prompt, most, option.truncate, name.format(index))
            for index, (prompt, most, option) in enumerate(zip(prompts, max_tokens, options, strict=True))
        ]

    def _rows(self, prompts, options, changes: dict) -> tuple[list[Row], list[Options]]:
        """One row per prompt, and the options of each; checked. Arguments as `generate` gets them."""
        prompts = list_prompts(prompts)
        options = make_options(options, changes, len(prompts))
        context, vocab_size = self.config.model.context, self.tokenizer.vocab_size
        for option in {id(option): option for option in options}.values():
            wanted = option.max_new_tokens
            if wanted is not None and wanted >= context:
                raise RequestError(f"max_new_tokens = {shown(wanted)}: must be < {context}, the model's context")
            for token in option.stop_tokens:
                is_id = isinstance(token, int | np.integer) and not isinstance(token, bool)
                if not is_id or not 0 <= token < vocab_size:
                    raise RequestError(f"stop_tokens: {shown(token)} must be an id in [0, {vocab_size})")
        encoded = self._encode(prompts, [context - (option.max_new_tokens or 1) for option in options], options)
        rows = [
            Row(
                ids,
                option.max_new_tokens or context - ids.size,
                frozenset({*self.tokenizer.stop_ids, *map(int, option.stop_tokens)}),
                TextStream(self.tokenizer, option.stop_strings),
                self.config.num_routed,
                frozenset(self.tokenizer.stop_ids),
            )
            for ids, option in zip(encoded, options, strict=True)
        ]
        return rows, options

    def _run(self, rows: list[Row], options: list[Options], steps: int) -> Iterator[None]:
        """Generates for all rows; yields after every `steps` steps, with what is new in the rows."""
        if not rows:
            return
        request, state, num_positions = self._start(rows, options)
        target = 0  # decoding steps wanted by now
        while True:
            self._take(rows, state)
            ended_B = np.ones(state.done_B.shape, bool)
            ended_B[: len(rows)] = [bool(row.finish_reason) for row in rows]
            if int(state.steps) >= target or ended_B.all():
                yield
                if ended_B.all():
                    return
                target = int(state.steps) + steps
            else:  # some row's cache is full
                slots = self._more_slots(num_positions)
                with sharding.within(self._mesh):
                    state = state._replace(cache=self._grow(state.cache, slots=slots))
            # By a stop string, too, of which the device knows nothing.
            state = state._replace(done_B=state.done_B | self._by_rows(ended_B))
            with sharding.within(self._mesh):
                state = self._advance(self._weights, request, state=state, target=np.int32(target))

    def _take(self, rows: list[Row], state: GenerationState) -> None:
        """Reads from the device what each row has by now."""
        fields = (state.produced_B, state.output_BN, state.fed_B, state.selected_B, state.steps_B)
        for row, produced, tokens_N, *counts in zip(rows, *jax.device_get(fields), strict=False):
            row.take(tokens_N[:produced], *map(int, counts))

    def _start(self, rows: list[Row], options: list[Options]) -> tuple[Request, GenerationState, int]:
        """Runs the prompts, in a cache as large as they need; each row has then one token produced.

        Returns what stays the same, the state, and for how many positions it has room.
        """
        num_positions = self._bucket(max(row.ids.size + row.limit for row in rows))
        tokens_BT, lengths_B = self._pad([row.ids for row in rows], self._bucket(max(row.ids.size for row in rows)))
        filled = len(lengths_B) - len(rows)
        limits_B = np.array([row.limit for row in rows] + [0] * filled, np.int32)
        stop_BV = np.zeros((len(lengths_B), self.tokenizer.vocab_size), bool)
        for stop_V, row in zip(stop_BV, rows, strict=False):
            stop_V[list(row.stops)] = True
        options = options + [Options()] * filled
        prompts = [row.ids for row in rows] + [np.zeros(0, np.int32)] * filled
        keys_B = row_keys([option.seed for option in options], prompts)
        request = Request(self._choice, *self._by_rows((make_knobs(options), keys_B, stop_BV)))
        given = self._by_rows((tokens_BT, lengths_B, limits_B))
        slots = self._slots(num_positions)
        while True:
            sizes = dict(num_positions=num_positions, slots=slots)
            with sharding.within(self._mesh):
                state, overflowed = self._prefill(self._weights, request, *given, **sizes)
            if not overflowed:
                return request, state, num_positions
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

    def _pad(self, rows: list[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens [B, length] with zeros behind each row, lengths [B]); B is a bucket, filled up with empty rows."""
        batch_size = batch_bucket(len(rows), self.row_groups)
        lengths_B = np.array([row.size for row in rows] + [0] * (batch_size - len(rows)), np.int32)
        tokens_BT = np.zeros((batch_size, length), np.int32)
        for tokens_T, row in zip(tokens_BT, rows, strict=False):
            tokens_T[: row.size] = row
        return tokens_BT, lengths_B

    def _by_rows(self, arrays: Any) -> Any:
        """Arrays of rows, laid out over the mesh if there is one."""
        return arrays if self._mesh is None else jax.device_put(arrays, sharding.batch_sharding(self._mesh))


def bucket(length: int, context: int) -> int:
    """`length` rounded up to a power of two, at least MIN_BUCKET, at most the context."""
    return min(max(MIN_BUCKET, 1 << (length - 1).bit_length()), context)


def batch_bucket(num_rows: int, groups: int = 1) -> int:
    """`num_rows` rounded up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: at most a third of a batch only fills it up.

    On a mesh, so many rows for each of the `groups` of devices that rows are split over.
    """
    num_rows = -(-num_rows // groups)
    power = 1 << (num_rows - 1).bit_length()
    return groups * (3 * power // 4 if power >= 4 and num_rows <= 3 * power // 4 else power)


def generate(
    model: str | os.PathLike | TrainedModel | Sampler,
    prompts: Prompt | Sequence[Prompt],
    options: Options | Sequence[Options] | None = None,
    *,
    selection: str | None = None,
    on_text: Callable[[int, str], None] | None = None,
    **changes,
) -> list[Completion]:
    """Completes prompts with the newest checkpoint of a workdir, a restored model, or a `Sampler`.

    A `Sampler` keeps its compiled programs from call to call. For the arguments see `Sampler.generate`.
    """
    if not isinstance(model, Sampler):
        model = Sampler(model, selection)
    elif selection not in (None, model.selection):
        raise RequestError(f"selection = {selection!r}: this sampler was made for {model.selection!r}")
    return model.generate(prompts, options, on_text=on_text, **changes)


def _are_numbers(values, count: int, allowed: Callable[[np.ndarray], np.ndarray]) -> bool:
    if np.shape(values) != (count,):
        return False
    array = np.asarray(values)
    return count == 0 or (array.dtype.kind in "iuf" and bool(np.all(allowed(array))))
