"""Attention of a row over itself on TPUs: JAX's splash kernel, which never writes the [T, T] weights to memory.

Vocabulary: B rows, T positions, N query heads, K key/value heads, H head dim.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import PartitionSpec

from mod_jax.sharding import RULES

BLOCKS = (512, 256, 128)


def splash_attend(
    q_BTNH: jax.Array,
    k_BKTH: jax.Array,
    v_BKTH: jax.Array,
    segments_BT: jax.Array,
    kv_segments_BT: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """What `attend(..., same_tokens=True)` gives for rows in order of position: [B, T, N, H] in the dtype of q.

    Args:
      segments_BT: of queries, 0 for one that is not wanted.
      kv_segments_BT: of keys and values; None: the same.
      interpret: run the kernel's program on whatever device there is, slowly.
    """
    q_BNTH = (q_BTNH * q_BTNH.shape[-1] ** -0.5).transpose(0, 2, 1, 3)
    run = functools.partial(_attend_rows, interpret=interpret)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:  # the partitioner cannot split a kernel: every device runs it on its own rows and heads
        rows_and_heads = PartitionSpec(RULES.batch, RULES.heads)
        specs = (rows_and_heads,) * 3 + (PartitionSpec(RULES.batch),) * 2
        run = jax.shard_map(run, in_specs=specs, out_specs=rows_and_heads, check_vma=False)
    kv_segments_BT = segments_BT if kv_segments_BT is None else kv_segments_BT
    out_BTNH = run(q_BNTH, k_BKTH, v_BKTH, segments_BT, kv_segments_BT).transpose(0, 2, 1, 3)
    return jnp.where(segments_BT[..., None, None] > 0, out_BTNH, 0)  # the kernel lets padding attend to padding


def _attend_rows(q_BNTH, k_BKTH, v_BKTH, segments_BT, kv_segments_BT, *, interpret: bool) -> jax.Array:
    num_heads, length = q_BNTH.shape[1:3]
    block = next(size for size in BLOCKS if length % size == 0)
    kernel = splash_attention.make_splash_mha(
        mask=splash_attention.MultiHeadMask([splash_attention.CausalMask((length, length))] * num_heads),
        block_sizes=splash_attention.BlockSizes(
            **{f"block_{name}": block for name in ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")}
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    return jax.vmap(kernel)(q_BNTH, k_BKTH, v_BKTH, splash_attention.SegmentIds(segments_BT, kv_segments_BT))
