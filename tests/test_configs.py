"""Every file in configs/ says how to run it, and each of its documented arguments is a valid config."""

import importlib.util
import inspect
import itertools
import pathlib
import re

import pytest

from mod_jax.config import from_config_dict, unknown_key
from mod_jax.errors import ConfigError

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "configs").glob("*.py"))
NAMES = [path.stem for path in FILES]


def load(name):
    spec = importlib.util.spec_from_file_location(f"configs_{name}", ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def takes_argument(module):
    return bool(inspect.signature(module.get_config).parameters)


def documented(name):
    """Arguments that occur in commands, in the file and in the README, and every combination of the file's tables."""
    module = load(name)
    texts = [(ROOT / "configs" / f"{name}.py").read_text()]
    texts += [path.read_text() for path in ROOT.glob("*.md")]
    found = {match for text in texts for match in re.findall(rf"configs/{name}\.py:([\w=,.:]*\w)", text)}
    if hasattr(module, "PRESETS"):
        found |= {
            f"preset={p},variant={v},budget={b},width={w}"
            for p, s in module.PRESETS.items()
            for v in module.VARIANTS
            for b, ws in s.widths.items()
            for w in ws
        }
    elif hasattr(module, "VARIANTS"):
        found |= {variant + rest for variant in module.VARIANTS for rest in ("", ":long")}
    if hasattr(module, "SHAPES"):
        found |= {f"size={size},model={model}" for size, model in itertools.product(module.SHAPES, module.MODELS)}
    return sorted(found)


def test_there_are_configs():
    assert {"smoke", "cpu_demo", "paper"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_has_the_command(name):
    assert f"python -m mod_jax.train --config=configs/{name}.py" in load(name).__doc__


@pytest.mark.parametrize("name", NAMES)
def test_the_default_is_valid(name):
    config = from_config_dict(load(name).get_config())
    assert config.train.log_every <= 50


@pytest.mark.parametrize(("name", "argument"), [(name, a) for name in NAMES for a in documented(name)])
def test_every_documented_argument_is_valid(name, argument):
    config = from_config_dict(load(name).get_config(argument))
    assert config != from_config_dict(load("smoke").get_config())


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_argument_is_refused(name):
    module = load(name)
    if not takes_argument(module):
        with pytest.raises(TypeError):
            module.get_config("nonsense")
        return
    for argument in ("nonsense", documented(name)[0] + ":nonsense", "size=7m", ""):
        with pytest.raises(ValueError, match=f"configs/{name}.py:{argument}"):
            module.get_config(argument)


def test_arguments_differ_in_what_they_say():
    modules = {name: load(name) for name in NAMES}
    for name, module in modules.items():
        configs = [from_config_dict(module.get_config(argument)) for argument in documented(name)]
        variants = getattr(module, "VARIANTS", ())
        assert len(set(configs)) >= 2 * len(variants)
    dense = from_config_dict(modules["cpu_demo"].get_config("dense"))
    assert dense.num_routed == 0
    assert from_config_dict(modules["cpu_demo"].get_config("stochastic")).routing.score == "stochastic"
    paper = from_config_dict(modules["paper"].get_config())
    assert paper.routing.capacity == 0.125
    assert paper.data.seq_len == 2048


def test_a_misspelt_key_in_a_config_file_is_refused():
    """The guard of the tests above: from_config_dict does not pass over what it does not know."""
    config = load("smoke").get_config()
    config.unlock()
    config.model.widht = 3
    with pytest.raises(ConfigError, match=re.escape(unknown_key("model.widht"))):
        from_config_dict(config)
