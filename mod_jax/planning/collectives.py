"""The collectives of a compiled program, read from its text: what moves between devices, and over which mesh axes.

    compiled = jax.jit(train_step).lower(state, batch).compile()
    moved = find_collectives(compiled.as_text(), dict(mesh.shape))

XLA numbers devices by their place in `mesh.devices.flat` and spells groups of them in four ways: explicit
`{{0,1},{2,3}}`, iota `[2,2]<=[4]T(0)`, mesh `mesh['a'=2,'b'=2] {'a'}`, and pairs of source and target. A fifth one
raises ValueError: what cannot be read is never passed over. The body of a loop stands in the text once, however often
it runs.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator

import numpy as np

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_CALL = re.compile(rf" = (?P<result>.+?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\((?P<rest>.*)")
_BITS = {"pred": 8, "token": 0}  # the first number of any other name is its size
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One array that comes out of a collective on each device; a collective of several arrays gives several of these.

    `axes` are the mesh axes along which its groups of devices extend, in mesh order; () if each device is alone.
    `group` is one of these groups, `source` the name of the operation in the Python program, if the text has it.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    axes: tuple[str, ...]
    group: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    source: str = dataclasses.field(default="", compare=False)


def find_collectives(hlo_text: str, mesh_shape: dict[str, int]) -> list[Collective]:
    """Every collective in the text of a compiled program that runs on a mesh of these axes.

    Raises:
      ValueError: if the device groups of a collective are spelt in a way that this parser does not know.
    """
    return [collective for line in hlo_text.splitlines() for collective in line_collectives(line, mesh_shape)]


def line_collectives(line: str, mesh_shape: dict[str, int]) -> list[Collective]:
    """The collectives of one line; see `find_collectives`."""
    match = _CALL.search(line)
    if match is None:
        return []
    groups = device_groups(match["rest"], math.prod(mesh_shape.values()))
    axes, group = spanned_axes(groups, mesh_shape), tuple(max(groups, key=lambda group: len(set(group))))
    source = re.search(r'op_name="((?:[^"\\]|\\.)*)"', match["rest"])
    return [
        Collective(
            match["kind"],
            dtype,
            shape,
            math.ceil(math.prod(shape) * bits(dtype) / 8),
            axes,
            group,
            source[1] if source else "",
        )
        for dtype, shape in _results(match["result"], match["kind"], bool(match["start"]))
    ]


def device_groups(attributes: str, num_devices: int) -> list[list[int]]:
    """The groups of device numbers in the attributes of a collective; for a permute, its (source, target) pairs."""
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,{}]*)\}\}", attributes):
        return [_ints(group) for group in match[1].split("},{")]
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes):
        return _iota(match[2]).reshape(_ints(match[1])).tolist()
    if match := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}", attributes):
        return _mesh_groups(*match.groups())
    if re.search(r"replica_groups=\{\}", attributes):
        return [list(range(num_devices))]
    raise ValueError(f"cannot read the device groups of a collective: {attributes[:300]!r}")


def spanned_axes(groups: list[list[int]], mesh_shape: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes along which members of one group differ."""
    coordinates = np.array(np.unravel_index(np.arange(math.prod(mesh_shape.values())), tuple(mesh_shape.values())))
    return tuple(
        axis for axis, along in zip(mesh_shape, coordinates, strict=True) if any(np.ptp(along[g]) > 0 for g in groups)
    )


