"""Which grammar a request asks its answer to follow.

Owns the many names that clients have for it: OpenAI's `response_format`, llama.cpp's `grammar` and `json_schema`,
vLLM's `structured_outputs` and `guided_*`. Does not compile. A request has one of them, or none.
"""

from __future__ import annotations

import json
from typing import Any

from expertserve.errors import RequestError
from expertserve.server.protocol import GenerationBody, ResponseFormat, StructuredOutputs
from expertserve.text.grammar import GrammarSource, schema_source

# An answer that OpenAI's json_object admits: any object.
_ANY_OBJECT = {"type": "object"}


def requested_structure(body: GenerationBody) -> tuple[GrammarSource, str] | None:
    """The grammar with the name of the field that asks for it; None where the text is free.

    Raises:
        RequestError: two fields ask for one.
    """
    found = [*_of_format(body.response_format), *_of_fields(body), *_of_structured(body.structured_outputs)]
    if len(found) > 1:
        names = " and ".join(f"'{param}'" for _, param in found)
        raise RequestError(f"only one of {names} can decide the form of the answer", param=found[1][1])
    return found[0] if found else None


def _of_format(format: ResponseFormat | None) -> list[tuple[GrammarSource, str]]:
    if format is None or format.type == "text":
        return []
    if format.type == "json_object":
        schema = _ANY_OBJECT if format.schema_ is None else format.schema_
        return [(schema_source(schema), "response_format" if format.schema_ is None else "response_format.schema")]
    if format.json_schema is None:
        raise RequestError(
            "'response_format.json_schema' is needed for type json_schema",
            param="response_format.json_schema",
            code="missing_required_parameter",
        )
    return [(schema_source(format.json_schema.schema_), "response_format.json_schema.schema")]


def _of_fields(body: GenerationBody) -> list[tuple[GrammarSource, str]]:
    return [
        *_rules(body.grammar, "grammar"),
        *_rules(body.guided_grammar, "guided_grammar"),
        *_schema(body.json_schema, "json_schema"),
        *_schema(body.guided_json, "guided_json"),
        *_regex(body.guided_regex, "guided_regex"),
        *_choice(body.guided_choice, "guided_choice"),
    ]


def _of_structured(outputs: StructuredOutputs | None) -> list[tuple[GrammarSource, str]]:
    if outputs is None:
        return []
    prefix = "structured_outputs."
    any_object = _ANY_OBJECT if outputs.json_object else None
    return [
        *_rules(outputs.grammar, prefix + "grammar"),
        *_schema(outputs.json_, prefix + "json"),
        *_schema(any_object, prefix + "json_object"),
        *_regex(outputs.regex, prefix + "regex"),
        *_choice(outputs.choice, prefix + "choice"),
    ]


def _rules(text: str | None, param: str) -> list[tuple[GrammarSource, str]]:
    return [(GrammarSource("gbnf", text), param)] if text else []


def _regex(text: str | None, param: str) -> list[tuple[GrammarSource, str]]:
    return [(GrammarSource("regex", text), param)] if text else []


def _choice(choices: list[str] | None, param: str) -> list[tuple[GrammarSource, str]]:
    return [(GrammarSource("choice", json.dumps(choices)), param)] if choices else []


def _schema(schema: dict[str, Any] | str | None, param: str) -> list[tuple[GrammarSource, str]]:
    """vLLM takes a schema as its JSON text too."""
    if schema is None:
        return []
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise RequestError(f"'{param}' is no JSON: {error}", param=param, code="invalid_grammar") from None
    return [(schema_source(schema), param)]
