"""The config that `--config.a.b=value` edits where no file is given: the defaults."""

from mod_jax.config import default_config


def get_config():
    return default_config()
