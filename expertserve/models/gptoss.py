"""gpt-oss: attention with a sink a head, every other layer within a sliding window, experts with biases."""

from __future__ import annotations

from collections.abc import Mapping

from expertserve.models.batch import Reach
from expertserve.models.gqa import GqaModel
from expertserve.models.hparams import read_count
from expertserve.models.registry import register
from expertserve.ops.base import Activation


@register("gpt-oss")
class GptOss(GqaModel):
    """Order of operations of gpt-oss-20b and gpt-oss-120b (arXiv:2508.10925)."""

    activation = Activation.SWIGLU_OAI
    ffn_norm = "post_attention_norm"

    def reaches(self) -> Mapping[str, Reach]:
        return {"mask.window": Reach(read_count(self.file, "attention.sliding_window"))}

    def mask(self, layer: int) -> str:
        return "mask" if layer % 2 else "mask.window"
