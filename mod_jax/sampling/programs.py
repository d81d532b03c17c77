"""The device side of generation: pure functions of arrays, each compiled once per shape.

Vocabulary: B rows, T prompt tokens, N positions of a row (prompt and new tokens), E tokens emitted by one step, V
vocabulary, L routed blocks. A row is *live* until it has ended. A *step* runs each live row once through the whole
model: it emits one token, or with drafts (see `speculative`) up to one more than there are drafts.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from mod_jax import sharding, tuning
from mod_jax.config import Config
from mod_jax.models.blocks import Choice
from mod_jax.models.model import Model
from mod_jax.sampling import cache as cache_lib
from mod_jax.sampling import speculative
from mod_jax.sampling.cache import Cache
from mod_jax.sampling.choice import Knobs, choose
from mod_jax.sampling.stack import Output, Stack, decode, prefill, split


class Request(NamedTuple):
    """What stays the same while a batch is generated."""

    choice: Choice  # of the tokens that routed blocks compute on
    knobs: Knobs
    keys_B: jax.Array
    stop_BV: jax.Array  # ids that end each row


class GenerationState(NamedTuple):
    """All that changes while a batch is generated. Positions are `prompt_lengths_B + produced_B - 1`, never slots."""

    cache: Cache
    prompt_lengths_B: jax.Array
    limits_B: jax.Array  # tokens to produce at most
    produced_B: jax.Array
    done_B: jax.Array
    output_BN: jax.Array  # tokens produced; the last one was not fed to the model yet
    fed_B: jax.Array  # tokens run through the whole model, the prompt's with them
    selected_B: jax.Array  # routed blocks that those tokens entered
    steps_B: jax.Array  # decoding steps that the row was live in
    steps: jax.Array  # decoding steps so far


class Scores(NamedTuple):
    """Of tokens of a text, each given those before it: log p, float32; whether greedy decoding would have chosen it."""

    log_p: jax.Array
    is_greedy: jax.Array


@dataclasses.dataclass(frozen=True)
class Programs:
    """Functions to be jitted. `weights` are the leaves of a `Stack`, which `structure` puts together again.

    Attributes:
      capacity_L: the fraction that each routed block is expected to select; sizes passes, never results.
      num_ids: ids that stand for something; the embedding table may have more rows.
      num_drafts: tokens drafted per step; 0: no drafts.
      platform: of the device that runs them (see `tuning`).
    """

    config: Config
    structure: Any
    capacity_L: tuple[float, ...]
    num_ids: int
    num_drafts: int
    platform: str

    def prefill(
        self, weights, request: Request, tokens_BT, lengths_B, limits_B, *, num_positions: int, slots: tuple[int, ...]
    ) -> tuple[GenerationState, jax.Array]:
        """Runs the prompts and produces one token per row; and whether the cache was too small for the prompts."""
        stack, output = self._prompt(weights, request.choice, tokens_BT, lengths_B, slots)
        zeros_B = jnp.zeros_like(lengths_B)
        state = GenerationState(
            cache=output.cache,
            prompt_lengths_B=lengths_B,
            limits_B=limits_B,
            produced_B=zeros_B,
            done_B=limits_B < 1,  # rows that only fill the batch up to its size
            output_BN=jnp.zeros((len(lengths_B), num_positions), jnp.int32),
            fed_B=lengths_B,
            selected_B=jnp.sum(output.selected_LBT, axis=(0, 2), dtype=jnp.int32),
            steps_B=zeros_B,
            steps=jnp.zeros((), jnp.int32),
        )
        last_B1D = jnp.take_along_axis(output.x_BTD, lengths_B[:, None, None] - 1, axis=1)
        return self._choose(state, stack.logits(last_B1D), request), cache_lib.overflowed(output.cache)

    def advance(self, weights, request: Request, *, state: GenerationState, target: jax.Array) -> GenerationState:
        """Decodes until `target` steps were made, every row has ended, or a live row's cache is full."""
        stack = jax.tree.unflatten(self.structure, weights)
        num_positions = state.output_BN.shape[1]

        def goes_on(state):
            room_B = cache_lib.has_room(state.cache, num_positions, self.num_drafts + 1) | state.done_B
            return (state.steps < target) & ~jnp.all(state.done_B) & jnp.all(room_B)

        def step(state):
            last_B1 = jnp.take_along_axis(state.output_BN, state.produced_B[:, None] - 1, axis=1)
            positions_B, live_B = state.prompt_lengths_B + state.produced_B - 1, ~state.done_B
            state = state._replace(steps=state.steps + 1, steps_B=state.steps_B + live_B)
            advance = self._speculate if self.num_drafts else self._decode
            return advance(stack, state, request, last_B1[:, 0], positions_B, live_B)

        return jax.lax.while_loop(goes_on, step, state)

    def state_shardings(self, place: jax.Device | Mesh) -> GenerationState | None:
        """Where and how the arrays of a state are to lie, on a device or on a mesh; None: as the compiler has it by
        default.

        On a mesh, rows lie with their caches over the axes of rows, heads of a cache over those of tensor. For the
        order of dimensions see `tuning.cache_layout`.
        """
        layout = tuning.cache_layout(self.platform, self.config.model.head_dim)
        if isinstance(place, Mesh):
            rows, once = sharding.batch_sharding(place), sharding.replicated(place)
        elif layout is None:
            return None
        else:
            rows = once = SingleDeviceSharding(place)
        cache = jax.eval_shape(lambda: cache_lib.init_cache(self.config, 1, (1,) * len(self.config.blocks)))

        def lies(array) -> jax.sharding.Sharding | Format:
            here = rows
            if isinstance(place, Mesh):
                axes = cache_lib.item_axes(self.config, array.shape)
                here = NamedSharding(place, sharding.RULES.spec(axes, array.shape, dict(place.shape)))
            return here if layout is None or array.ndim != len(layout) else Format(Layout(layout), here)

        of_rows = [once if name == "steps" else rows for name in GenerationState._fields[1:]]
        return GenerationState(jax.tree.map(lies, cache), *of_rows)

    def score(self, weights, choice: Choice, tokens_BT, targets_BT, lengths_B) -> Scores:
        """What the model says of each target, the token behind the one at its place; by one prefill."""
        slots = (tokens_BT.shape[1],) * len(self.config.blocks)  # as many as positions: nothing can overflow
        stack, output = self._prompt(weights, choice, tokens_BT, lengths_B, slots)
        return self._scores_in_chunks(stack, output.x_BTD, targets_BT)

    def score_stepwise(self, weights, choice: Choice, tokens_BT, targets_BT, lengths_B) -> Scores:
        """The same by decoding token after token."""
        stack = jax.tree.unflatten(self.structure, weights)
        B, T = tokens_BT.shape

        def step(cache, position):
            positions_B = jnp.full(B, position, jnp.int32)
            given = (tokens_BT[:, position], positions_B, positions_B < lengths_B, cache, choice)
            output = decode(stack, *given, self._expected(B // sharding.num_groups()))
            return output.cache, self._scores(stack.logits(output.x_BTD)[:, 0], targets_BT[:, position])

        cache = cache_lib.init_cache(self.config, B, (T,) * len(self.config.blocks))
        return jax.tree.map(jnp.transpose, jax.lax.scan(step, cache, jnp.arange(T))[1])

    def _scores(self, logits_BV, targets_B) -> Scores:
        log_p_B = jnp.take_along_axis(jax.nn.log_softmax(logits_BV), targets_B[:, None], axis=1)[:, 0]
        return Scores(log_p_B, jnp.argmax(logits_BV[:, : self.num_ids], axis=-1) == targets_B)

    def _scores_in_chunks(self, stack: Stack, x_BTD, targets_BT) -> Scores:
        """Of all positions. The logits of one chunk of tokens exist at a time on each device, as in training."""
        B, T = targets_BT.shape
        G = sharding.num_groups()
        K = B // G * T  # tokens of a group of rows
        M = min(K, tuning.default_loss_chunk())
        N = -(-K // M)

        def chunks(a_BT):
            a_GK = a_BT.reshape(G, K, *a_BT.shape[2:])
            a_GK = jnp.pad(a_GK, [(0, 0), (0, N * M - K)] + [(0, 0)] * (a_GK.ndim - 2))
            return a_GK.reshape(G, N, M, *a_GK.shape[2:]).swapaxes(0, 1)

        def one_chunk(chunk):
            x_GMD, targets_GM = chunk
            scores = self._scores(stack.logits(x_GMD).reshape(G * M, -1), targets_GM.reshape(G * M))
            return jax.tree.map(lambda a: a.reshape(G, M), scores)

        scores_NGM = jax.lax.map(one_chunk, (chunks(x_BTD), chunks(targets_BT)))
        return jax.tree.map(lambda a: a.swapaxes(0, 1).reshape(G, N * M)[:, :K].reshape(B, T), scores_NGM)

    def _prompt(self, weights, choice: Choice, tokens_BT, lengths_B, slots) -> tuple[Stack, Output]:
        stack = jax.tree.unflatten(self.structure, weights)
        B, T = tokens_BT.shape
        kept_L = tuple(cache_lib.routed_slots(T, capacity) for capacity in self.capacity_L)
        cache = cache_lib.init_cache(self.config, B, slots)
        valid_BT = jnp.arange(T)[None] < lengths_B[:, None]
        return stack, prefill(stack, tokens_BT, valid_BT, cache, choice, kept_L)

    def _decode(self, stack, state: GenerationState, request: Request, tokens_B, positions_B, live_B):
        given = (tokens_B, positions_B, live_B, state.cache, request.choice)
        output = decode(stack, *given, self._expected(len(tokens_B) // sharding.num_groups()))
        state = state._replace(
            cache=output.cache,
            fed_B=state.fed_B + live_B,
            selected_B=state.selected_B + jnp.sum(output.selected_LBT, axis=(0, 2), dtype=jnp.int32),
        )
        return self._choose(state, stack.logits(output.x_BTD), request)

    def _speculate(self, stack, state: GenerationState, request: Request, tokens_B, positions_B, live_B):
        given = (tokens_B, positions_B, live_B, state.cache, request.choice, request.knobs)
        verified = speculative.draft_and_verify(
            stack,
            *given,
            _fold(request.keys_B, state.produced_B),
            num_ids=self.num_ids,
            num_positions=state.output_BN.shape[1],
            num_drafts=self.num_drafts,
            kept_L=self._expected(self.num_drafts + 1),
        )
        state = state._replace(
            cache=verified.cache,
            fed_B=state.fed_B + live_B * (self.num_drafts + 1),
            selected_B=state.selected_B + verified.selected_B,
        )
        return _emit(state, verified.tokens_BG1, verified.emitted_B, request.stop_BV)

    def _choose(self, state: GenerationState, logits_B1V, request: Request) -> GenerationState:
        """Chooses the next token of every live row."""
        keys_B = _fold(request.keys_B, state.produced_B)
        chosen_B = choose(logits_B1V[:, 0, : self.num_ids], request.knobs, keys_B)
        return _emit(state, chosen_B[:, None], jnp.ones_like(chosen_B), request.stop_BV)

    def _expected(self, count: int) -> tuple[int, ...]:
        """Tokens per pass of `count`, for each routed block."""
        return tuple(tuning.rows_per_pass(count, capacity, self.platform) for capacity in self.capacity_L)


def serving_stack(config: Config, model: Model, params: dict[str, Any], platform: str) -> Stack:
    """The decoder of `params` as decoding on this platform reads it: matrices in the compute dtype, the rest float32.

    Training rounds those matrices to the compute dtype at every use: once is as good, and halves what is read.
    """
    dtype = jnp.dtype(config.model.dtype)
    params = jax.tree.map(lambda w, group: w.astype(dtype) if group == "matrix" else w, params, model.groups)
    return split(model.merge(params), platform)


def stack_shardings(stack: Stack, mesh: Mesh) -> Stack:
    """Where the weights of a stack of shapes lie on a mesh: as in training, by the axes that each declares.

    In `inside`, and in units that were taken apart, the axis of layers is there or is not: it is never split.
    """

    def place(weight: nnx.Param) -> nnx.Param:
        axes = tuple(axis for axis in weight.get_metadata()["out_sharding"] if axis != "layers")
        axes = (None,) * (weight.ndim - len(axes)) + axes
        return weight.replace(NamedSharding(mesh, sharding.RULES.spec(axes, weight.shape, dict(mesh.shape))))

    return jax.tree.map(place, stack, is_leaf=lambda leaf: isinstance(leaf, nnx.Param))


def _emit(state: GenerationState, tokens_BE, count_B, stop_BV) -> GenerationState:
    """Appends the first `count_B` tokens to each live row, up to the first that ends it, or its limit."""
    offsets_1E = jnp.arange(tokens_BE.shape[1], dtype=jnp.int32)[None]
    is_stop_BE = jnp.take_along_axis(stop_BV, tokens_BE, axis=1)
    stopped_before_BE = jnp.cumsum(is_stop_BE, axis=1) > is_stop_BE
    room_B = jnp.minimum(count_B, state.limits_B - state.produced_B)
    kept_BE = ~state.done_B[:, None] & (offsets_1E < room_B[:, None]) & ~stopped_before_BE
    # Out of bounds, where it is dropped, unless kept.
    columns_BE = jnp.where(kept_BE, state.produced_B[:, None] + offsets_1E, state.output_BN.shape[1])
    put = jax.vmap(lambda row_N, columns_E, tokens_E: row_N.at[columns_E].set(tokens_E, mode="drop"))
    produced_B = state.produced_B + jnp.sum(kept_BE, axis=1, dtype=jnp.int32)
    return state._replace(
        output_BN=put(state.output_BN, columns_BE, tokens_BE),
        produced_B=produced_B,
        done_B=state.done_B | jnp.any(is_stop_BE & kept_BE, axis=1) | (produced_B >= state.limits_B),
    )


def _fold(keys_B: jax.Array, data_B: jax.Array) -> jax.Array:
    return jax.vmap(jax.random.fold_in)(keys_B, data_B)
