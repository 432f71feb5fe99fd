"""What a chat's answer may consist of: free text, calls of tools, a given structure, reasoning before any of them.

Owns turning tools, their choice and the asked-for structure into one constraint, and making the parser that cuts the
answer. Both depend on the dialect of the model's template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from expertserve.engine.ports import Constraint
from expertserve.errors import RequestError
from expertserve.server.protocol import ChatBody, NamedTool
from expertserve.server.state import ServedModel
from expertserve.server.structure import requested_structure
from expertserve.text.answer import AnswerParser
from expertserve.text.dialect import Dialect, dialect_of
from expertserve.text.grammar import AfterReasoning, Grammar, GrammarSource

Schemas = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How one chat is answered.

    Attributes:
        constraint: what its tokens must follow.
        stop: what ends it besides the request's own strings.
        parser: makes the parser of one choice.
    """

    constraint: Constraint | None
    stop: tuple[str, ...]
    parser: Callable[[], AnswerParser]


def answer_form(body: ChatBody, model: ServedModel, prompt: str) -> AnswerForm:
    """The form of the answer to `prompt`, the rendered conversation.

    Raises:
        RequestError: a schema cannot be followed, or two fields ask for different forms.
    """
    assert model.chat_template is not None
    dialect = dialect_of(model.chat_template.source)
    opened = dialect.reasoning is not None and prompt.rstrip().endswith(dialect.reasoning[0])
    schemas: Schemas = {tool.function.name: tool.function.parameters or {} for tool in body.tools or []}
    if body.tool_choice == "none":
        schemas = {}
    grammar = _grammar(body, model, dialect, schemas)
    constraint = None if grammar is None else _after_reasoning(grammar, model, dialect, opened)
    single = body.parallel_tool_calls is False and bool(schemas)
    shown = dialect if body.reasoning_format != "none" else Dialect(None, dialect.calls)
    return AnswerForm(
        constraint, (dialect.calls.close,) if single else (), lambda: AnswerParser(shown, schemas, opened)
    )


def _grammar(body: ChatBody, model: ServedModel, dialect: Dialect, schemas: Schemas) -> Grammar | None:
    structure = requested_structure(body)
    parallel = body.parallel_tool_calls is not False
    if body.tool_choice not in (None, "none", "auto"):
        if structure is not None:
            raise RequestError(
                f"'tool_choice' asks for a call and '{structure[1]}' for another text", param=structure[1]
            )
        if isinstance(body.tool_choice, NamedTool):
            name = body.tool_choice.function.name
            schemas, parallel = {name: schemas[name]}, False
        return model.grammars.compile(GrammarSource("lark", dialect.forced_calls(schemas, parallel)), "tools")
    if structure is None:
        return None
    source, param = structure
    grammar = model.grammars.compile(source, param)  # alone first, so that an error of the schema has its field's name
    if not schemas or source.kind != "json_schema":
        return grammar
    either = dialect.forced_calls(schemas, parallel, otherwise=source.text)
    return model.grammars.compile(GrammarSource("lark", either), "tools")


def _after_reasoning(grammar: Grammar, model: ServedModel, dialect: Dialect, opened: bool) -> Constraint:
    """Lets the model reason first where the marks of its reasoning are tokens."""
    if dialect.reasoning is None:
        return grammar
    encode = model.tokenizer.encode
    marks = [encode(mark, add_special=False, parse_special=True) for mark in dialect.reasoning]
    if any(len(ids) != 1 for ids in marks):
        return grammar
    return AfterReasoning(grammar, marks[0][0], marks[1][0], opened, model.tokenizer.eog_ids)
