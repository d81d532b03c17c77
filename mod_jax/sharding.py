"""One device mesh (data, fsdp, tensor, expert), how a parameter is declared, and where each array lives on the mesh.

Rows of a batch are split over data, fsdp and expert together; parameters and optimizer moments over fsdp, expert and
tensor, by the logical axes that each parameter declares; everything else is replicated. A *logical axis* names the
meaning of one dimension of an array ("embed", "heads"); `ShardingRules` says which mesh axis, if any, it is split over.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mod_jax import host
from mod_jax.config import Config, MeshConfig
from mod_jax.errors import ConfigError

AXES = ("data", "fsdp", "tensor", "expert")


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Logical axis -> mesh axes. None: not split. The positions of a row are never split: the router ranks them."""

    batch: tuple[str, ...] | None = ("data", "fsdp", "expert")
    vocab: str | None = "tensor"
    embed: str | None = "fsdp"
    heads: str | None = "tensor"
    kv_heads: str | None = "tensor"
    mlp: str | None = "tensor"
    experts: str | None = "expert"
    expert_rows: tuple[str, ...] | None = ("data", "fsdp")  # the batch, once tokens have moved to their experts
    layers: str | None = None

    def spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...], mesh_shape: dict[str, int]) -> PartitionSpec:
        """Mesh axes of an array with these logical axes. A vocabulary that does not divide evenly stays whole."""
        entries = [None if axis is None else getattr(self, axis) for axis in axes]
        for i, axis in enumerate(axes):
            if axis == "vocab" and entries[i] is not None and shape[i] % mesh_shape[entries[i]]:
                entries[i] = None
        return PartitionSpec(*entries)


RULES = ShardingRules()

Initializer = Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]


# Of parameters. "matrix": weight decay, and rounded to the compute dtype. "vector": norms. "lora": what is added to
# matrices (`models/lora.py`). The others route. They have a learning rate of their own and, but for biases, a decay.
GROUPS = ("matrix", "vector", "router", "predictor", "predictor_bias", "lora")


def param(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], init: Initializer, group: str = "matrix"
) -> nnx.Param:
    """Declares one float32 parameter: all that other code asks about it is said here.

    Args:
      axes: the meaning of each dimension (see `ShardingRules`).
      group: how it is trained and stored for sampling (see `GROUPS`). Never guessed from the shape: stacking blocks
        turns norm vectors into matrices.
    """
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} and axes {axes} differ in length")
    if group not in GROUPS:
        raise ValueError(f"group {group!r}: must be one of {', '.join(GROUPS)}")
    return nnx.Param(init(rngs.params(), shape, jnp.float32), out_sharding=axes, eager_sharding=False, group=group)


