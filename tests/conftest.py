"""Eight virtual CPU devices, strict arrays, and one tiny config for every test.

Corpora, and the programs of the processes that tests start, are cached below one folder in the temporary directory.
Set JAX_COMPILATION_CACHE_DIR or MOD_JAX_CACHE to put them elsewhere. The eight devices load no cached programs: see
`sharding.make_mesh`.
"""

import gc
import os
import tempfile
import uuid

from faults.harness import QUICK_COMPILER

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + f" --xla_force_host_platform_device_count=8 {QUICK_COMPILER}"
    + " --xla_cpu_collective_call_terminate_timeout_seconds=300"  # eight devices may have to wait for two busy cores
)
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ.get(
    "JAX_COMPILATION_CACHE_DIR", f"{tempfile.gettempdir()}/mod_jax_tests-{os.getuid()}/programs"
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["MOD_JAX_CACHE"] = os.environ.get(
    "MOD_JAX_CACHE", f"{tempfile.gettempdir()}/mod_jax_tests-{os.getuid()}/corpora"
)
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # nothing is looked up, nor downloaded
os.environ["HF_HOME"] = f"{tempfile.gettempdir()}/mod_jax_tests-{os.getuid()}/hugging_face"

import emulator
import jax
import pytest
import untrained
from tiny import TINY

from mod_jax import host, paths
from mod_jax.config import Config, make_config

host.prepare()
host.load_no_programs()

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Frees the programs of each file. They hold memory maps; where Linux has no more, XLA dies while it compiles."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def tiny_config():
    """A function of config changes: `tiny_config(**{"model.depth": 2})` is a Config small enough to run in a test."""

    def make(**changes) -> Config:
        return make_config(**{**TINY, **changes})

    return make


@pytest.fixture
def build():
    """`untrained.build_model`: build(**{"model.depth": 2})."""
    return untrained.build_model


@pytest.fixture
def tools():
    """The module `untrained`: two paths of one model, to be compared."""
    return untrained


@pytest.fixture(scope="session")
def emulated_bucket():
    """Address of a bucket."""
    with emulator.started():
        yield "gs://pod"


@pytest.fixture
def bucket(emulated_bucket):
    """An empty folder in a bucket."""
    return paths.run_folder("bucket", f"{emulated_bucket}/{uuid.uuid4().hex[:12]}")


def pytest_sessionfinish(session):
    """Where MOD_JAX_TESTS_SKIP_NOTHING is set, as in CI, a skipped test fails the session."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")  # the workers of xdist have none
    if os.environ.get("MOD_JAX_TESTS_SKIP_NOTHING") and reporter and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
