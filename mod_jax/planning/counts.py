"""Memory and time of a train step, counted before anything is compiled. The search needs them to know what to compile.

They are rougher than a plan: a compiler reuses memory, fuses and overlaps as it likes. Memory is the sum of

    state        parameters and moments, as they lie on the mesh
    gradients    float32, laid out like their parameters; twice where micro-batches are added up
    kept         what the forward pass leaves for the backward pass, by `model.remat`: the residuals of JAX's own
                 differentiation, of a model that has a chip's share of heads, MLP and vocabulary
    at work      the same of one unit of blocks with nothing recomputed, and the unit's weights, gathered
    loss         the logits of one chunk with their gradient, the output weight, gathered, with its own

and the time that of matrix products, of bytes to and from HBM and of collectives, one after the other.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from mod_jax import routing, sharding, tuning
from mod_jax.config import Config, MeshConfig
from mod_jax.models import flops
from mod_jax.models.decoder import repeating_unit
from mod_jax.models.model import make_model
from mod_jax.planning import roofline, topology
from mod_jax.planning.collectives import Collective
from mod_jax.planning.topology import Product
from mod_jax.training import losses, prepare

FLOAT = 4  # bytes of a parameter, moment, gradient or logit


class Count(NamedTuple):
    """Bytes that a chip must hold, and seconds of a step in which no collective hides behind work."""

    memory: float
    seconds: float


class _Sizes(NamedTuple):
    """Bytes on one chip of a mesh: of the train state; of the parameters; of those gathered over fsdp, all of them and
    the table of the vocabulary."""

    state: int
    parameters: int
    gathered: float
    table: float


def count(config: Config, product: Product, mesh: Mesh) -> Count:
    """What a step of `config`, which must be laid out for this mesh, would take on a chip of this slice."""
    ways, micro = dict(mesh.shape), config.train.accumulation
    width = 2 if config.model.dtype == "bfloat16" else 4
    rows = config.train.batch_size // micro // (ways["data"] * ways["fsdp"] * ways["expert"])
    with jax.set_mesh(mesh):
        chunks = losses.num_chunks(config.train.batch_size // micro, config.data.seq_len, config.train.loss_chunk)
    units = max(1, len(config.blocks) // repeating_unit(config.blocks))
    sizes = _sizes(_without_steps(config), mesh)
    device = mesh.devices.flat[0]
    kept, everything = (rows * _kept(config, ways["tensor"], remat, device) for remat in (config.model.remat, "none"))
    weights = sizes.gathered / FLOAT * width
    logits = rows * config.data.seq_len / chunks * _part(config.model.vocab_size, ways["tensor"]) * (FLOAT + width)

    memory = (
        sizes.state
        + sizes.parameters * (1 if micro == 1 else 2)
        + kept
        + (everything + weights) / units
        + sizes.table * (1 + width / FLOAT)
        + logits
    )
    products = flops.train_flops(config, config.model.vocab_size) + recomputed_flops(config)
    compute = config.train.batch_size * products / tuning.peak_flops(product.chip.kind) / mesh.size
    # What blocks make is written and read, and read once more on the way back; made again, once more; what is kept is
    # copied to its place and back. Weights are written and read forward, backward and again. The table's gradient and
    # the logits go through memory once a chunk.
    again = config.model.remat != "none"
    moved = 2 * sizes.state + micro * (
        everything * (3 + again) + 2 * kept + weights * (3 + 3 * again) + chunks * (2 * sizes.table + 3 * logits)
    )
    links = micro * sum(
        roofline.bytes_sent(collective) / roofline.bandwidth(collective.group, product, topology.coordinates(mesh))
        for collective in _collectives(config, mesh, sizes, rows, width)
        if len(collective.group) > 1
    )
    return Count(memory, compute + moved / product.chip.hbm_bandwidth + links)


def recomputed_flops(config: Config) -> float:
    """FLOPs of one row that the backward pass spends on what the forward pass did before."""
    if config.model.remat == "none":
        return 0.0
    forward = flops.forward_flops(config, config.model.vocab_size, unembed=False)
    return forward.attention if config.model.remat == "dots" else forward.total


def _kept(config: Config, tensor: int, remat: str, device: jax.Device) -> float:
    """Bytes that a row leaves on one of `tensor` chips. Some are split over these, the others on each of them: traced
    for one chip and for two, which takes a second each, it is known for any even number."""
    one = kept_per_row(_share(config, 1, remat), device)
    if tensor == 1:
        return one
    split = 2 * (one - kept_per_row(_share(config, 2, remat), device))
    return one - split + split / tensor


@functools.cache
def kept_per_row(config: Config, device: jax.Device) -> int:
    """Bytes that the forward pass of one row leaves for its backward pass on `device`, parameters not counted.

    Residuals of two rows less those of one: what does not grow with the rows is a weight.
    """
    mesh = jax.make_mesh(
        (1,) * len(sharding.AXES), sharding.AXES, (AxisType.Auto,) * len(sharding.AXES), devices=[device]
    )
    one, two = (_residual_bytes(config, mesh, rows) for rows in (1, 2))
    return two - one


def _residual_bytes(config: Config, mesh: Mesh, num_rows: int) -> int:
    """Bytes of all that differentiation keeps of a forward pass; nothing is computed."""
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=num_rows))
    task = prepare.make_task(config, config.model.vocab_size)
    keys_B = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_rows))
    batch = task.inputs | {"keys_B": keys_B if config.routing.score == "stochastic" else None}

    def backward(params, batch):
        return jax.vjp(lambda params: task.loss_sums(params, batch), params, has_aux=True)[1]

    with jax.set_mesh(mesh):
        residuals = jax.eval_shape(backward, task.model.abstract_params, batch)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(residuals))


def _share(config: Config, tensor: int, remat: str) -> Config:
    """The model that one of `tensor` chips sees of its rows: a part of the heads, of the MLP and of the vocabulary. All
    that its residuals do not depend on is brought to one value, so that each is traced once."""
    model = config.model
    part = dataclasses.replace(
        model,
        num_heads=model.num_heads // tensor,
        num_kv_heads=model.num_kv_heads // tensor,
        mlp_dim=model.mlp_dim // tensor,
        vocab_size=_part(model.vocab_size, tensor),
        remat=remat,
    )
    experts = dataclasses.replace(config.experts, hidden=config.experts.hidden // tensor)
    train = dataclasses.replace(config.train, batch_size=1, accumulation=1, loss_chunk=0)
    return dataclasses.replace(config, model=part, experts=experts, train=train, mesh=MeshConfig())


def _part(vocab_size: int, tensor: int) -> int:
    """Ids on each of `tensor` chips; a vocabulary that does not divide stays whole."""
    return vocab_size if vocab_size % tensor else vocab_size // tensor


def _without_steps(config: Config) -> Config:
    """The config without what the train state does not depend on."""
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, remat="none"),
        train=dataclasses.replace(config.train, batch_size=1, accumulation=1, loss_chunk=0),
        mesh=MeshConfig(),
    )


@functools.cache
def _sizes(config: Config, mesh: Mesh) -> _Sizes:
    state = prepare.abstract_state(config, make_model(config, config.model.vocab_size), mesh)

    def here(tree) -> int:
        return sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
        )

    def gathered(tree) -> float:
        ways = [mesh.shape["fsdp"] if "fsdp" in leaf.sharding.spec else 1 for leaf in jax.tree.leaves(tree)]
        return sum(here(leaf) * n for leaf, n in zip(jax.tree.leaves(tree), ways, strict=True))

    return _Sizes(here(state), here(state.params), gathered(state.params), gathered(state.params["embedder"]))


def _collectives(config: Config, mesh: Mesh, sizes: _Sizes, rows: int, width: int) -> list[Collective]:
    """What one micro-batch sends: weights to and gradients from each part of them; activations between parts of a
    block; tokens to their experts."""

    def collective(kind: str, axes: tuple[str, ...], size: float) -> Collective:
        return Collective(kind, "", (), int(size), axes, _group(mesh, axes))

    # Attention's and the MLP's outputs, and their inputs' gradients, are sums over tensor; made again, outputs are too.
    sums = 6 if config.model.remat == "full" else 4
    tokens, routed_to_experts = 0.0, 0.0
    for block in config.blocks:
        own = routing.tokens_kept(config.data.seq_len, block.capacity) if block.routed else config.data.seq_len
        tokens += own * sum(place is not None for place in (block.mixer, block.channel)) / 2
        routed_to_experts += own * config.experts.chosen * config.experts.capacity if block.has_experts else 0
    row = rows * config.model.width * width
    return [
        collective("all-gather", ("fsdp",), sums / 2 * sizes.gathered / FLOAT * width),
        collective("reduce-scatter", ("fsdp",), sizes.gathered),
        collective("all-reduce", ("data",), sizes.parameters),
        collective("all-reduce", ("tensor",), row * (sums * tokens + 2 * config.data.seq_len)),
        collective("all-to-all", ("expert",), row * sums * routed_to_experts),
    ]


def _group(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Numbers of the first device, and of those that differ from it along these axes alone."""
    numbers = np.arange(mesh.size).reshape(mesh.devices.shape)
    return tuple(numbers[tuple(slice(None) if axis in axes else 0 for axis in mesh.axis_names)].flat)
