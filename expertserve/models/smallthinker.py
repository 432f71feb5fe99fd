"""SmallThinker: a router that gets what its layer gets, ReLU experts, windows in three layers of four."""

from __future__ import annotations

from collections.abc import Mapping

from expertserve.models.batch import Reach
from expertserve.models.gqa import GqaModel
from expertserve.models.registry import register
from expertserve.ops.base import Activation, Graph, Rope, Tensor

WINDOW, PERIOD = 4096, 4


@register("smallthinker")
class SmallThinker(GqaModel):
    """The first layer of every four sees all and does not rotate; the constants above are llama.cpp's, not the file's.

    Where the file says that there is no window, all layers see all and rotate.
    """

    activation = Activation.RELU

    def reaches(self) -> Mapping[str, Reach]:
        return {"mask.window": Reach(WINDOW)} if self._has_windows else {}

    def mask(self, layer: int) -> str:
        return "mask.window" if self._has_windows and layer % PERIOD else "mask"

    def rope_of(self, layer: int) -> Rope | None:
        return self.rope if not self._has_windows or layer % PERIOD else None

    @property
    def _has_windows(self) -> bool:
        window: int = self.file.get("attention.sliding_window", 0, kind=int)
        return window > 0

    def front(self, g: Graph, layer: int, x: Tensor, *, guess: int | None = None) -> None:
        g.store("router", self.router_logits(g, layer, x))
        residual, ffn_input = self._attend(g, layer, x)
        g.store("residual", residual)
        g.store("ffn_input", ffn_input)
        if guess is not None:
            g.store("guess", self.router_logits(g, guess, residual))
