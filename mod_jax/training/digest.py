"""A digest per array, computed where the array lives: tells whether bits changed on disk.

Sixteen hex digits, the same for every sharding of the same values, and no collective but two scalar sums.
"""

import jax
import jax.numpy as jnp


def compute_digests(leaves: dict[str, jax.Array]) -> dict[str, str]:
    """Returns sixteen hex digits per leaf, computed where the leaf lives; the same for every sharding of it."""
    # One leaf after the other: small collectives of several programs in flight at once can deadlock processes that
    # have fewer cores than devices.
    digests = {path: jax.device_get(_digest(leaf)) for path, leaf in leaves.items()}
    return {path: f"{plain:08x}{mixed:08x}" for path, (plain, mixed) in digests.items()}


@jax.jit
def _digest(leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two uint32 sums over the raw bits, in 32-bit words: the words, and the words mixed with their positions.

    The mixing is a bijection for each position, so a change of any one word changes both sums. Two words that trade
    places change the second, which a plain weight would not ensure: (1.0 - 2.0) * 256 positions is 0 modulo 2 ** 32.
    """
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    word = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[leaf.dtype.itemsize]
    words = jax.lax.bitcast_convert_type(leaf, word).astype(jnp.uint32)
    position = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):  # not a reshape, which would gather a sharded leaf
        position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    mixed = _mix(words ^ _mix(position))
    return jnp.sum(words, dtype=jnp.uint32), jnp.sum(mixed, dtype=jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """Scrambles 32-bit words one to one: odd factors and xor-shifts are each invertible."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
