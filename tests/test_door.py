"""The names that scripts use: all there, documented, cheap to import, and their examples run as they are printed."""

import doctest
import inspect
import pathlib
import subprocess
import sys

import pytest

import mod_jax
from mod_jax.errors import ConfigError
from mod_jax.training import loop

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_every_name_is_documented_with_its_arguments():
    for name in mod_jax.__all__:
        thing = getattr(mod_jax, name)
        assert thing.__doc__, name
        assert "*args" not in str(inspect.signature(thing)), name
    assert set(mod_jax.__all__) == set(mod_jax._HOMES) <= set(dir(mod_jax))
    with pytest.raises(AttributeError, match="no attribute 'sampel'"):
        mod_jax.sampel  # noqa: B018


def test_the_vocabulary_of_a_config_that_leaves_it_to_the_tokenizer_makes_no_model(tiny_config):
    config = tiny_config()
    for size in (config.model.vocab_size, -1, 2.5, "257"):
        with pytest.raises(ConfigError, match=r"vocab_size = .*: must be an integer >= 1"):
            mod_jax.make_model(config, size)


def test_importing_the_package_starts_no_jax():
    """A command reads its flags, and sets up its threads, before JAX starts."""
    command = "import mod_jax, sys; dir(mod_jax); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", command], check=True)


def test_the_examples_print_what_they_say(tiny_config, tmp_path, monkeypatch):
    loop.train(tiny_config(**{"train.steps": 12, "data.seq_len": 32}), tmp_path / "runs" / "tiny")
    monkeypatch.chdir(tmp_path)
    found = doctest.testmod(mod_jax, verbose=False)
    assert found.attempted > 10
    assert not found.failed


def test_the_api_page_is_built_with_every_name(tmp_path):
    pytest.importorskip("pdoc")
    subprocess.run([sys.executable, ROOT / "docs" / "api.py", tmp_path], cwd=ROOT, check=True)
    page = (tmp_path / "mod_jax.html").read_text()
    for name in mod_jax.__all__:
        assert f'id="{name}"' in page
    assert 'id="Sampler.generate"' in page
