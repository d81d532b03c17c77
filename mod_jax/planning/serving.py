"""What the plans of decoding and of prefill have in common: the mesh, what lies where on it, and parts of a report.

Both compile a program of `Sampler` for a model that need not be trained. What no program can tell is how often a routed
block runs. Here each token enters it with the probability `capacity`, whatever the others do (see `expected_passes`).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from mod_jax import sharding
from mod_jax.config import Config, MeshConfig
from mod_jax.errors import ConfigError
from mod_jax.models.blocks import Choice
from mod_jax.models.model import make_model
from mod_jax.planning.report import find_slice
from mod_jax.planning.topology import Product
from mod_jax.sampling import cache as cache_lib
from mod_jax.sampling.choice import Options, make_knobs
from mod_jax.sampling.generate import batch_bucket, bucket
from mod_jax.sampling.programs import Programs, Request, serving_stack, stack_shardings
from mod_jax.sampling.stack import Stack
from mod_jax.trained import as_mesh_config, causal_selection, serving_mesh

PLATFORM = "tpu"


@dataclasses.dataclass(frozen=True)
class Serving:
    """What is planned: sizes as the sampler rounds them, and the devices. `mesh` has one device where there is none."""

    product: Product
    devices: list[jax.Device]
    mesh: Mesh
    notes: list[str]
    selection: str
    batch_size: int
    num_positions: int

    @property
    def place(self) -> jax.Device | Mesh:
        """What the sampler lays its arrays out over."""
        return self.mesh if self.mesh.size > 1 else self.mesh.devices.item()

    @property
    def rows(self) -> int:
        """Rows of a device."""
        return self.batch_size // sharding.row_ways(self.mesh.shape)


def prepare(
    config: Config,
    topology_name: str,
    batch_size: int,
    context: int | None,
    mesh: MeshConfig | Mapping[str, int] | None,
) -> Serving:
    """Checks what is asked for, and rounds it as the sampler does.

    Args:
      context: positions of a row, prompt and new tokens; None: `model.context`.
      mesh: as for `restore`; None: one that uses the whole slice (see `choose_mesh`).

    Raises:
      ConfigError: the slice does not exist, libtpu is missing, or this config cannot be sampled like this.
    """
    if batch_size < 1:
        raise ConfigError(f"--batch={batch_size}: must be >= 1")
    longest = config.model.context
    if context is not None and not 2 <= context <= longest:
        raise ConfigError(f"--context={context}: must be in [2, {longest}], the model's context")
    selection = causal_selection(config)
    product, read_as, devices = find_slice(config, topology_name)
    notes = [read_as] if read_as else []
    if mesh is None:
        mesh = choose_mesh(config, len(devices))
        if len(devices) > 1:
            notes.append(f"the mesh is chosen here, tensor as large as it can be; sample takes it by {_flags(mesh)}")
    found = serving_mesh(config, as_mesh_config(mesh), devices) or sharding.mesh_of((1, 1, 1, 1), devices)
    rows, positions = batch_bucket(batch_size, sharding.row_ways(found.shape)), bucket(context or longest, longest)
    if rows != batch_size:
        notes.append(f"--batch={batch_size} is rounded up to {rows}, as the sampler does")
    if context not in (None, positions):
        notes.append(f"--context={context} is rounded up to {positions}, as the sampler does")
    if config.routing.skipped_keys == "kept":
        notes.append("the weights that make keys and values of bypassed tokens are not in what a step reads")
    return Serving(product, devices, found, notes, selection, rows, positions)


def choose_mesh(config: Config, num_devices: int) -> dict[str, int]:
    """A mesh over all devices: tensor as large as heads and MLPs divide, which reads least weights a chip; the rest
    takes rows apart."""

    def works(tensor: int) -> bool:
        try:
            sharding.check_model(config, dict(data=1, fsdp=1, tensor=tensor, expert=1))
        except ConfigError:
            return False
        return num_devices % tensor == 0

    tensor = max(filter(works, range(1, num_devices + 1)))
    return dict(data=num_devices // tensor, tensor=tensor)


def _flags(sizes: Mapping[str, int]) -> str:
    return " ".join(f"--mesh.{axis}={size}" for axis, size in sizes.items() if size != 1)


class Arguments(NamedTuple):
    """What the programs of a sampler take, as shapes where they lie; `stack` are the weights put together."""

    programs: Programs
    stack: Stack
    weights: list[jax.ShapeDtypeStruct]
    request: Request
    place: Any  # a function of a tree of arrays of rows

    def of_rows(self, *shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
        """int32 arrays of rows."""
        return self.place([jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes])


def make_arguments(config: Config, selection: str, batch_size: int, place: jax.Device | Mesh) -> Arguments:
    """Those of a sampler of this model, on one device or over a mesh."""
    vocab_size = config.model.vocab_size
    model = make_model(config, vocab_size)
    stack = jax.eval_shape(functools.partial(serving_stack, config, model, platform=PLATFORM), model.abstract_params)
    weights, structure = jax.tree.flatten(stack)
    programs = Programs(config, structure, config.capacity_L, vocab_size, 0, PLATFORM)
    on_mesh = isinstance(place, Mesh)
    once = sharding.replicated(place) if on_mesh else SingleDeviceSharding(place)
    rows = sharding.batch_sharding(place) if on_mesh else once

    def choice():
        shape_LE = len(config.expert_depths), config.experts.count
        return Choice(
            selection,
            jnp.zeros(config.num_routed),
            expert_cutoffs_LE=jnp.zeros(shape_LE) if config.experts_choose else None,
        )

    def of_rows():
        options, stop_BV = [Options()] * batch_size, jnp.zeros((batch_size, vocab_size), bool)
        return make_knobs(options), jax.vmap(jax.random.key)(jnp.zeros(batch_size, jnp.uint32)), stop_BV

    request = Request(laid(jax.eval_shape(choice), once), *laid(jax.eval_shape(of_rows), rows))
    lies = jax.tree.leaves(stack_shardings(stack, place)) if on_mesh else [once] * len(weights)
    return Arguments(programs, stack, laid(weights, lies), request, lambda tree: laid(tree, rows))


def laid(tree: Any, shardings: Any) -> Any:
    """The shapes of a tree with where each lies: one sharding for all, or one for each."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _, one=shardings: one, tree)
    return jax.tree.map(lambda a, lies: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=lies), tree, shardings)


