"""A tiny routed model on this machine's own Python sources: does everything work?

python -m mod_jax.train --config=configs/smoke.py --workdir=/tmp/mod_jax_smoke
"""

from mod_jax.config import default_config


def get_config():
    config = default_config()
    config.model.width = 32
    config.model.depth = 2
    config.model.num_heads = 2
    config.model.scan = False  # on a CPU faster, and with few blocks compiled sooner
    config.data.seq_len = 128
    config.data.eval_windows = 32
    config.optimizer.learning_rate = 6e-3
    config.train.batch_size = 8
    config.train.steps = 60
    return config
