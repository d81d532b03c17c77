"""TPU slices that nobody here owns: which exist, what their chips can do, and compiling a program for one of them.

libtpu, from PyPI, compiles for any topology without a TPU (`jax.experimental.topologies`). It accepts the name of any
box of chips, also of machines that nobody sells (v5e:32x32), so the products are listed here. The numbers of a chip are
the maker's data sheets (docs.cloud.google.com/tpu/docs), except the memory, which is what the compiler lets a program
use of it.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import re
import sys
import threading
import time
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import mesh_utils

from mod_jax.errors import ConfigError
from mod_jax.outputs import to_json


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of TPU chip, and the slices in which it is sold, small to large, up to 256 chips.

    `ici_bandwidth` is that of all links of a chip in both directions. `name_counts` is how many units of a name such as
    v5p-128 one chip is.
    """

    kind: str
    hbm_bytes: float
    hbm_bandwidth: float
    ici_bandwidth: float
    torus_dims: int
    name_counts: int
    shapes: tuple[str, ...]


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_DEEP = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8")
CHIPS = {
    "v5e": Chip("TPU v5 lite", 15.75 * 2**30, 819e9, 400e9, 2, 1, _FLAT),
    "v5p": Chip("TPU v5", 95.73 * 2**30, 2765e9, 1200e9, 3, 2, _DEEP),
    "v6e": Chip("TPU v6 lite", 31.24 * 2**30, 1600e9, 800e9, 2, 1, _FLAT),
}
_OTHER_NAMES = {"v5litepod": "v5e", "v5 lite": "v5e", "trillium": "v6e"}


@dataclasses.dataclass(frozen=True)
class Product:
    """A slice that can be booked: `v5e:4x4`."""

    family: str
    shape: str

    @property
    def name(self) -> str:
        return f"{self.family}:{self.shape}"

    @property
    def chip(self) -> Chip:
        return CHIPS[self.family]

    @property
    def num_chips(self) -> int:
        return math.prod(int(n) for n in self.shape.split("x"))

    @property
    def rings(self) -> tuple[bool, ...]:
        """Which axes close into a ring: in a plane those of full length, in space all axes of whole cubes."""
        sizes = [int(n) for n in self.shape.split("x")]
        if len(sizes) == 2:
            return tuple(size == 16 for size in sizes)
        return (all(size % 4 == 0 for size in sizes),) * 3


PRODUCTS = tuple(Product(family, shape) for family, chip in CHIPS.items() for shape in chip.shapes)


def find_product(name: str) -> tuple[Product, str]:
    """The product of this name, and a note where the name had to be read: v5e-256 is v5e:16x16.

    Raises:
      ConfigError: no such product; the message lists those of the family.
    """
    parts = re.fullmatch(r"([a-z0-9 ]*[a-z])([:-])([\dx]+)", name.lower())
    family, separator, rest = parts.groups() if parts else (name.lower(), "", "")
    family = _OTHER_NAMES.get(family, family)
    known = [product for product in PRODUCTS if product.family == family]
    for product in known:
        if product.name == name:
            return product, ""
        if separator == ":" and rest == product.shape:
            return product, f"{name} is {product.name}"
        if separator == "-" and rest == str(product.num_chips * product.chip.name_counts):
            counts = "TensorCores, two a chip" if product.chip.name_counts == 2 else "chips"
            return product, f"{name} is {product.name} ({counts})"
    listed = ", ".join(product.name for product in known or PRODUCTS)
    raise ConfigError(f"--topology={name}: no such product; must be one of {listed}")


def list_products() -> str:
    """The products as a table."""
    lines = [f"{'--topology':<12} {'chips':>5}  {'HBM a chip':>10}  also called"]
    for product in PRODUCTS:
        alias = f"{product.family}-{product.num_chips * product.chip.name_counts}"
        lines.append(f"{product.name:<12} {product.num_chips:>5}  {product.chip.hbm_bytes / 2**30:>6.2f} GiB  {alias}")
    return "\n".join(lines)


