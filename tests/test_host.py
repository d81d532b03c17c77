"""What a CPU process is prepared with: threads for virtual devices, and memory that malloc keeps."""

import os
import subprocess
import sys

import pytest

from mod_jax import host


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ("--xla_force_host_platform_device_count=64 --xla_cpu_enable_fast_math=false", None, 128),
        ("--xla_force_host_platform_device_count=64", "3", 3),
        ("--xla_force_host_platform_device_count=1", None, None),
        ("", None, None),
    ],
)
def test_virtual_devices_get_two_threads_each(monkeypatch, flags, before, after):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("PJRT_NPROC", before or "")
    if before is None:
        monkeypatch.delenv("PJRT_NPROC")
    host.spare_threads()
    assert os.environ.get("PJRT_NPROC") == (after and str(after))


@pytest.mark.parametrize(
    ("asked", "installed", "cpu"),
    [("cpu", ("libtpu",), True), ("", (), True), ("", ("jax_plugins",), False), ("tpu,cpu", (), False)],
)
def test_only_a_process_that_computes_on_the_cpu_is_changed(monkeypatch, asked, installed, cpu):
    monkeypatch.setenv("JAX_PLATFORMS", asked)
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: name in installed or None)
    assert host.computes_on_cpu() is cpu


FAULTS = """
import resource, sys
from mod_jax import host
if sys.argv[1] == "kept":
    assert host.keep_freed_memory()
def use():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytes(bytearray(200 << 20))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
use()
print(use())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_freed_memory_is_used_again_without_page_faults():
    faults = [
        int(subprocess.run([sys.executable, "-c", FAULTS, arg], capture_output=True, text=True, check=True).stdout)
        for arg in ("kept", "returned")
    ]
    assert faults[0] < 1000 < faults[1]  # twice 200 MiB are 100 000 pages of 4 KiB, or 200 of 2 MiB
