"""Which dialect a chat template speaks.

Owns telling it from the marks in the template's source, or, where that names none, from the vocabulary's special
tokens; the names of models and architectures are not looked at. Where nothing tells, calls are written in the
commonest way, which forced calls use.
"""

from __future__ import annotations

from collections.abc import Callable

from expertserve.text.dialects.dialect import Around, Calls, Dialect, Either, SectionDialect
from expertserve.text.dialects.gemma_calls import GEMMA
from expertserve.text.dialects.harmony import SPELLINGS, HarmonyDialect
from expertserve.text.dialects.json_calls import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GRANITE,
    HERMES,
    HUNYUAN,
    KIMI,
    LFM_JSON,
    LLAMA,
    MISTRAL,
    MISTRAL_V11,
    PHI,
)
from expertserve.text.dialects.marks import Marks
from expertserve.text.dialects.pythonic_calls import LFM_PYTHONIC, LLAMA_PYTHONIC
from expertserve.text.dialects.tagged_calls import GLM, MINIMAX, QWEN_CODER

THINK = ("<think>", "</think>")
GEMMA_THOUGHT = Around(("<|channel>thought\n", "<channel|>"), spellings=("<|channel>", "<channel|>"))
LFM = Either(LFM_PYTHONIC, LFM_JSON)
LLAMA_4 = Either(LLAMA, LLAMA_PYTHONIC)

# Marks that a template has, all of them, and the calls they tell; the first that fits counts.
_CALLS: tuple[tuple[tuple[str, ...], Calls], ...] = (
    (("<minimax:tool_call>",), MINIMAX),
    (("<\uff5ctool\u2581sep\uff5c>", "```json"), DEEPSEEK_V3),
    (("<\uff5ctool\u2581sep\uff5c>",), DEEPSEEK_V31),
    (("<|tool_call_begin|>",), KIMI),
    (("<|tool_call_start|>",), LFM),
    (("<|tool_list_start|>",), LFM),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_V11),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<|tool_call>", "<tool_call|>"), GEMMA),
    (("<|tool_call|>", "<|/tool_call|>"), PHI),
    (("<|tool_call|>",), GRANITE),
    (("<tool_calls>",), HUNYUAN),
    (("<function=",), QWEN_CODER),
    (("<arg_key>",), GLM),
    (("<tool_call>",), HERMES),
    (("<|python_start|>",), LLAMA_4),
)
_CONTENT = (("<answer>", "</answer>"), ("<response>", "</response>"))


def dialect_of(template: str, special_id: Callable[[str], int | None]) -> Dialect:
    """The dialect that a chat template's source speaks, in the vocabulary whose special tokens `special_id` knows."""
    if all(mark in template for mark in ("<|start|>", "<|channel|>", "<|message|>")):
        return HarmonyDialect(Marks(SPELLINGS, special_id))
    calls = _calls(template.__contains__) or _calls(lambda mark: special_id(mark) is not None) or HERMES
    around = _around(template)
    return SectionDialect(around, calls, Marks(around.spellings + calls.spellings, special_id))


def _calls(has: Callable[[str], bool]) -> Calls | None:
    return next((calls for marks, calls in _CALLS if all(map(has, marks))), None)


def _around(template: str) -> Around:
    if "<|channel>thought" in template:
        return GEMMA_THOUGHT
    if THINK[1] not in template:
        return Around()
    content = next((pair for pair in _CONTENT if pair[0] in template and pair[1] in template), None)
    return Around(THINK, content, THINK + (content or ()))