def devices(product: Product) -> list[jax.Device]:
    """The devices of a slice, to compile for and not to run on.

    Raises:
      ConfigError: libtpu is not installed, or knows no such slice.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("compiling for a TPU needs libtpu, also where there is no TPU: pip install -e '.[tpu]'")
    # Without the first, libtpu asks a metadata server that is not there; without the second, two processes that compile
    # at once fail on its lock file. The other two only keep harmless complaints about host names off stderr.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    from jax.experimental import topologies

    try:
        # libtpu before 0.0.50 asks how many chips a host of one chip has; for the others it knows.
        host = {"chips_per_host_bounds": (1, 1, 1)} if product.num_chips == 1 else {}
        found = list(topologies.get_topology_desc(product.name, platform="tpu", **host).devices)
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(f"--topology={product.name}: libtpu refuses it: {' '.join(str(error).split())}") from error
    if count_chips(found) != product.num_chips:
        raise ConfigError(f"--topology={product.name}: libtpu made {count_chips(found)} chips of it")
    return found


def count_chips(found: list[jax.Device]) -> int:
    """Chips, which are not devices: some kinds show two devices a chip."""
    return len({tuple(device.coords) for device in found})


def coordinates(mesh: jax.sharding.Mesh) -> list[tuple[int, ...]]:
    """Where each device of a mesh, in the order in which a program numbers them, sits in the machine."""
    return [tuple(device.coords) for device in mesh.devices.flat]


def splits_physical_axes(mesh: jax.sharding.Mesh) -> bool:
    """Whether some mesh axis is no product of whole physical axes, so that its neighbours can be several hops apart."""
    try:
        mesh_utils.create_device_mesh(mesh.devices.shape, list(mesh.devices.flat))
    except NotImplementedError:
        return True
    return False


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What is kept of a compilation. `refused` is the compiler's complaint when the program needs too much memory."""

    text: str
    memory: dict[str, int]
    flops_once: float  # the compiler's own count, every loop body once
    seconds: float
    cpu_seconds: float
    refused: str = ""
    cached: bool = False

    @property
    def hbm_bytes(self) -> int:
        """What a chip must hold. Donated arguments are written over: those outputs take no room of their own."""
        m = self.memory
        return m["argument"] + m["temp"] + m["output"] - m["alias"]


def compile_for(lowered: jax.stages.Lowered, product: Product, mesh, cache: pathlib.Path) -> Compiled:
    """Compiles, or takes the result of the same compilation from `cache`.

    JAX's own compilation cache cannot read back what it writes for a topology, so it is of no use here; and what is
    wanted is the program's text and sizes, not the program.
    """
    path = cache / f"{_key(lowered, product, mesh)}.json.gz"
    with contextlib.suppress(OSError, EOFError, ValueError, TypeError):  # absent or damaged: compile
        return dataclasses.replace(Compiled(**json.loads(gzip.decompress(path.read_bytes()))), cached=True)
    start, cpu_start = time.perf_counter(), time.process_time()
    text, memory, flops_once, refused = "", {}, 0.0, ""
    with _progress(f"compiling for {product.name}"):
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            refused = " ".join(str(error).splitlines()[0].split())
        else:
            stats = compiled.memory_analysis()
            names = ("argument", "temp", "output", "alias", "generated_code")
            memory = {name: getattr(stats, f"{name}_size_in_bytes") for name in names}
            flops_once = float(compiled.cost_analysis().get("flops", 0.0))
            text = _text(compiled)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    result = Compiled(text, memory, flops_once, seconds, cpu_seconds, refused)
    _write(path, result)
    return result


def _text(compiled: jax.stages.Compiled) -> str:
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        libtpu, jaxlib = map(importlib.metadata.version, ("libtpu", "jaxlib"))
        raise ConfigError(
            f"libtpu {libtpu} wrote a program that jaxlib {jaxlib} cannot read; the one that fits comes with "
            f"pip install 'jax[tpu]=={jax.__version__}': {' '.join(str(error).split())}"
        ) from error


def _key(lowered: jax.stages.Lowered, product: Product, mesh) -> str:
    """Names a compilation by everything that goes into it."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "libtpu")]
    options = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    order = np.array([device.id for device in mesh.devices.flat]).tolist()
    parts = [product.name, *versions, *options, str(order), lowered.as_text()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _write(path: pathlib.Path, result: Compiled) -> None:
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(gzip.compress(to_json(dataclasses.asdict(result)).encode()))
        scratch.replace(path)
    except OSError:  # a full or read-only disk costs the next run its time, not this one its answer
        with contextlib.suppress(OSError):
            scratch.unlink()


@contextlib.contextmanager
def _progress(what: str, every: float = 20.0) -> Iterator[None]:
    """Says on stderr, now and then, how long `what` has taken: minutes of CPU, and more than that on a busy machine."""
    start, cpu_start, done = time.perf_counter(), time.process_time(), threading.Event()

    def tell() -> None:
        wait = 0.0
        while not done.wait(wait):
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
            print(f"{what}: {seconds:.0f} s, {cpu_seconds:.0f} s of CPU", file=sys.stderr, flush=True)
            wait = every

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
