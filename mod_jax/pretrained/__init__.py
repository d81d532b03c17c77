"""Models that other programs trained: read, converted to ours, and measured for what they can leave out."""
