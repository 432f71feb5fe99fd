"""Granite 4 hybrids (IBM): Mamba-2 beside attention without rotation, a shared expert, Granite's scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from expertserve.errors import GGUFError
from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower
from expertserve.models.granitemoe import GraniteMoe
from expertserve.models.hparams import read_count
from expertserve.models.registry import register
from expertserve.ops.base import Graph, RecurrentLayout, ScanLayout, Tensor


@register("granitehybrid")
class GraniteHybrid(GraniteMoe):
    """Layers without KV heads are Mamba-2's (arXiv:2405.21060)."""

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        heads, groups = read_count(file, "ssm.time_step_rank"), read_count(file, "ssm.group_count")
        inner, width, state_dim = (
            read_count(file, f"ssm.{key}") for key in ("inner_size", "conv_kernel", "state_size")
        )
        if inner % heads or heads % groups:
            raise GGUFError(
                f"{file.paths[0].name}: {inner} elements do not make {heads} state-space heads in {groups} groups"
            )
        self.scans = {
            layer: ScanLayout(layer, width, heads, groups, inner // heads, state_dim)
            for layer, kv_heads in enumerate(self.hp.kv_heads)
            if not kv_heads
        }

    def recurrent_layouts(self) -> Sequence[RecurrentLayout]:
        return list(self.scans.values())

    def attention(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        if layer not in self.scans:
            return super().attention(g, layer, x)
        p, state = f"blk.{layer}.ssm_", self.scans[layer]
        inner = state.heads * state.head_dim
        both = g.linear(x, p + "in.weight")
        gate, taken = g.part(both, 0, inner), g.part(both, inner, inner + state.channels)
        dt = g.add_weight(g.part(both, inner + state.channels, both.shape[-1]), p + "dt.bias")
        xbc = g.silu(g.add_weight(g.causal_conv(taken, p + "conv1d.weight", state), p + "conv1d.bias"))
        scanned = g.mul(g.selective_scan(xbc, dt, p + "a", p + "d", state), g.silu(gate))
        by_group = g.reshape(scanned, (g.rows, state.groups, inner // state.groups))
        normed = g.rms_norm(by_group, p + "norm.weight", self.hp.eps)
        return g.linear(g.reshape(normed, (g.rows, inner)), p + "out.weight")
