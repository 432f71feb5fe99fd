"""What a chat's answer may consist of: free text, calls of tools, a given structure, reasoning before any of them.

Owns turning tools, their choice and the asked-for structure into one constraint, and making the parser that cuts the
answer. Both depend on the dialect of the model's template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from expertserve.engine.ports import Constraint
from expertserve.errors import RequestError
from expertserve.server.protocol import ChatBody, NamedTool
from expertserve.server.state import ServedModel
from expertserve.server.structure import requested_structure
from expertserve.text.answer import AnswerParser, Schemas
from expertserve.text.dialect import dialect_of
from expertserve.text.dialects.dialect import Dialect
from expertserve.text.grammar import Grammar, GrammarSource


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How one chat is answered.

    Attributes:
        constraint: what its tokens must follow.
        stop: what ends it besides the request's own strings.
        marks: tokens whose place in the text the parser wants to know, and their spellings.
    """

    constraint: Constraint | None
    stop: tuple[str, ...] = ()
    marks: Mapping[int, str] = field(default_factory=dict)


def model_dialect(model: ServedModel) -> Dialect:
    """The dialect of the model's template."""
    assert model.chat_template is not None
    return dialect_of(model.chat_template.source, model.tokenizer.special_id)


def known_effort(effort: str, model: ServedModel) -> str:
    """The reasoning effort nearest to the one asked for that the template knows."""
    known = model_dialect(model).efforts if model.chat_template is not None else ()
    if not known or effort in known:
        return effort
    return known[0] if effort in ("none", "minimal") else known[-1]


def answer_form(body: ChatBody, model: ServedModel, prompt: str) -> tuple[AnswerForm, Callable[[], AnswerParser]]:
    """The form of the answer to `prompt`, the rendered conversation, and what makes the parser of one choice.

    Raises:
        RequestError: a schema cannot be followed, or two fields ask for different forms.
    """
    dialect = model_dialect(model)
    opened = dialect.opened(prompt)
    schemas: Schemas = {tool.function.name: tool.function.parameters or {} for tool in body.tools or []}
    if body.tool_choice == "none":
        schemas = {}
    single = body.parallel_tool_calls is False and bool(schemas)
    stop = dialect.stop if single else None
    constraint = _grammar(body, model, dialect, schemas, opened)

    def parser() -> AnswerParser:
        made = dialect.parser(schemas, opened=opened, reasoning=body.reasoning_format != "none", parallel=not single)
        made.stop = stop
        return made

    return AnswerForm(constraint, () if stop is None else (stop,), dialect.marks.tokens), parser


def _grammar(body: ChatBody, model: ServedModel, dialect: Dialect, schemas: Schemas, opened: bool) -> Grammar | None:
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
        rules = dialect.forced_calls(schemas, opened=opened, parallel=parallel)
        return model.grammars.compile(GrammarSource("lark", rules), "tools")
    if structure is None:
        return None
    source, param = structure
    grammar = model.grammars.compile(source, param)  # alone first, so that an error of the schema has its field's name
    if schemas and source.kind == "json_schema":
        either = dialect.forced_calls(schemas, opened=opened, parallel=parallel, otherwise=True)
        return model.grammars.compile(GrammarSource("lark", either, source), "tools")
    around = dialect.structured(opened)
    return grammar if around is None else model.grammars.compile(GrammarSource("lark", around, source), param)
