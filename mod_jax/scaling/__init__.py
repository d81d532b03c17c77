"""Sizes: device meshes and shardings, FLOP counts, run lengths."""
