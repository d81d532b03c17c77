"""What a compiled program does in one step, read from its text: matrix FLOPs, HBM traffic and collectives, on one chip.

The compiler's own totals cannot be used as they are. `cost_analysis()` counts the body of a loop once however often it
runs, a custom call as nothing, and the operand of a gather in full; `optimal_seconds` besides loses one second per
ConcatBitcast call. So the text is read here: every loop body is multiplied by its trip count, and a slice is charged
for what it takes, not for the array that it takes it from.

Vocabulary. A *computation* is a named block of the text, an *operation* one of its lines. A computation is *run* by the
entry, by a loop or by a call, and *fused* if it is the inside of one operation. TPU programs write a convolution for
every matrix product, mark what stays in on-chip memory by S(n) in the layout, and spread one asynchronous collective
over a chain of fusions that repeat its channel.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterator

from mod_jax.planning.collectives import Collective, bits, line_collectives

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_OPERATION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([^{}]*)\})?")

# Operations that only name, group or wait for arrays which others have produced.
_FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id"),
    *("replica-id", "while", "conditional", "call", "custom-call", "infeed", "outfeed"),
)
_SLICES = ("dynamic-slice", "slice", "gather")
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # operation -> which operand is written
_COLLECTIVE = re.compile(r"all-|reduce-scatter|collective-|ragged-|async-")
# Loops over the parts of a weight, which multiply one while the next is on its way.
_COMPILERS_LOOPS = ("windowed_dot_general", "wide.windowed_dot_general")
_SPLASH = re.compile(r"splash_mha_(fwd|dq|dkv)_")
_ALIASES = ("bitcast", "reshape", "get-tuple-element", "copy-done", "opt-barrier")


@dataclasses.dataclass(frozen=True)
class Array:
    dtype: str
    shape: tuple[int, ...]
    in_hbm: bool

    @property
    def bytes(self) -> int:
        return math.ceil(math.prod(self.shape) * bits(self.dtype) / 8)


@dataclasses.dataclass(frozen=True)
class Operation:
    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    rest: str
    line: str

    @property
    def source(self) -> str:
        """Its name in the Python program; "" if the text has none."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return match[1] if match else ""

    def called(self, attribute: str) -> str:
        """The computation that `calls=`, `body=` or `condition=` names; "" if none."""
        match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.rest)
        return match[1] if match else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    name: str
    operations: dict[str, Operation]
    root: str

    @property
    def parameters(self) -> dict[int, Operation]:
        return {int(o.rest.split(")")[0]): o for o in self.operations.values() if o.opcode == "parameter"}


@dataclasses.dataclass(frozen=True)
class Run:
    """One operation with what it costs each time, and how many times a step runs it."""

    operation: Operation
    times: float
    flops: float
    hbm_bytes: float


@dataclasses.dataclass(frozen=True)
class Step:
    """Everything that one step does on one chip. `moved` pairs each collective with how often it runs.

    `trip_counts` are those of loops in the Python program; the compiler makes others. `unknown_loops` have no constant
    trip count; their bodies are counted once. `sorts` counts runs of a sort (routing's, mostly), `kernels` those of a
    Pallas kernel whose products are not known here: the text does not show them, and they count as none.
    """

    runs: tuple[Run, ...]
    moved: tuple[tuple[Collective, float], ...]
    trip_counts: tuple[int, ...]
    unknown_loops: int
    sorts: float
    kernels: float

    @property
    def flops(self) -> float:
        return sum(run.times * run.flops for run in self.runs)

    @property
    def hbm_bytes(self) -> float:
        return sum(run.times * run.hbm_bytes for run in self.runs)


def read_step(
    text: str, mesh_shape: dict[str, int], *, of_loop: bool = False, odds: Callable[[str], float] | None = None
) -> Step:
    """Reads the text of a compiled and scheduled program that runs on a mesh of these axes.

    Args:
      of_loop: a step is not the whole program but one trip of its loop without a constant trip count.
      odds: by the name of an operation in the Python program ("jit(f)/while/body/cond"): how often a conditional takes
        its true branch, and the false one otherwise; how many trips a loop without a constant count makes. None: both
        branches are counted, and one trip.

    Raises:
      ValueError: this is no such program, or `of_loop` and it has not exactly one such loop.
    """
    reader = _Reader(_computations(text), odds)
    runs, moved, by_channel, counts = [], [], {}, collections.Counter()
    for computation, times in reader.executed(reader.main_loop() if of_loop else ""):
        for operation in computation.operations.values():
            cost = Run(operation, times, reader.flops(operation, computation), reader.traffic(operation, computation))
            if cost.flops or cost.hbm_bytes:
                runs.append(cost)
        for channel, found in reader.collectives(computation, mesh_shape):
            if channel is None:
                moved += [(collective, times) for collective in found]
            elif channel not in by_channel or times < by_channel[channel][1]:
                by_channel[channel] = found, times
        for operation in reader.operations(computation):
            counts["sorts"] += times * (operation.opcode == "sort")
            counts["kernels"] += times * (_is_kernel(operation) and not _SPLASH.match(operation.name))
    moved += [(collective, times) for found, times in by_channel.values() for collective in found]
    return Step(
        tuple(runs),
        tuple(moved),
        tuple(reader.trip_counts),
        reader.unknown_loops,
        counts["sorts"],
        counts["kernels"],
    )


