"""What a model family states: shapes and the order of operations, once for every device.

A forward is a chain of segments. Each ends where the host must route: `front` leaves the residual stream, the experts'
input and the router's logits in buffers; the next segment starts with `join`, which adds the experts' output. A family
implements `attention`, and overrides more only where it differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from expertserve.errors import UnsupportedModelError
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

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        """With `draft` the layer after the trunk is part of it, which predicts one token further ahead.

        Raises:
            UnsupportedModelError: the family has no use for such a layer, or the file has none.
        """
        self.file = file
        self.hp: HParams = read_hparams(file)
        self.draft_layer = self._find_draft_layer() if draft else None
        self.towers = {layer: towers[layer] for layer in sorted(towers) if self._takes_part(layer)}
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

    @property
    def drafts(self) -> bool:
        """Whether the family can use a layer that predicts further ahead, and the file has one."""
        return False

    def _find_draft_layer(self) -> int:
        if not self.drafts:
            raise UnsupportedModelError(
                f"{self.file.paths[0].name}: no layer that predicts further ahead (MTP); use --draft off"
            )
        return self.hp.num_layers

    def _takes_part(self, layer: int) -> bool:
        return layer < self.hp.num_layers or layer == self.draft_layer

    def has(self, name: str) -> bool:
        """Whether the file has a tensor of this name."""
        return name in self.file.tensors

    def dense_weights(self) -> Sequence[TensorInfo]:
        """Everything but the towers, in file order."""
        dense = (
            info
            for info in self.file.tensors.values()
            if info.name not in self._routed and self._takes_part(_layer_of(info.name))
        )
        return sorted(dense, key=lambda info: (info.file_index, info.offset))

    def kv_layouts(self) -> Sequence[KVLayout]:
        """The KV cache's part of each layer that attends."""
        hp = self.hp
        layers = [*range(hp.num_layers), *([] if self.draft_layer is None else [self.draft_layer])]
        return [KVLayout(layer, hp.num_kv_heads, hp.k_dim, hp.v_dim) for layer in layers]

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

    def draft_input(self, g: Graph) -> Tensor:
        """The draft layer's residual stream, from the tokens and the buffer `draft_hidden`."""
        raise AssertionError(f"{type(self).__name__} does not draft")

    def draft_norm(self, g: Graph, x: Tensor) -> Tensor:
        """The draft layer's final norm: what the output matrix gets, and what the next draft starts from."""
        raise AssertionError(f"{type(self).__name__} does not draft")

    def join(self, g: Graph) -> Tensor:
        """The residual stream after a layer's experts: their weighted sum, the shared expert, the residual."""
        out = g.combine_experts(self.hp.hidden, self.hp.top_k)
        if self.has_shared_expert:
            out = g.add(out, g.load("shared"))
        return g.add(out, g.load("residual"))

    def head(self, g: Graph, x: Tensor) -> Tensor:
        """Logits [outputs, vocab] of the rows the batch asks for."""
        return g.linear(self.final_norm(g, g.select_outputs(x)), self.head_weight)

    def final_norm(self, g: Graph, x: Tensor) -> Tensor:
        """What the output matrix gets for the residual stream x."""
        return g.rms_norm(x, "output_norm.weight", self.hp.eps)


def _layer_of(name: str) -> int:
    """The layer a tensor belongs to; -1 for those of the whole model."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" and parts[1].isdecimal() else -1
