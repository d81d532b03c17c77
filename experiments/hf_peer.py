"""Training steps of a Hugging Face Llama, dense and made MoD by the package `mixture-of-depth`, for throughput.py.

    pip install torch mixture-of-depth==1.2.0 transformers==4.41.2

The package needs this transformers, which needs older tokenizers than our extra `bpe`: use an environment of their own.
Its routed block loops over rows in Python, keeps k - 1 tokens and weighs block and residual together. Its capacity
falls from 1 as the steps are counted; here it is what it ends at, 12.5 %.
"""

import torch
from MoD import apply_mod_to_hf
from transformers import LlamaConfig, LlamaForCausalLM

from mod_jax.config import Config

FALLEN = 10**9  # steps after which the package's capacity is what it stays at


def llama_steps(config: Config, vocab_size: int) -> dict:
    """name -> a function that takes one training step on random tokens. SwiGLU with as many FLOPs as our MLP."""
    torch.manual_seed(0)
    m, shape_BT = config.model, (config.train.batch_size, config.data.seq_len)
    llama = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=m.width,
        num_hidden_layers=m.depth,
        num_attention_heads=m.num_heads,
        num_key_value_heads=m.num_kv_heads,
        intermediate_size=2 * m.mlp_dim // 3,
        max_position_embeddings=m.context,
        tie_word_embeddings=m.tie_embedding,
        use_cache=False,
        attn_implementation="sdpa",
    )
    llama.architectures = ["LlamaForCausalLM"]
    tokens_BT = torch.randint(vocab_size, shape_BT)
    positions_BT = torch.arange(shape_BT[1]).expand(shape_BT)  # one row of them would do for Llama, not for the package

    def step(model):
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3, fused=True)

        def run():
            optimizer.zero_grad(set_to_none=True)
            model(input_ids=tokens_BT, position_ids=positions_BT, labels=tokens_BT).loss.backward()
            optimizer.step()

        return run

    routed = LlamaForCausalLM(llama)
    apply_mod_to_hf(routed)
    for layer in routed.model.layers[1::2]:
        layer.training_step = FALLEN
    return {"dense": step(LlamaForCausalLM(llama)), "MoD": step(routed)}