def _mesh_groups(axes: str, device_ids: str | None, grouped: str) -> list[list[int]]:
    """`'x'=4,'y'=2` with the devices in this order, grouped along `'y'`, or along the part `'x':(2)2` of an axis.

    Part (p)s of an axis of size n is the middle one when n is split into p, s, n / (p * s).
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    ids = np.arange(math.prod(sizes.values())) if device_ids is None else _iota(device_ids).ravel()
    parts = {name: (1, size) for name, size in sizes.items()}
    grouped_names = []
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", grouped):
        grouped_names.append(name)
        if before:
            parts[name] = (int(before), int(size))
    split = [(b, s, sizes[name] // (b * s)) for name, (b, s) in parts.items()]
    last = [3 * i + 1 for i, name in enumerate(sizes) if name in grouped_names]
    first = [i for i in range(3 * len(sizes)) if i not in last]
    group_size = math.prod(parts[name][1] for name in grouped_names)
    return ids.reshape([n for triple in split for n in triple]).transpose(first + last).reshape(-1, group_size).tolist()


def _iota(text: str) -> np.ndarray:
    """`[2,4]T(1,0)`: 0 .. 7 as a 2 x 4 array, transposed. A plain list `0,2,1,3` is taken as it is."""
    match = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if match is None:
        return np.array(_ints(text))
    dims = _ints(match[1])
    array = np.arange(math.prod(dims)).reshape(dims)
    return array.transpose(_ints(match[2])) if match[2] else array


def _results(result: str, kind: str, is_start: bool) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of each array that comes out. An asynchronous start lists its operands first.

    The parts of an all-to-all are one array.
    """
    arrays = [(dtype, tuple(_ints(shape))) for dtype, shape in _ARRAY.findall(result)]
    if is_start and kind != "all-reduce":
        arrays = [array for array in arrays if array != ("u32", ())]  # the handles of a permute
        arrays = arrays[len(arrays) // 2 :]
    if kind == "all-to-all" and len(set(arrays)) == 1:  # a CPU's gives each part that comes as an array of its own
        dtype, shape = arrays[0]
        arrays = [(dtype, (len(arrays), *shape) if len(arrays) > 1 else shape)]
    return arrays


def bits(dtype: str) -> int:
    """Size of one element; a token only orders operations."""
    return _BITS[dtype] if dtype in _BITS else int(re.search(r"\d+", dtype)[0])


def _ints(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


# Which collectives move tokens.

TILE = 8  # rows of a TPU's memory tile: parts that are no multiple of it are padded before they are sent


def is_exchange(collective: Collective) -> bool:
    """Whether it takes tokens to their experts, or back: an all-to-all over the mesh axis of experts alone."""
    return collective.kind == "all-to-all" and collective.axes == ("expert",)


def token_movers(
    moved: Iterable[Collective], params: Iterable[tuple[tuple[int, ...], tuple[int, ...]]], batch_axes: Iterable[str]
) -> list[Collective]:
    """Collectives over the batch axes that are neither a weight, nor its gradient, nor a sum of up to 128 numbers, nor
    an exchange with experts.

    Rows of the batch have nothing to say to each other but their gradients, so whatever is left moves tokens, scores
    or routing indices between them. A weight is known by its shape: whole or split as it is stored, of all units or of
    one, axes in any order, neighbouring ones merged, parts side by side or one after the other, padded or not; or two
    weights of one shape, keys' and values' for example, sent as one array. What else has such a shape passes for one.

    Args:
      params: whole shape and shape of one device's part, per parameter.
    """
    alike = collections.Counter((tuple(whole), tuple(part)) for whole, part in params)
    shapes = {variant for whole, part in alike for variant in _variants(whole, part)}
    # As they are, without any other view: that would let pass half of all that could move.
    for (whole, _), count in alike.items():
        if count > 1:
            shapes |= {tuple(frozenset({size}) for size in (2, *axes)) for axes in (whole, whole[1:]) if len(axes) > 2}
    return [
        c
        for c in moved
        if set(batch_axes) & set(c.axes)
        and not is_exchange(c)
        and math.prod(c.shape) > 128
        and (not re.match("b?f", c.dtype) or not any(_has_sizes(c.shape, variant) for variant in shapes))
    ]


def _variants(whole: tuple[int, ...], part: tuple[int, ...]) -> Iterator[tuple[frozenset[int], ...]]:
    """The sizes that each axis of a parameter may have, for every way to see it."""
    seen = []  # per axis: as one axis or, if it is split, as two, the devices and the part of each
    for size, size_part in zip(whole, part, strict=True):
        ways, padded = size // size_part, -(-size_part // TILE) * TILE
        one = (frozenset({size, size_part, *([padded, ways * padded] if ways > 1 else [])}),)
        seen.append([one, (frozenset({ways}), frozenset({size_part, padded}))] if ways > 1 else [one])
    for start in range(min(2, len(seen))):  # all units, or one
        for choice in itertools.product(*seen[start:]):
            axes = [axis for axis in itertools.chain(*choice) if axis != {1}]
            for cuts in itertools.product((False, True), repeat=max(0, len(axes) - 1)):
                merged = axes[:1]
                for axis, cut in zip(axes[1:], cuts, strict=True):
                    if cut:
                        merged.append(axis)
                    else:
                        merged[-1] = frozenset(a * b for a in merged[-1] for b in axis)
                yield tuple(merged)


def _has_sizes(shape: tuple[int, ...], axes: tuple[frozenset[int], ...]) -> bool:
    sizes = [size for size in shape if size != 1]
    return len(sizes) == len(axes) and any(
        all(size in axis for size, axis in zip(order, axes, strict=True)) for order in itertools.permutations(sizes)
    )
