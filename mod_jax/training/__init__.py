"""Training: losses, optimizer, the train step, the loop, evaluation, checkpoints, metrics."""
