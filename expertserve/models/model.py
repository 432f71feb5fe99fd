"""What a model family states: shapes and the order of operations, once for every device.

A forward is a chain of segments. Each ends where the host must route: `front` leaves the residual stream, the experts'
input and the router's logits in buffers; the next segment starts with `join`, which adds the experts' output. A family
implements `attention`, and overrides more only where it differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from expertserve.experts.router import RouterRule
from expertserve.gguf.file import GGUFFile, TensorInfo
from expertserve.gguf.spans import ExpertTower
from expertserve.models.hparams import HParams, read_hparams, read_router_rule
from expertserve.ops.base import Activation, ExpertShape, Graph, KVLayout, RecurrentLayout, Tensor


class Model(ABC):
    """A loaded description of one file; holds no weights."""

    normalise_router: ClassVar[bool] = True
    activation: ClassVar[Activation] = Activation.SILU
    ffn_norm: ClassVar[str] = "ffn_norm"

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower]) -> None:
        self.file = file
        self.hp: HParams = read_hparams(file)
        self.towers = {layer: tower for layer, tower in towers.items() if layer < self.hp.num_layers}
        self._routed = {part.name for tower in towers.values() for part in tower.slices}
        self.router: RouterRule = read_router_rule(file, self.hp.top_k, normalise=self.normalise_router)

    @property
    def vocab_size(self) -> int:
        """Rows of the output matrix."""
        return self.file.tensors[self.head_weight].shape[0]

    @property
    def head_weight(self) -> str:
        """The output matrix; the embedding where the two are tied."""
        return "output.weight" if self.has("output.weight") else "token_embd.weight"

    @property
    def has_shared_expert(self) -> bool:
        """Whether every token also passes through an always-resident expert."""
        return False

    def has(self, name: str) -> bool:
        """Whether the file has a tensor of this name."""
        return name in self.file.tensors

    def dense_weights(self) -> Sequence[TensorInfo]:
        """Everything but the towers, in file order."""
        dense = (info for info in self.file.tensors.values() if info.name not in self._routed)
        return sorted(dense, key=lambda info: (info.file_index, info.offset))

    def kv_layouts(self) -> Sequence[KVLayout]:
        """The KV cache's part of each layer that attends."""
        hp = self.hp
        return [KVLayout(layer, hp.num_kv_heads, hp.k_dim, hp.v_dim) for layer in range(hp.num_layers)]

    def recurrent_layouts(self) -> Sequence[RecurrentLayout]:
        """The recurrent state's part of each layer that has one."""
        return []

    def expert_shape(self, tower: ExpertTower) -> ExpertShape:
        """Sizes of one expert of `tower`."""
        down = tower.slices[tower.roles.index("down")]
        return ExpertShape(self.hp.hidden, down.shape[2], self.hp.top_k, self.activation)

    # -- order of operations ----------------------------------------------------------------------------------------

    def embed(self, g: Graph) -> Tensor:
        """Token ids to the residual stream [rows, hidden]."""
        return g.embed("token_embd.weight")

    @abstractmethod
    def attention(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        """The attention block's output [rows, hidden] for normalised input x."""

    def front(self, g: Graph, layer: int, x: Tensor, *, guess: bool = False) -> None:
        """Everything of a layer before its routed experts; leaves `residual`, `ffn_input`, `router` (and `shared`).

        With `guess` it also leaves in `guess` what the next layer's router makes of this layer's hidden state.
        """
        p = f"blk.{layer}."
        attended = self.attention(g, layer, g.rms_norm(x, p + "attn_norm.weight", self.hp.eps))
        residual = g.add(attended, x)
        ffn_input = g.rms_norm(residual, f"{p}{self.ffn_norm}.weight", self.hp.eps)
        g.store("residual", residual)
        g.store("ffn_input", ffn_input)
        g.store("router", self.router_logits(g, layer, ffn_input))
        if self.has_shared_expert:
            g.store("shared", self.shared_expert(g, layer, ffn_input))
        if guess:
            expected = g.rms_norm(residual, f"blk.{layer + 1}.{self.ffn_norm}.weight", self.hp.eps)
            g.store("guess", self.router_logits(g, layer + 1, expected))

    def router_logits(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        """The router's logits [rows, experts] for the experts' input x."""
        return g.linear(x, f"blk.{layer}.ffn_gate_inp.weight")

    def shared_expert(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        """The shared expert's output [rows, hidden]; asked for only where `has_shared_expert`."""
        raise AssertionError(f"{type(self).__name__} has no shared expert")

    def gated_shared_expert(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        """A shared expert behind a sigmoid gate of its own, for the families that have it so."""
        p = f"blk.{layer}.ffn_"
        h = g.gated(g.linear(x, p + "gate_shexp.weight"), g.linear(x, p + "up_shexp.weight"), self.activation)
        gate = g.sigmoid(g.linear(x, p + "gate_inp_shexp.weight"))
        return g.mul(g.linear(h, p + "down_shexp.weight"), gate)

    def join(self, g: Graph) -> Tensor:
        """The residual stream after a layer's experts: their weighted sum, the shared expert, the residual."""
        out = g.combine_experts(self.hp.hidden, self.hp.top_k)
        if self.has_shared_expert:
            out = g.add(out, g.load("shared"))
        return g.add(out, g.load("residual"))

    def head(self, g: Graph, x: Tensor) -> Tensor:
        """Logits [outputs, vocab] of the rows the batch asks for."""
        return g.linear(g.rms_norm(g.select_outputs(x), "output_norm.weight", self.hp.eps), self.head_weight)
