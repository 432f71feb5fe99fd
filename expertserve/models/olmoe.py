"""OLMoE (arXiv:2409.02060): Q and K normalised over the whole row, router weights as softmax gave them."""

from __future__ import annotations

from expertserve.models.gqa import GqaModel, QKNorm
from expertserve.models.registry import register


@register("olmoe")
class Olmoe(GqaModel):
    """Order of operations of OLMoE-1B-7B."""

    qk_norm = QKNorm.ROW
    normalise_router = False
