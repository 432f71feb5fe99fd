"""Llama-style decoders with experts: Mixtral (arXiv:2401.04088) and models merged in its layout."""

from __future__ import annotations

from expertserve.models.gqa import GqaModel
from expertserve.models.registry import register
from expertserve.ops.base import RopeStyle


@register("llama")
class LlamaMoe(GqaModel):
    """Order of operations of Mixtral; neighbouring elements rotate together."""

    rope_style = RopeStyle.NORMAL
