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


@pytest.fixture
def no_accelerator(monkeypatch, tmp_path):
    """A machine with libtpu and without any accelerator, whatever this one has. The folder is that of its PCI bus."""
    for name in (*host.TPU_VARIABLES, "JAX_PLATFORMS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: name == "libtpu" or None)
    monkeypatch.setattr(host.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(host, "PCI", tmp_path)
    monkeypatch.delitem(sys.modules, "jax")
    return tmp_path


@pytest.mark.parametrize(
    ("vendor", "kind", "platform"),
    [
        ("0x1ae0", "0x120000", ""),  # a TPU: JAX looks for itself
        ("0x1ae0", "0x020000", "cpu"),  # Google's network card
        ("0x1ae0", "0x010802", "cpu"),  # Google's disk
        ("0x8086", "0x120000", "cpu"),
    ],
)
def test_the_cpu_is_chosen_only_where_no_tpu_can_be(no_accelerator, vendor, kind, platform):
    device = no_accelerator / "0000:00:05.0"
    device.mkdir()
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    host.spare_search_for_tpu()
    assert os.environ["JAX_PLATFORMS"] == platform


@pytest.mark.parametrize("file", ["/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*"])
def test_a_device_file_leaves_the_choice_to_jax(no_accelerator, monkeypatch, file):
    monkeypatch.setattr(host.glob, "glob", lambda pattern: [pattern] if pattern == file else [])
    host.spare_search_for_tpu()
    assert os.environ["JAX_PLATFORMS"] == ""


@pytest.mark.parametrize("name", ["TPU_NAME", "TPU_WORKER_ID", "JAX_FORCE_TPU_INIT"])
def test_a_variable_of_a_tpu_leaves_the_choice_to_jax(no_accelerator, monkeypatch, name):
    monkeypatch.setenv(name, "0")
    host.spare_search_for_tpu()
    assert os.environ["JAX_PLATFORMS"] == ""


def test_a_choice_that_was_made_is_kept(no_accelerator, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    host.spare_search_for_tpu()
    assert os.environ["JAX_PLATFORMS"] == "tpu"


def test_a_command_is_quiet_on_a_machine_without_a_tpu():
    pytest.importorskip("libtpu")
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    if host.has_tpu():
        environment["JAX_PLATFORMS"] = "cpu"
    code = "from mod_jax import cli; cli.parse_flags(['']); import jax; print(len(jax.devices()))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip().isdigit()
    assert done.stderr == ""


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
