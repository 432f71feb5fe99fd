"""What a model family states: shapes and the order of operations, once for every device.

A forward is a chain of segments. Each ends where the host must route: `front` leaves the residual stream, the experts'
input and the router's logits in buffers; the next segment starts with `join`, which adds the experts' output. A family
implements `attention`, and overrides more only where it differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from expertserve.errors import UnsupportedModelError
from expertserve.experts.router import RouterRule
from expertserve.gguf.file import GGUFFile, TensorInfo
from expertserve.gguf.spans import ExpertTower
from expertserve.models.batch import Reach
from expertserve.models.hparams import HParams, read_float, read_hparams, read_router_rule
from expertserve.ops.base import Activation, ExpertShape, Graph, KVLayout, RecurrentLayout, Tensor

PositionFactor = Callable[[NDArray[np.int32]], NDArray[np.float32]]


class Model(ABC):
    """A loaded description of one file; holds no weights."""

    normalise_router: ClassVar[bool] = True
    activation: ClassVar[Activation] = Activation.SILU
    ffn_norm: ClassVar[str] = "ffn_norm"
    output_norm: ClassVar[str] = "output_norm"
    gated: ClassVar[bool] = True
    """Whether feed-forwards have a gate beside their up."""
    weigh_inputs: ClassVar[bool] = False
    """Whether the router's weights multiply what goes into the experts instead of what comes out."""
    predicts_ahead: ClassVar[bool] = False
    """Whether the family's draft layer (MTP) is served, in files that have one."""

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        """With `draft` the layer after the trunk is part of it, which predicts one token further ahead.

        Raises:
            UnsupportedModelError: there is no such layer in the file, or one of the trunk is not whole.
        """
        self.file = file
        self.hp: HParams = read_hparams(file)
        self.draft_layer = self._find_draft_layer() if draft else None
        self.towers = {layer: towers[layer] for layer in sorted(towers) if self._takes_part(layer)}
        self._routed = {part.name for tower in towers.values() for part in tower.slices}
        self.embedding_scale = read_float(file, "embedding_scale", 1.0) or 1.0
        self.residual_scale = read_float(file, "residual_scale", 1.0) or 1.0
        self.logit_scale = read_float(file, "logit_scale", 1.0) or 1.0
        self.logit_softcap = read_float(file, "final_logit_softcapping", 0.0)
        self._check_layers()
        self.router: RouterRule = read_router_rule(file, self.hp.top_k, normalise=self.normalise_router)

    def _check_layers(self) -> None:
        where = self.file.paths[0].name
        for layer in range(self.hp.num_layers):
            if layer not in self.towers and not self.is_dense(layer):
                raise UnsupportedModelError(
                    f"{where}: layer {layer} has neither routed experts nor a dense feed-forward"
                )
        for layer, tower in self.towers.items():
            if self.gated == (tower.roles == ("up", "down")):
                found, wanted = ", ".join(tower.roles), "a gate" if self.gated else "no gate"
                raise UnsupportedModelError(f"{where}: experts of layer {layer} have {found}, expected {wanted}")

    def is_dense(self, layer: int) -> bool:
        """Whether the file has what a layer without routed experts consists of."""
        return self.has(f"blk.{layer}.ffn_up.weight")

    @property
    def expert_hidden(self) -> int:
        """Elements of what goes into an expert, and of what comes out."""
        return self.hp.hidden

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
        return any(self.has(f"blk.{layer}.ffn_up_shexp.weight") for layer in self.towers)

    def router_bias(self, layer: int) -> str | None:
        """The weight added to a layer's scores for the choice of experts, where the file has one."""
        return self.optional(f"blk.{layer}.exp_probs_b.bias")

    def expert_scale(self, layer: int) -> str | None:
        """The weight that multiplies what each of a layer's experts gives, where the file has one."""
        return self.optional(f"blk.{layer}.ffn_down_exps.scale")

    @property
    def drafts(self) -> bool:
        """Whether the file has a layer that predicts further ahead, of a kind that is served."""
        return self.predicts_ahead and self.has(f"blk.{self.hp.num_layers}.nextn.eh_proj.weight")

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

    def optional(self, name: str) -> str | None:
        """The name, where the file has such a tensor."""
        return name if self.has(name) else None

    def dense_weights(self) -> Sequence[TensorInfo]:
        """Everything but the towers, in file order."""
        dense = (
            info
            for info in self.file.tensors.values()
            if info.name not in self._routed and self._takes_part(_layer_of(info.name))
        )
        return sorted(dense, key=lambda info: (info.file_index, info.offset))

    def kv_layout(self, layer: int) -> KVLayout:
        """The KV cache's part of a layer that attends."""
        return KVLayout(layer, self.hp.kv_heads[layer], self.hp.k_dim, self.hp.v_dim)

    def kv_layouts(self) -> Sequence[KVLayout]:
        """Those of all layers that attend."""
        others = {state.layer for state in self.recurrent_layouts()}
        others |= {layer for layer, heads in enumerate(self.hp.kv_heads) if not heads}
        layers = [*range(self.hp.num_layers), *([] if self.draft_layer is None else [self.draft_layer])]
        return [self.kv_layout(layer) for layer in layers if layer not in others]

    def recurrent_layouts(self) -> Sequence[RecurrentLayout]:
        """The recurrent state's part of each layer that has one."""
        return []

    def reaches(self) -> Mapping[str, Reach]:
        """By the name of a mask: how far back the layers see that attend through it; they see all through `mask`."""
        return {}

    def position_factors(self) -> Mapping[str, PositionFactor]:
        """By the name of a buffer [rows, 1] that layers load: the function from tokens' positions to it."""
        return {}

    def fit_context(self, tokens: int) -> None:  # noqa: B027  most families compute the same at any length
        """Takes note, before anything is built of the model, how long a sequence may become."""

    def expert_shape(self, tower: ExpertTower) -> ExpertShape:
        """Sizes of one expert of `tower`."""
        down = tower.slices[tower.roles.index("down")]
        names = {role: f"blk.{tower.layer}.ffn_{role}_exps.bias" for role in tower.roles}
        biases = {role: name for role, name in names.items() if self.has(name)}
        return ExpertShape(self.expert_hidden, down.shape[2], self.hp.top_k, self.activation, biases, self.weigh_inputs)

    # -- order of operations ----------------------------------------------------------------------------------------

    def embed(self, g: Graph) -> Tensor:
        """Token ids to the residual stream [rows, hidden]."""
        return self._scaled(g, g.embed("token_embd.weight"), self.embedding_scale)

    @abstractmethod
    def attention(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        """The attention block's output [rows, hidden] for normalised input x."""

    def front(self, g: Graph, layer: int, x: Tensor, *, guess: int | None = None) -> None:
        """Everything of a layer before its routed experts; leaves `residual`, `ffn_input`, `router` (and `shared`).

        It also leaves in `guess` what the router of the layer `guess` makes of this layer's hidden state.
        """
        residual, ffn_input = self._attend(g, layer, x)
        g.store("residual", residual)
        g.store("ffn_input", self.expert_input(g, layer, ffn_input))
        g.store("router", self.router_logits(g, layer, ffn_input))
        if self.has_shared_expert:
            g.store("shared", self.shared_expert(g, layer, ffn_input))
        if guess is not None:
            expected = self.norm(g, residual, f"blk.{guess}.{self.ffn_norm}")
            g.store("guess", self.router_logits(g, guess, expected))

    def expert_input(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        """What the routed experts get of x [rows, hidden], which the router and the shared expert get."""
        return x

    def routed(self, g: Graph, layer: int) -> Tensor:
        """What a layer's routed experts give together, [rows, hidden]."""
        return g.combine_experts(self.expert_hidden, self.hp.top_k, weighted=not self.weigh_inputs)

    def dense_layer(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        """The residual stream after a layer that has no routed experts."""
        residual, ffn_input = self._attend(g, layer, x)
        out = self.feed_forward_output(g, layer, self._feed_forward(g, f"blk.{layer}.ffn_", "", ffn_input))
        return g.add(out, residual)

    def feed_forward_output(self, g: Graph, layer: int, out: Tensor) -> Tensor:
        """What is added to the residual stream for the output of a layer's feed-forward, dense or routed."""
        return self._scaled(g, out, self.residual_scale)

    def _attend(self, g: Graph, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream after a layer's attention, and what its feed-forward gets."""
        p = f"blk.{layer}."
        attended = self.attention(g, layer, self.norm(g, x, p + "attn_norm"))
        residual = g.add(self._scaled(g, attended, self.residual_scale), x)
        return residual, self.norm(g, residual, p + self.ffn_norm)

    def norm(self, g: Graph, x: Tensor, name: str) -> Tensor:
        """x normalised by the weight of that name, plus the bias where the file has one."""
        out, bias = g.rms_norm(x, f"{name}.weight", self.hp.eps), self.optional(f"{name}.bias")
        return out if bias is None else g.add_weight(out, bias)

    def router_logits(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        """The router's logits [rows, experts] for the experts' input x."""
        p = f"blk.{layer}.ffn_gate_inp."
        return g.linear(x, p + "weight", self.optional(p + "bias"))

    def shared_expert(self, g: Graph, layer: int, x: Tensor) -> Tensor:
        """The shared expert's output [rows, hidden], behind a sigmoid gate of its own where the file has one."""
        p = f"blk.{layer}.ffn_"
        out = self._feed_forward(g, p, "_shexp", x)
        if not self.has(p + "gate_inp_shexp.weight"):
            return out
        return g.mul(out, g.sigmoid(g.linear(x, p + "gate_inp_shexp.weight")))

    def _feed_forward(self, g: Graph, p: str, suffix: str, x: Tensor) -> Tensor:
        up = g.linear(x, f"{p}up{suffix}.weight")
        gate = g.linear(x, f"{p}gate{suffix}.weight") if self.gated else up
        return g.linear(g.gated(gate, up, self.activation), f"{p}down{suffix}.weight")

    def draft_input(self, g: Graph) -> Tensor:
        """The draft layer's residual stream, from the tokens and the buffer `draft_hidden`."""
        p = f"blk.{self.draft_layer}.nextn."
        own = self.has(p + "embed_tokens.weight")
        token = g.rms_norm(
            g.embed(p + "embed_tokens.weight") if own else self.embed(g), p + "enorm.weight", self.hp.eps
        )
        hidden = g.rms_norm(g.load("draft_hidden"), p + "hnorm.weight", self.hp.eps)
        return g.linear(g.concat(token, hidden), p + "eh_proj.weight")

    def draft_norm(self, g: Graph, x: Tensor) -> Tensor:
        """The draft layer's final norm: what its output matrix gets, and what the next draft starts from."""
        return g.rms_norm(x, f"blk.{self.draft_layer}.nextn.shared_head_norm.weight", self.hp.eps)

    def draft_logits(self, g: Graph, x: Tensor) -> Tensor:
        """Logits of what `draft_norm` gave, by the draft layer's own output matrix where it has one."""
        own = f"blk.{self.draft_layer}.nextn.shared_head_head.weight"
        return g.linear(x, own) if self.has(own) else self.logits(g, x)

    def join(self, g: Graph, layer: int) -> Tensor:
        """The residual stream after a layer's experts: their weighted sum, the shared expert, the residual."""
        out = self.routed(g, layer)
        if self.has_shared_expert:
            out = g.add(out, g.load("shared"))
        return g.add(self.feed_forward_output(g, layer, out), g.load("residual"))

    def final_norm(self, g: Graph, x: Tensor) -> Tensor:
        """What the output matrix gets for the residual stream x."""
        return self.norm(g, x, self.output_norm)

    def logits(self, g: Graph, x: Tensor) -> Tensor:
        """Logits [.., vocab] of what `final_norm` gave."""
        cap = self.logit_softcap
        out = self._scaled(g, g.linear(x, self.head_weight, self.optional("output.bias")), 1.0 / self.logit_scale)
        return g.scale(g.tanh(g.scale(out, 1 / cap)), cap) if cap else out

    def _scaled(self, g: Graph, x: Tensor, factor: float) -> Tensor:
        return x if factor == 1.0 else g.scale(x, factor)


def _layer_of(name: str) -> int:
    """The layer a tensor belongs to; -1 for those of the whole model."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" and parts[1].isdecimal() else -1
