"""Mistral 4 (Small 4, Large 3): DeepSeek's attention and experts, with queries that grow with the position."""

from __future__ import annotations

from expertserve.models.deepseek2 import DeepSeek2
from expertserve.models.registry import register


@register("mistral4")
class Mistral4(DeepSeek2):
    """Its file says everything in which it differs."""
