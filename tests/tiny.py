"""The one small config of the tests, as changes to the default."""

TINY = {
    "model.width": 16,
    "model.depth": 4,
    "model.num_heads": 2,
    "data.source": "synthetic",
    "data.seq_len": 16,
    "data.eval_windows": 16,
    "routing.capacity": 0.25,
    "train.batch_size": 8,
    "train.steps": 4,
}