def expected_passes(num_tokens: int, capacity: float, per_pass: int, groups: int = 1) -> float:
    """E[max over groups of ceil(n / per_pass)], where each of so many tokens of a group enters with the probability
    `capacity`, and n of them do: the loop of a block goes on until no group has any left.

    Of one token this is the probability that the block runs; of a full block it is the number of passes.
    """
    passes_n = np.ceil(np.arange(num_tokens + 1) / per_pass).astype(int)
    log_n = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, num_tokens + 1)))])
    n = np.arange(num_tokens + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_chance_n = log_n[-1] - log_n - log_n[::-1]
        log_chance_n = log_chance_n + np.where(n > 0, n * np.log(capacity), 0.0)
        log_chance_n = log_chance_n + np.where(n < num_tokens, (num_tokens - n) * np.log1p(-capacity), 0.0)
    at_most_p = np.cumsum(np.bincount(passes_n, weights=np.exp(log_chance_n)))
    return float(np.sum(1 - np.minimum(at_most_p, 1.0)[:-1] ** groups))


# What one chip holds and reads.


def tree_bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def held_bytes(tree: Any) -> int:
    """Bytes that a chip holds of arrays that are laid out."""
    shapes = ((leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(tree))
    return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in shapes)


def read_by_chip(stack: Stack, mesh: Mesh, num_tokens: int) -> Stack:
    """What a chip reads of the weights, if so many tokens of all chips go through all: its part over tensor; over fsdp
    its part too where tokens are sent, and otherwise all parts (see `sharding.moves_tokens`)."""

    def part(weight: nnx.Param, lies: nnx.Param) -> nnx.Param:
        spec = lies.get_value().spec
        split = [axis if axis == "tensor" or (axis == "fsdp" and stays(weight)) else None for axis in spec]
        shape = NamedSharding(mesh, PartitionSpec(*split)).shard_shape(weight.shape)
        return weight.replace(jax.ShapeDtypeStruct(shape, weight.dtype))

    def stays(weight: nnx.Param) -> bool:
        axes = [axis for axis in weight.get_metadata()["out_sharding"] if axis != "layers"]
        sizes = weight.shape[-len(axes) :]
        width = sizes[axes.index("embed")]
        other = int(np.prod(sizes)) // width
        num_in, num_out = (width, other) if axes[0] == "embed" else (other, width)
        return "experts" not in axes and sharding.moves_tokens(num_tokens, num_in, num_out)

    with sharding.within(mesh), sharding.sending_less():
        is_param = dict(is_leaf=lambda leaf: isinstance(leaf, nnx.Param))
        return jax.tree.map(part, stack, stack_shardings(stack, mesh), **is_param)


def cache_by_chip(config: Config, arguments: Arguments, serving: Serving, slots: tuple[int, ...]) -> cache_lib.Cache:
    """The shapes of the part of a cache that a chip holds."""
    cache = jax.eval_shape(lambda: cache_lib.init_cache(config, serving.batch_size, slots))
    lies = arguments.programs.state_shardings(serving.mesh).cache

    def part(array, lies):
        lies = getattr(lies, "sharding", lies)  # of a `Format`
        return jax.ShapeDtypeStruct(lies.shard_shape(array.shape), array.dtype)

    return jax.tree.map(part, cache, lies)


def memory_by_count(config: Config, arguments: Arguments, serving: Serving, slots: tuple[int, ...]) -> dict[str, float]:
    """Bytes that a chip has, and needs for weights and caches."""
    model = make_model(config, config.model.vocab_size)
    params = laid(
        model.abstract_params, sharding.param_shardings(serving.mesh, model.logical_specs, model.abstract_params)
    )
    weights, full = held_bytes(arguments.weights), (serving.num_positions,) * len(slots)
    return {
        "available": serving.product.chip.hbm_bytes,
        "weights": weights,
        "cache": tree_bytes(cache_by_chip(config, arguments, serving, slots)),
        "dense_cache": tree_bytes(cache_by_chip(config, arguments, serving, full)),
        "loading": held_bytes(params) + weights,  # a checkpoint is float32, and rounded beside itself
    }
