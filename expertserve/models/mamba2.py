"""The Mamba-2 block (arXiv:2405.21060) as hybrids have it: a convolution, a scan, a gated norm by groups."""

from __future__ import annotations

from expertserve.errors import GGUFError
from expertserve.gguf.file import GGUFFile
from expertserve.models.hparams import read_count
from expertserve.models.model import Model
from expertserve.ops.base import Graph, ScanLayout, Tensor


def read_scans(file: GGUFFile, layers: list[int]) -> dict[int, ScanLayout]:
    """The state of each of `layers`, as the file's `ssm` keys have it."""
    heads, groups = read_count(file, "ssm.time_step_rank"), read_count(file, "ssm.group_count")
    inner, width, state_dim = (read_count(file, f"ssm.{key}") for key in ("inner_size", "conv_kernel", "state_size"))
    if inner % heads or heads % groups:
        raise GGUFError(
            f"{file.paths[0].name}: {inner} elements do not make {heads} state-space heads in {groups} groups"
        )
    return {layer: ScanLayout(layer, width, heads, groups, inner // heads, state_dim) for layer in layers}


def mamba2_block(model: Model, g: Graph, x: Tensor, state: ScanLayout) -> Tensor:
    """The block's output [rows, hidden] for normalised input x."""
    p, inner = f"blk.{state.layer}.ssm_", state.heads * state.head_dim
    both = g.linear(x, p + "in.weight")
    gate, taken = g.part(both, 0, inner), g.part(both, inner, inner + state.channels)
    dt = g.add_weight(g.part(both, inner + state.channels, both.shape[-1]), p + "dt.bias")
    convolved = g.causal_conv(taken, p + "conv1d.weight", state)
    if model.has(p + "conv1d.bias"):
        convolved = g.add_weight(convolved, p + "conv1d.bias")
    scanned = g.mul(g.selective_scan(g.silu(convolved), dt, p + "a", p + "d", state), g.silu(gate))
    by_group = g.reshape(scanned, (g.rows, state.groups, inner // state.groups))
    normed = g.mul_weight(g.rms_norm(by_group, None, model.hp.eps), p + "norm.weight")
    return g.linear(g.reshape(normed, (g.rows, inner)), p + "out.weight")