def _computations(text: str) -> dict[str, Computation]:
    """Every computation by name; the entry also under ""."""
    found, name, operations, root, is_entry = {}, None, {}, "", False
    for line in text.splitlines():
        if match := _HEADER.match(line):
            is_entry, name, operations, root = bool(match[1]), match[2], {}, ""
        elif line == "}" and name is not None:  # the attributes of a kernel can be lines that begin with one
            found[name] = Computation(name, operations, root)
            if is_entry:
                found[""] = found[name]
            name = None
        elif name is not None and (match := _OPERATION.match(line)):
            is_root, op_name, result, opcode, rest = match.groups()
            results = tuple(
                Array(dtype, tuple(map(int, filter(None, shape.split(",")))), not re.search(r"S\(\d", layout or ""))
                for dtype, shape, layout in _ARRAY.findall(result)
            )
            operands = tuple(re.findall(r"%([\w.\-]+)", _until_closed(rest)))
            operations[op_name] = Operation(op_name, opcode, results, operands, rest, line)
            root = op_name if is_root else root
    if "" not in found:
        raise ValueError("this is not the text of a compiled program: it has no entry computation")
    return found


def _until_closed(text: str) -> str:
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth < 0:
            return text[:i]
    return text


class _Reader:
    def __init__(self, computations: dict[str, Computation], odds: Callable[[str], float] | None):
        self.computations = computations
        self.odds = odds
        self.trip_counts: list[int] = []
        self.unknown_loops = 0

    def main_loop(self) -> str:
        """The body of the entry's loop without a constant trip count."""
        loops = [o for o in self.computations[""].operations.values() if o.opcode == "while"]
        bodies = [o.called("body") for o in loops if self._trip_count(o) is None]
        if len(bodies) != 1:
            raise ValueError(f"this program has {len(bodies)} loops without a constant trip count, not one")
        return bodies[0]

    def executed(self, name: str = "", times: float = 1) -> Iterator[tuple[Computation, float]]:
        """The computations that are run, with how many times a step runs them."""
        computation = self.computations[name]
        yield computation, times
        for operation in computation.operations.values():
            if operation.opcode == "while":
                trips = self._trip_count(operation)
                if trips is not None:
                    if not operation.called("body").startswith(_COMPILERS_LOOPS):
                        self.trip_counts.append(trips)
                elif self.odds is None:
                    self.unknown_loops += 1
                    trips = 1
                else:
                    trips = self.odds(operation.source)
                yield from self.executed(operation.called("body"), times * trips)
            elif operation.opcode == "conditional":
                listed = re.search(r"branch_computations=\{(.*?)\}", operation.rest)
                pair = [operation.called("false_computation"), operation.called("true_computation")]
                branches = re.findall(r"%([\w.\-]+)", listed[1]) if listed else pair
                shares = [1] * len(branches)  # which branch, nobody knows before: all are counted
                if self.odds is not None and len(branches) == 2:
                    shares = [1 - self.odds(operation.source), self.odds(operation.source)]
                for branch, share in zip(branches, shares, strict=True):
                    yield from self.executed(branch, times * share)
            elif operation.opcode in ("call", "async-start"):
                called = operation.called("to_apply") or operation.called("calls")
                yield from self.executed(called, times)

    def _trip_count(self, loop: Operation) -> int | None:
        """N / n of a loop over `counter < N` that adds n. The text of a TPU program states it nowhere else."""
        condition, body = (self.computations[loop.called(name)] for name in ("condition", "body"))
        operations = list(self.operations(condition))
        limits = [o for o in operations if o.opcode == "constant" and o.results[0].dtype in ("s32", "u32")]
        compares = [o for o in operations if o.opcode == "compare" and "direction=LT" in o.rest]
        if len(compares) != 1 or len(limits) != 1 or (limit := _constant(limits[0])) is None:
            return None
        counters = [o for o in condition.operations.values() if o.opcode == "get-tuple-element"]
        root = body.operations[body.root]
        if len(counters) != 1 or root.opcode != "tuple":
            return limit
        counted = body.operations[root.operands[int(re.search(r"index=(\d+)", counters[0].rest)[1])]]
        terms = [_constant(body.operations[name]) for name in counted.operands] if counted.opcode == "add" else []
        return math.ceil(limit / next((term for term in terms if term is not None), 1))

    def operations(self, computation: Computation) -> Iterator[Operation]:
        """The operations of a computation and of its fusions."""
        for inside in (computation, *self._fused(computation)):
            yield from inside.operations.values()

    def _fused(self, computation: Computation) -> Iterator[Computation]:
        """The insides of a computation's fusions, to any depth."""
        for operation in computation.operations.values():
            if operation.opcode == "fusion":
                inner = self.computations[operation.called("calls")]
                yield inner
                yield from self._fused(inner)

    def collectives(
        self, computation: Computation, mesh_shape: dict[str, int]
    ) -> Iterator[tuple[str | None, list[Collective]]]:
        """The collectives of a computation and its fusions, with their channel. An asynchronous one is written again,
        with the same channel, wherever work goes on meanwhile, in loops too: where it runs least often, it is."""
        for inside in (computation, *self._fused(computation)):
            for operation in inside.operations.values():
                parsed = line_collectives(operation.line, mesh_shape)
                if not parsed:
                    continue
                # What each chip keeps of an all-reduce is its slice: a reduce-scatter by another name.
                if inside.name.startswith("all-reduce-scatter"):
                    parsed = [dataclasses.replace(c, kind="reduce-scatter") for c in parsed]
                elif operation.opcode.startswith("reduce-scatter"):  # counted, like the other spelling, by its input
                    parsed = [dataclasses.replace(c, bytes=c.bytes * len(c.group)) for c in parsed]
                channel = re.search(r"channel_id=(\d+)", operation.rest)
                yield channel[1] if channel else None, parsed

    def flops(self, operation: Operation, computation: Computation) -> float:
        """FLOPs of the matrix products in an operation, those of its fused inside included."""
        if operation.opcode == "fusion":
            inner = self.computations[operation.called("calls")]
            return sum(self.flops(o, inner) for o in inner.operations.values())
        if operation.opcode == "custom-call" and (kernel := _SPLASH.match(operation.name)):
            operands = [computation.operations[name].results[0].shape for name in operation.operands[:4]]
            return _splash_flops(kernel[1], *operands[1:])
        if operation.opcode not in ("dot", "convolution"):
            return 0.0
        left, right = (computation.operations[name].results[0].shape for name in operation.operands[:2])
        out = operation.results[0].shape
        if operation.opcode == "dot":
            contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", operation.rest)[1]
            return 2.0 * math.prod(out) * math.prod(left[int(i)] for i in contracted.split(",") if i)
        return _convolution_flops(operation.rest, left, right, out)

    def traffic(self, operation: Operation, computation: Computation) -> float:
        """Bytes that an operation reads from HBM and writes to it; of a collective, none: its links are the slower."""
        free = operation.opcode in _FREE and not _is_kernel(operation)
        if free or operation.opcode.endswith("-done") or _COLLECTIVE.match(operation.opcode):
            return 0.0
        total = 0.0
        for position, name in enumerate(operation.operands):
            source = computation.operations[name].results
            if len(source) == 1 and source[0].in_hbm:
                total += self._read(operation, position, source[0].bytes)
        copies = operation.opcode == "reshape"  # inside a fusion it does not
        written = [math.inf] if copies else self._written(operation, computation)
        for array, size in zip(_destinations(operation), written, strict=True):
            if array.in_hbm:
                total += min(array.bytes, size)
        return total

    def _read(self, operation: Operation, position: int, full: float) -> float:
        """How much of an operand's `full` bytes an operation reads."""
        if operation.opcode.removesuffix("-start") in _SLICES and position == 0:
            return min(full, sum(array.bytes for array in _destinations(operation)))
        if operation.opcode in _IN_PLACE and position == 0:
            return 0.0
        if _COLLECTIVE.match(operation.opcode) or (operation.opcode == "custom-call" and not _is_kernel(operation)):
            return 0.0
        if operation.opcode == "fusion":
            inner = self.computations[operation.called("calls")]
            return self._read_inside(inner, inner.parameters[position].name, full)
        return full

    def _read_inside(self, computation: Computation, name: str, full: float) -> float:
        total = 0.0
        for user in computation.operations.values():
            for position, operand in enumerate(user.operands):
                if operand != name or user.opcode == "tuple":
                    continue
                if self._only_renames(user, position):
                    total += self._read_inside(computation, user.name, full)
                else:
                    total += self._read(user, position, full)
        return min(full, total)

    def _only_renames(self, operation: Operation, position: int) -> bool:
        """Whether an operation gives this operand under another shape: who reads it is decided further on."""
        if operation.opcode != "fusion":
            return operation.opcode in _ALIASES
        inner = self.computations[operation.called("calls")]
        source = inner.operations[inner.root]
        while source.opcode in _ALIASES:
            source = inner.operations[source.operands[0]]
        return source is inner.parameters[position]

    def _written(self, operation: Operation, computation: Computation) -> list[float]:
        """Bytes that each result of an operation really writes; in-place updates write their update alone."""
        if operation.opcode in _IN_PLACE:
            update = computation.operations[operation.operands[_IN_PLACE[operation.opcode]]]
            return [sum(array.bytes for array in update.results)]
        if operation.opcode in ("bitcast", "reshape") and operation.operands:
            return self._written(computation.operations[operation.operands[0]], computation)
        if _is_kernel(operation):
            return [float(array.bytes) for array in operation.results]
        if operation.opcode in ("parameter", "custom-call") or _COLLECTIVE.match(operation.opcode):
            return [0.0] * len(operation.results)
        if operation.opcode == "tuple":
            return [sum(self._written(computation.operations[name], computation)) for name in operation.operands]
        if operation.opcode == "fusion":
            inner = self.computations[operation.called("calls")]
            return self._written(inner.operations[inner.root], inner)
        return [float(array.bytes) for array in _destinations(operation)]


