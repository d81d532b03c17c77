"""This machine's devices in the place of a slice, and the programs that a sampler runs here."""

import jax
import pytest

from mod_jax.planning import serving, topology


@pytest.fixture
def devices_here(monkeypatch):
    """A slice is made of this machine's devices, in a square of two by two, and libtpu need not be installed."""
    real = topology.importlib.metadata.version
    monkeypatch.setattr(topology.importlib.metadata, "version", lambda name: "1" if name == "libtpu" else real(name))
    monkeypatch.setattr(topology, "devices", lambda product: jax.devices()[: product.num_chips])
    monkeypatch.setattr(topology, "coordinates", lambda mesh: [divmod(i, 2) + (0,) for i in range(mesh.size)])


@pytest.fixture
def watched(monkeypatch):
    """A function of a sampler and of the name of a program of its: the list that gets each one that it runs, as text.
    From then on plans are for a CPU."""

    def watch(sampler, name):
        programs, program = [], getattr(sampler, name)

        def noted(*arguments, **named):
            programs.append(str(program.trace(*arguments, **named).jaxpr))
            return program(*arguments, **named)

        monkeypatch.setattr(sampler, name, noted)
        monkeypatch.setattr(serving, "PLATFORM", "cpu")
        return programs

    return watch
