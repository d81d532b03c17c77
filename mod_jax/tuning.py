"""Every choice that depends on the platform: what a kind of device can do, and what is fastest on it.

No other file asks whether a program runs on a CPU, a TPU or a GPU.
"""

import contextlib
import dataclasses
import os
import pathlib
import re

import jax


def platform() -> str:
    """What the program being traced will run on, "cpu" or "tpu" for example; the mesh knows, where there is one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


LANES = 128  # of a TPU's vector unit: the last dimension of an array is padded to as many
MIN_KERNEL_LENGTH = 512  # below it the TPU compiler's own attention takes as long as the kernel


def default_loss_chunk() -> int:
    """Tokens per device whose logits exist at a time.

    On a CPU few, so that they stay in its cache (measured: a fifth less time for the loss at V = 4096); elsewhere more,
    so that adding to the gradient of the weight, read and written once a chunk, hides behind the products.
    """
    return 512 if platform() == "cpu" else 2048


def attends_by_kernel(length: int, platform: str) -> bool:
    """Whether rows of this length are better attended by the splash kernel. It takes whole lanes only."""
    return platform == "tpu" and length >= MIN_KERNEL_LENGTH and length % LANES == 0


def rows_per_pass(batch_size: int, capacity: float, platform: str) -> int:
    """R, rows that a routed block decodes at a time: the expected number of selected rows, and spare ones.

    None to spare on a CPU, where a pass costs by its rows (measured: 7 % faster at batch 8 than with one standard
    deviation). Elsewhere two deviations: there a pass costs the reading of the weights, and a second is seldom needed.
    """
    deviations = 0.0 if platform == "cpu" else 2.0
    expected = batch_size * capacity
    return max(1, min(batch_size, round(expected + deviations * (expected * (1 - capacity)) ** 0.5)))


def stacks_weights(platform: str) -> bool:
    """Whether the weights inside all routed blocks of a kind stay in one stack while decoding.

    A TPU's compiler fetches what a branch may need before it is known which one is taken, weights of bypassed blocks
    too, but only whole arrays that fit into on-chip memory (as compiled for 1 B parameters at batch 1, a step reads
    1.33 GiB from a stack, 1.75 without). Elsewhere a slice is a copy.
    """
    return platform == "tpu"


# Experts have no path by `jax.lax.ragged_dot`, on no platform: it multiplies every token with every expert. On a CPU (8
# experts, width 512, 2048 tokens) it takes 7 times as long as products of each expert's own slots, 8 times with its
# backward pass, as measured. For a TPU (v5e; jax 0.10.2, libtpu 0.0.52) it is compiled to 8 times the FLOPs. Not tried
# on a GPU.


def cache_layout(platform: str, head_dim: int) -> tuple[int, ...] | None:
    """Order of the dimensions in which [B, K, S, H] caches lie, from major to minor; None: the compiler's default.

    Decoding on a TPU wants the heads of a token beside each other, since it writes token by token. If caches come in
    another layout, each call copies them, there and back: they would take twice the memory, and a call with one step
    (streaming) up to three times the traffic. A head that does not fill a tile's lanes would be padded.
    """
    return (0, 2, 1, 3) if platform == "tpu" and head_dim % LANES == 0 else None


@dataclasses.dataclass(frozen=True)
class Peak:
    """The most FLOP/s that the devices could do; None where nobody knows. `published`: from the maker's data sheet."""

    flops: float | None
    name: str
    published: bool = True


# Dense bfloat16 FLOP/s of one JAX device. A key matches a device kind that has all its words; most words win.
PEAK_FLOPS = {
    "TPU v3": Peak(61.5e12, "TPU v3"),  # a device is one of the chip's two cores
    "TPU v4": Peak(275e12, "TPU v4"),
    "TPU v5 lite": Peak(197e12, "TPU v5e"),
    "TPU v5e": Peak(197e12, "TPU v5e"),
    "TPU v5": Peak(459e12, "TPU v5p"),
    "TPU v5p": Peak(459e12, "TPU v5p"),
    "TPU v6 lite": Peak(918e12, "TPU v6e"),
    "TPU v6e": Peak(918e12, "TPU v6e"),
    "TPU7x": Peak(2307e12 / 2, "TPU v7x"),  # a device is one of the chip's two chiplets
    "A100": Peak(312e12, "A100"),
    "L4": Peak(121e12, "L4"),
    "L40S": Peak(362e12, "L40S"),
    "H100": Peak(989e12, "H100 SXM"),
    "H100 NVL": Peak(835e12, "H100 NVL"),
    "H100 PCIe": Peak(756e12, "H100 PCIe"),
    "H200": Peak(989e12, "H200"),
    "B200": Peak(2250e12, "B200"),
}


def memory_bytes(device: jax.Device) -> int | None:
    """What a device can hold; a CPU, what its machine has, or its container may take. None where nobody knows."""
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")] if hasattr(os, "sysconf") else []
    with contextlib.suppress(OSError, ValueError):
        limits.append(int(pathlib.Path("/sys/fs/cgroup/memory.max").read_text()))  # "max" without a limit
    return min(limits, default=None)


def peak_flops(device_kind: str) -> float | None:
    """Published peak of one device of this kind (`jax.Device.device_kind`), or None."""
    peak = published_peak(device_kind)
    return None if peak is None else peak.flops


def published_peak(device_kind: str) -> Peak | None:
    words = set(re.split(r"[^a-z0-9]+", device_kind.lower()))
    found = [key for key in PEAK_FLOPS if words >= set(key.lower().split()) and "mig" not in words]
    return PEAK_FLOPS[max(found, key=lambda key: len(key.split()))] if found else None