def _is_kernel(operation: Operation) -> bool:
    return 'custom_call_target="tpu_custom_call"' in operation.rest


def _splash_flops(part: str, mask: tuple[int, ...], q: tuple[int, ...], k: tuple[int, ...]) -> float:
    """FLOPs of a splash attention kernel over a causal mask: products of q [..., T, H] with k [..., S, H], or of the
    same size, in the n (n + 1) / 2 of n * n blocks that hold an allowed pair."""
    products = {"fwd": 2, "dq": 3, "dkv": 4}[part]
    num_blocks = mask[-1]
    return products * 2.0 * math.prod(q) * k[-2] * (num_blocks + 1) / (2 * num_blocks)


def _constant(operation: Operation) -> int | None:
    number = re.match(r"(\d+)\)", operation.rest) if operation.opcode == "constant" else None
    return int(number[1]) if number else None


def _destinations(operation: Operation) -> tuple[Array, ...]:
    """What an operation writes. An asynchronous start also lists its operands and handles, before or behind."""
    if operation.opcode == "copy-start":
        return operation.results[:1]
    if operation.opcode.endswith("-start"):
        return operation.results[len(operation.operands) :][:1]
    return operation.results


def _convolution_flops(attributes: str, left, right, out) -> float:
    """2 x multiply-adds of a convolution, padding and dilation holes not counted: TPU programs hide batches in them."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    window = re.search(r"window=\{([^}]*)\}", attributes)
    window = dict(part.split("=") for part in window[1].split()) if window else {}
    num_spatial = sum(label.isdigit() for label in labels[1])

    def numbers(name, default):
        return [int(n) for n in window[name].split("x")] if name in window else [default] * num_spatial

    padding = window["pad"].split("x") if "pad" in window else ["0_0"] * num_spatial
    total = 2.0 * right[labels[2].index("i")] * out[labels[3].index("b")] * out[labels[3].index("f")]
    for d, (stride, hole_left, hole_right) in enumerate(
        zip(numbers("stride", 1), numbers("lhs_dilate", 1), numbers("rhs_dilate", 1), strict=True)
    ):
        size_left, size_right, size_out = (
            shape[label.index(str(d))] for shape, label in ((left, labels[1]), (right, labels[2]), (out, labels[3]))
        )
        low = int(padding[d].split("_")[0])
        starts = range(-low, size_out * stride - low, stride)
        places = (start + k * hole_right for start in starts for k in range(size_right))
        total *= sum(place % hole_left == 0 and 0 <= place // hole_left < size_left for place in places)
    groups = re.search(r"batch_group_count=(\d+)", attributes)
    return total / (int(groups[1]) if groups else 1)
