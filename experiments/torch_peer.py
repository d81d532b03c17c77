"""The blocks of `mod_jax.models` once more in plain PyTorch, for the `peers` table of throughput.py."""

import torch
from torch.nn import functional

from mod_jax import routing
from mod_jax.config import Config


class Block(torch.nn.Module):
    """Pre-norm attention with qk-norm and rotary positions, then an MLP with squared ReLU."""

    def __init__(self, config: Config):
        super().__init__()
        m = config.model
        self.num_heads, self.head_dim, self.base = m.num_heads, m.head_dim, m.rope_base
        self.attention_norm, self.mlp_norm = torch.nn.RMSNorm(m.width, eps=1e-6), torch.nn.RMSNorm(m.width, eps=1e-6)
        self.q_norm, self.k_norm = torch.nn.RMSNorm(m.head_dim, eps=1e-6), torch.nn.RMSNorm(m.head_dim, eps=1e-6)
        inner = m.num_heads * m.head_dim
        self.q, self.k, self.v = (torch.nn.Linear(m.width, inner, bias=False) for _ in range(3))
        self.o = torch.nn.Linear(inner, m.width, bias=False)
        self.up, self.down = (
            torch.nn.Linear(m.width, m.mlp_dim, bias=False),
            torch.nn.Linear(m.mlp_dim, m.width, bias=False),
        )

    def rotate(self, x_BTNH, positions_BT):
        half = self.head_dim // 2
        frequencies_H = self.base ** (-torch.arange(half) / half)
        angles_BT1H = positions_BT[..., None, None] * frequencies_H
        first, second = x_BTNH.chunk(2, dim=-1)
        sin, cos = angles_BT1H.sin(), angles_BT1H.cos()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def update(self, x_BTD, positions_BT):
        B, T, _ = x_BTD.shape
        h_BTD = self.attention_norm(x_BTD)
        q, k, v = (w(h_BTD).view(B, T, self.num_heads, self.head_dim) for w in (self.q, self.k, self.v))
        q, k = self.rotate(self.q_norm(q), positions_BT), self.rotate(self.k_norm(k), positions_BT)
        q, k, v = (a.transpose(1, 2) for a in (q, k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, -1)
        middle_BTD = x_BTD + self.o(attended)
        return middle_BTD - x_BTD + self.down(functional.relu(self.up(self.mlp_norm(middle_BTD))).square())

    def forward(self, x_BTD, positions_BT):
        return x_BTD + self.update(x_BTD, positions_BT)


class RoutedBlock(torch.nn.Module):
    """The block on the C tokens of each row that a linear router scores highest."""

    def __init__(self, config: Config, num_kept: int):
        super().__init__()
        self.block, self.num_kept = Block(config), num_kept
        self.router = torch.nn.Linear(config.model.width, 1, bias=False)

    def forward(self, x_BTD, positions_BT):
        scores_BT = self.router(functional.rms_norm(x_BTD, x_BTD.shape[-1:], eps=1e-6))[..., 0]
        idx_BC = scores_BT.topk(self.num_kept, dim=1).indices.sort(dim=1).values
        idx_BCD = idx_BC[..., None].expand(-1, -1, x_BTD.shape[-1])
        update_BCD = self.block.update(x_BTD.gather(1, idx_BCD), positions_BT.gather(1, idx_BC))
        return x_BTD.scatter_add(1, idx_BCD, scores_BT.gather(1, idx_BC)[..., None] * update_BCD)


def torch_programs(config: Config, batch_size: int, length: int) -> dict:
    """name -> a function that runs forward and backward once."""
    torch.manual_seed(0)
    positions_BT = torch.arange(length).expand(batch_size, length)
    x_BTD = torch.randn(batch_size, length, config.model.width, requires_grad=True)

    def program(block):
        def run():
            block.zero_grad(set_to_none=True)
            x_BTD.grad = None
            block(x_BTD, positions_BT).square().mean().backward()

        return run

    num_kept = routing.tokens_kept(length, config.routing.capacity)
    return {"full": program(Block(config)), "routed": program(RoutedBlock(config, num_kept))}
