"""Qwen3-VL-MoE, its text: Qwen3-MoE, whose RoPE has sections for pictures that all turn alike in text."""

from __future__ import annotations

from expertserve.models.qwen3moe import Qwen3Moe
from expertserve.models.registry import register


@register("qwen3vlmoe")
class Qwen3VlMoe(Qwen3Moe):
    """A text token has the same position in time, height and width; what pictures add to early layers is nothing."""
