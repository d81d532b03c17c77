"""mod_jax: Mixture-of-Depths transformers in JAX/Flax (Raposo et al. 2024, arXiv 2404.02258)."""

__version__ = "0.1.0"