def constrain(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """Fixes how an activation is laid out over the current mesh; does nothing without one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, RULES.spec(axes, x.shape, dict(mesh.shape)))


_SENDS_LESS = contextvars.ContextVar("sends_less", default=False)


@contextlib.contextmanager
def sending_less() -> Iterator[None]:
    """Products that are traced inside send tokens over fsdp where those are less than the weight.

    For sampling. In decoding, a token of each row would otherwise send the whole model. In training tokens are many: it
    sends weights alone, and what a plan finds of tokens between rows of a batch is a fault.
    """
    reset = _SENDS_LESS.set(True)
    try:
        yield
    finally:
        _SENDS_LESS.reset(reset)


def moves_tokens(num_tokens: int, num_in: int, num_out: int) -> bool:
    """Whether a product with a weight [num_in, num_out] that is split over fsdp sends tokens, and not the weight.

    Tokens are sent once as they come in and, as sums of parts, twice as they go out.
    """
    split = _SENDS_LESS.get() and jax.sharding.get_abstract_mesh().shape.get("fsdp", 1) > 1
    return split and num_tokens * (num_in + 2 * num_out) <= num_in * num_out


def bring_together(x: jax.Array, last: str | None = None) -> jax.Array:
    """The rows of all devices along fsdp on each of these; `last`: what the last dimension means, if that is known."""
    rows = tuple(axis for axis in RULES.batch if axis != "fsdp")
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    free = free if last is None else [None] * (x.ndim - 2) + [getattr(RULES, last)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(rows, *free))


def constrain_rows(x: jax.Array) -> jax.Array:
    """Splits the first dimension over the rows of the current mesh, and leaves the others to the compiler."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(RULES.batch, *free))


def mesh_shape(config: Config, num_devices: int) -> tuple[int, ...]:
    """Sizes of (data, fsdp, tensor, expert) on `num_devices` devices, with -1 resolved, for training.

    Raises:
      ConfigError: if the devices, the batch or the model do not divide evenly.
    """
    sizes = mesh_sizes(config.mesh, num_devices)
    check_rows(config, sizes)
    check_model(config, sizes)
    return tuple(sizes.values())


def mesh_sizes(mesh: MeshConfig, num_devices: int, key: str = "config.mesh") -> dict[str, int]:
    """Size of each mesh axis on `num_devices` devices, with -1 resolved. `key`: what errors call the mesh.

    Raises:
      ConfigError: if the devices do not divide evenly, or do not suffice.
    """
    sizes = {name: getattr(mesh, name) for name in AXES}
    fixed = math.prod(size for size in sizes.values() if size > 0)
    for name, size in sizes.items():
        if size == -1:
            if num_devices % fixed:
                raise ConfigError(f"{key}.{name} = -1: {num_devices} devices do not divide by the others, {fixed}")
            sizes[name] = num_devices // fixed
    total = math.prod(sizes.values())
    if total > num_devices or (total < num_devices and jax.process_count() > 1):
        product = " * ".join(f"mesh.{name} = {size}" for name, size in sizes.items())
        raise ConfigError(f"{key.removesuffix('mesh')}{product}: needs {total} devices, there are {num_devices}")
    return sizes


def check_rows(config: Config, sizes: Mapping[str, int]) -> None:
    """Raises ConfigError unless the rows of a micro-batch divide evenly over a mesh of these sizes."""
    rows, batch_ways = config.train.batch_size // config.train.accumulation, row_ways(sizes)
    if rows % batch_ways:
        raise ConfigError(
            f"config.train.batch_size = {config.train.batch_size}: each of {config.train.accumulation} micro-batches "
            f"has {rows} rows, which mesh.data * mesh.fsdp * mesh.expert = {batch_ways} must divide"
        )


def check_model(config: Config, sizes: Mapping[str, int]) -> None:
    """Raises ConfigError unless the weights divide evenly over a mesh of these sizes."""
    model = config.model
    experts = ("experts.count", config.experts.count, "expert"), ("experts.hidden", config.experts.hidden, "tensor")
    for key, size, axis in (
        ("model.width", model.width, "fsdp"),
        ("model.num_heads", model.num_heads, "tensor"),
        ("model.num_kv_heads", model.num_kv_heads, "tensor"),
        ("model.mlp_dim", model.mlp_dim, "tensor"),
        *(experts if config.expert_depths else ()),
    ):
        if size % sizes[axis]:
            raise ConfigError(f"config.{key} = {size}: must be divisible by mesh.{axis} = {sizes[axis]}")


def row_ways(sizes: Mapping[str, int]) -> int:
    """Into how many parts a mesh of these sizes splits the rows of a batch."""
    return math.prod(sizes.get(axis, 1) for axis in RULES.batch)


def make_mesh(config: Config, devices: list | None = None) -> Mesh:
    """The run's mesh over `devices` (default: all; the first ones when the config asks for fewer)."""
    devices = jax.devices() if devices is None else devices
    return mesh_of(mesh_shape(config, len(devices)), devices)


def mesh_of(shape: tuple[int, ...], devices: list) -> Mesh:
    """A mesh of these sizes over the first of these devices.

    Several CPU devices load no programs from the compilation cache: a loaded program may start its collectives in
    another order on each device, and then waits forever (jax 0.10.2 and 0.12).
    """
    devices = devices[: math.prod(shape)]
    if len(devices) > 1 and devices[0].platform == "cpu":
        host.load_no_programs()
    try:
        return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
    except NotImplementedError:  # a mesh axis is no product of whole axes of the machine: some neighbours are far apart
        arranged = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(arranged, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def within(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """What runs inside is laid out over this mesh; None: it stays on one device."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def in_groups(function: Callable) -> Callable:
    """Applies a function of arrays of rows to the rows of each device apart, where a mesh splits them.

    The leading dimension of whatever goes in and comes out is then that of all groups together. An index of a row
    counts from the first of its group. So a gather of rows, or a scatter, moves nothing between devices.
    """
    groups = num_groups()
    if groups == 1:
        return function

    def split(array: jax.Array) -> jax.Array:
        array = array.reshape(groups, array.shape[0] // groups, *array.shape[1:])
        return constrain_rows(array)

    def join(array: jax.Array) -> jax.Array:
        return constrain_rows(array.reshape(-1, *array.shape[2:]))

    def run(*arrays):
        return jax.tree.map(join, jax.vmap(function)(*jax.tree.map(split, arrays)))

    return run


def num_groups() -> int:
    """Into how many parts the current mesh splits rows; 1 without one."""
    return row_ways(jax.sharding.get_abstract_mesh().shape)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over data, fsdp and expert; the positions of a row are never split, since the router ranks them."""
    return NamedSharding(mesh, PartitionSpec(RULES.batch))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def param_shardings(mesh: Mesh, logical_specs, abstract_params):
    """NamedSharding per parameter, from the tree of logical axes that the model declares."""

    def place(logical: PartitionSpec, leaf):
        axes = tuple(logical) + (None,) * (leaf.ndim - len(logical))
        return NamedSharding(mesh, RULES.spec(axes, leaf.shape, dict(mesh.shape)))

    return jax.tree.map(place, logical_specs, abstract_params, is_leaf=lambda s: isinstance(s, PartitionSpec))


def opt_state_shardings(mesh: Mesh, optimizer: optax.GradientTransformation, abstract_opt_state, params_sharding):
    """Moments follow their parameter, of which a frozen one has none; counters are replicated."""

    def has_none(leaf) -> bool:
        return isinstance(leaf, optax.MaskedNode)

    return optax.tree.map_params(
        optimizer,
        lambda moment, sharding: moment if has_none(moment) else sharding,
        abstract_opt_state,
        params_sharding,
        transform_non_params=lambda _: replicated(mesh),
        is_leaf=has_none,
    )


def local_rows(mesh: Mesh, batch_size: int, process: int | None = None) -> np.ndarray:
    """The rows of a global batch that the devices of one process hold, in order. Default: this process.

    They need not stand together. A host of a TPU pod owns a tile of chips, while the mesh numbers them line by line.
    """
    process = jax.process_index() if process is None else process
    indices = batch_sharding(mesh).devices_indices_map((batch_size,))
    held = [range(batch_size)[index] for device, (index,) in indices.items() if device.process_index == process]
    return np.unique(np.concatenate(held))


def put_batch(mesh: Mesh, batch: dict, batch_size: int) -> dict:
    """Makes global arrays [batch_size, ...] from this process's `local_rows`."""
    sharding, rows = batch_sharding(mesh), local_rows(mesh, batch_size)

    def put(local: np.ndarray) -> jax.Array:
        def shard(index: tuple[slice, ...]) -> np.ndarray:
            wanted = range(batch_size)[index[0]]  # rows that follow each other in the batch do so in `local`
            first = np.searchsorted(rows, wanted[0])
            return local[first : first + len(wanted)]

        # JAX's make_array_from_process_local_data refuses a mesh on which two processes share some of their rows only.
        return jax.make_array_from_callback((batch_size, *local.shape[1:]), sharding, shard)

    return {name: put(local) for name, local in batch.items()}
