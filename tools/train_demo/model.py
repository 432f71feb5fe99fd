"""The demo model in PyTorch, `qwen3moe` as GGUF names it: grouped-query attention, normalised heads, SwiGLU experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the defaults are the shipped one's."""

    vocab: int = 4096
    layers: int = 6
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 40
    top_k: int = 4
    ffn: int = 128
    context: int = 1024
    rope_base: float = 10000.0
    norm_eps: float = 1e-6


class Norm(nn.Module):
    """RMSNorm (Zhang and Sennrich, 2019) with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def rope_tables(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (length, head_dim / 2), of rotary embedding (Su et al., 2021)."""
    frequency = shape.rope_base ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x, (batch, heads, length, head_dim), rotated: element i goes with element i + head_dim / 2."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention with RMSNorm on each head of the queries and keys."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.q = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.output = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.q_norm = Norm(s.head_dim, s.norm_eps)
        self.k_norm = Norm(s.head_dim, s.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.q(x).view(batch, length, -1, self.s.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k(x).view(batch, length, -1, self.s.head_dim)).transpose(1, 2)
        v = self.v(x).view(batch, length, -1, self.s.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        share = self.s.heads // self.s.kv_heads
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(out.transpose(1, 2).reshape(batch, length, -1))


class Experts(nn.Module):
    """A router and its SwiGLU experts; the gates of the top k are normalised to a sum of one.

    The load-balancing loss is that of Switch Transformer (Fedus et al., 2021), with the router's z-loss of ST-MoE
    (Zoph et al., 2022).
    """

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.router = nn.Linear(s.hidden, s.experts, bias=False)
        self.gate = nn.Parameter(torch.randn(s.experts, s.ffn, s.hidden) * s.hidden**-0.5)
        self.up = nn.Parameter(torch.randn(s.experts, s.ffn, s.hidden) * s.hidden**-0.5)
        self.down = nn.Parameter(torch.randn(s.experts, s.hidden, s.ffn) * s.ffn**-0.5 * 0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The output (tokens, hidden), the router's loss, and the experts (tokens, top_k) picked for x."""
        with torch.autocast("cpu", enabled=False):
            logits = self.router(x.float())
        odds = logits.softmax(-1)
        gates, picked = odds.topk(self.s.top_k, dim=-1)
        gates = gates / gates.sum(-1, keepdim=True)
        counts = torch.bincount(picked.flatten(), minlength=self.s.experts)
        share = counts.float() / picked.numel()
        loss = self.s.experts * (share * odds.mean(0)).sum() + 0.1 * logits.logsumexp(-1).square().mean()
        order = picked.flatten().argsort(stable=True)
        rows = order // self.s.top_k
        kind = torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32
        towers = torch.cat((self.gate, self.up), dim=1).to(kind).unbind(), self.down.to(kind).unbind()
        hidden = [
            F.linear(part, gate_up)
            for part, gate_up in zip(x.to(kind)[rows].split(counts.tolist()), towers[0], strict=True)
        ]
        gate, up = torch.cat(hidden).chunk(2, dim=-1)
        inner = (F.silu(gate) * up).split(counts.tolist())
        out = torch.cat([F.linear(part, down) for part, down in zip(inner, towers[1], strict=True)])
        out = out.float() * gates.flatten()[order, None]
        return torch.zeros_like(x, dtype=torch.float32).index_add(0, rows, out), loss, picked


class Block(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.attn_norm = Norm(s.hidden, s.norm_eps)
        self.attn = Attention(s)
        self.ffn_norm = Norm(s.hidden, s.norm_eps)
        self.ffn = Experts(s)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.attn(self.attn_norm(x), cos, sin).float()
        out, loss, picked = self.ffn(self.ffn_norm(x).flatten(0, 1))
        return x + out.view_as(x), loss, picked


class Model(nn.Module):
    """The whole model; the output matrix is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(shape.vocab, shape.hidden) * 0.02)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.norm_eps)
        for block in self.blocks:
            nn.init.normal_(block.attn.output.weight, std=0.3 * shape.hidden**-0.5)
            nn.init.normal_(block.ffn.router.weight, std=0.02)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (batch, length, vocab), mean router loss, and the picked experts (layers, batch * length, top_k)."""
        cos, sin = rope_tables(self.shape, tokens.shape[1])
        x = self.embedding[tokens]
        losses, picks = [], []
        for block in self.blocks:
            x, loss, picked = block(x, cos, sin)
            losses.append(loss)
            picks.append(picked)
        return F.linear(self.norm(x), self.embedding), torch.stack(losses).mean(), torch.stack(picks)
