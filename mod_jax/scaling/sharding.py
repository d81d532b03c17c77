"""One device mesh (data, fsdp, tensor), and where each array of a training run lives on it.

Rows of a batch are split over data and fsdp together; parameters and optimizer moments over fsdp and tensor, by the
logical axes that each parameter declares (`mod_jax.models.layers.ShardingRules`); everything else is replicated.
"""

import math

import jax
import optax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mod_jax.config import Config, ConfigError
from mod_jax.models.layers import RULES

AXES = ("data", "fsdp", "tensor")


def mesh_shape(config: Config, num_devices: int) -> tuple[int, int, int]:
    """Sizes of (data, fsdp, tensor) on `num_devices` devices, with -1 resolved.

    Raises:
      ConfigError: if the devices, the batch or the model do not divide evenly.
    """
    sizes = {name: getattr(config.mesh, name) for name in AXES}
    fixed = math.prod(size for size in sizes.values() if size > 0)
    for name, size in sizes.items():
        if size == -1:
            if num_devices % fixed:
                raise ConfigError(
                    f"config.mesh.{name} = -1: {num_devices} devices do not divide by the others, {fixed}"
                )
            sizes[name] = num_devices // fixed
    total = math.prod(sizes.values())
    if total > num_devices or (total < num_devices and jax.process_count() > 1):
        product = " * ".join(f"mesh.{name} = {size}" for name, size in sizes.items())
        raise ConfigError(f"config.{product}: needs {total} devices, there are {num_devices}")

    model, rows = config.model, config.train.batch_size // config.train.accumulation
    batch_ways = sizes["data"] * sizes["fsdp"]
    if rows % batch_ways:
        raise ConfigError(
            f"config.train.batch_size = {config.train.batch_size}: each of {config.train.accumulation} micro-batches "
            f"has {rows} rows, which mesh.data * mesh.fsdp = {batch_ways} must divide"
        )
    for key, size, axis in (
        ("model.width", model.width, "fsdp"),
        ("model.num_heads", model.num_heads, "tensor"),
        ("model.num_kv_heads", model.num_kv_heads, "tensor"),
        ("model.mlp_dim", model.mlp_dim, "tensor"),
    ):
        if size % sizes[axis]:
            raise ConfigError(f"config.{key} = {size}: must be divisible by mesh.{axis} = {sizes[axis]}")
    return tuple(sizes.values())


def make_mesh(config: Config, devices: list | None = None) -> Mesh:
    """The run's mesh over `devices` (default: all; the first ones when the config asks for fewer)."""
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(config, len(devices))
    devices = devices[: math.prod(shape)]
    try:
        return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)
    except NotImplementedError:  # a mesh axis is no product of whole axes of the machine: some neighbours are far apart
        arranged = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(arranged, AXES, axis_types=(AxisType.Auto,) * 3)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over data and fsdp; the positions of a row are never split, since the router ranks them."""
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
    """Moments follow their parameter; counters are replicated."""
    return optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        abstract_opt_state,
        params_sharding,
        transform_non_params=lambda _: replicated(mesh),
    )


def local_rows(mesh: Mesh, batch_size: int) -> slice:
    """The rows of a global batch that this process's devices hold."""
    indices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,))
    bounds = [index[0].indices(batch_size)[:2] for index in indices.values()]
    return slice(min(start for start, _ in bounds), max(stop for _, stop in bounds))


def put_batch(mesh: Mesh, batch: dict, batch_size: int) -> dict:
    """Makes global arrays [batch_size, ...] from this process's `local_rows`."""
    sharding = batch_sharding(mesh)
    return {
        name: jax.make_array_from_process_local_data(sharding, rows, (batch_size, *rows.shape[1:]))
        for name, rows in batch.items()
    }
