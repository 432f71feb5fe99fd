"""Which dialect a chat template speaks.

Owns telling it from the marks in the template's source, or, where that names none, from the vocabulary's special
tokens; the names of models and architectures are not looked at. Where nothing tells, calls are written in the
commonest way, which forced calls use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from expertserve.text.dialects.dialect import Around, Calls, Dialect, Either, SectionDialect
from expertserve.text.dialects.gemma_calls import GEMMA
from expertserve.text.dialects.harmony import SPELLINGS, HarmonyDialect
from expertserve.text.dialects.json_calls import (
    COHERE,
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

THINKS = (("<think>", "</think>"), ("<|START_THINKING|>", "<|END_THINKING|>"), ("[THINK]", "[/THINK]"))
GEMMA_THOUGHT = Around(("<|channel>thought\n", "<channel|>"), spellings=("<|channel>", "<channel|>"))
LFM = Either(LFM_PYTHONIC, LFM_JSON)
LLAMA_4 = Either(LLAMA, LLAMA_PYTHONIC)


@dataclass(frozen=True, slots=True)
class Told:
    """Calls, and the marks that tell them, all of them; `models` are those that write so, for the documents."""

    marks: tuple[str, ...]
    calls: Calls
    models: str


# The first that fits counts.
CALLS = (
    Told(("<minimax:tool_call>",), MINIMAX, "MiniMax-M2"),
    Told(("<\uff5ctool\u2581sep\uff5c>", "```json"), DEEPSEEK_V3, "DeepSeek-V3 and R1"),
    Told(("<\uff5ctool\u2581sep\uff5c>",), DEEPSEEK_V31, "DeepSeek-V3.1"),
    Told(("<|tool_call_begin|>",), KIMI, "Kimi-K2"),
    Told(("<|tool_call_start|>",), LFM, "LFM2 and LFM2.5, in Python's form or JSON"),
    Told(("<|tool_list_start|>",), LFM, "LFM2, older templates"),
    Told(("[TOOL_CALLS]", "[ARGS]"), MISTRAL_V11, "Mistral's since their tokenizer v11"),
    Told(("[TOOL_CALLS]",), MISTRAL, "Mixtral and older ones of Mistral"),
    Told(("<|tool_call>", "<tool_call|>"), GEMMA, "Gemma 4"),
    Told(("<|tool_call|>", "<|/tool_call|>"), PHI, "Phi-4"),
    Told(("<|tool_call|>",), GRANITE, "Granite 3"),
    Told(("<|START_ACTION|>",), COHERE, "Cohere's Command R7B, Command A and later ones"),
    Told(("<tool_calls>",), HUNYUAN, "Hunyuan-A13B"),
    Told(("<function=",), QWEN_CODER, "Qwen3-Coder, Qwen3.5, Nemotron 3, MiMo-V2, Step-3.5"),
    Told(("<arg_key>",), GLM, "GLM-4.5, GLM-4.6, GLM-4.7, GLM-5"),
    Told(("<tool_call>",), HERMES, "Hermes, Qwen2 to Qwen3, Granite 4, ERNIE 4.5, Ling"),
    Told(("<|python_start|>",), LLAMA_4, "Llama 4, JSON or in Python's form"),
)
HARMONY = ("<|start|>", "<|channel|>", "<|message|>")
_CONTENT = (
    ("<answer>", "</answer>"),
    ("<response>", "</response>"),
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|START_TEXT|>", "<|END_TEXT|>"),
)


def dialect_of(template: str, special_id: Callable[[str], int | None]) -> Dialect:
    """The dialect that a chat template's source speaks, in the vocabulary whose special tokens `special_id` knows."""
    if all(mark in template for mark in HARMONY):
        return HarmonyDialect(Marks(SPELLINGS, special_id))
    calls = _calls(template.__contains__) or _calls(lambda mark: special_id(mark) is not None) or HERMES
    around = _around(template)
    return SectionDialect(around, calls, Marks(around.spellings + calls.spellings, special_id))


def _calls(has: Callable[[str], bool]) -> Calls | None:
    return next((told.calls for told in CALLS if all(map(has, told.marks))), None)


def _around(template: str) -> Around:
    if "<|channel>thought" in template:
        return GEMMA_THOUGHT
    reasoning = next((pair for pair in THINKS if pair[1] in template), None)
    if reasoning is None:
        return Around()
    content = next((pair for pair in _CONTENT if pair[0] in template and pair[1] in template), None)
    return Around(reasoning, content, reasoning + (content or ()))
