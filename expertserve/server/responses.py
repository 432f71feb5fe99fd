"""OpenAI's Responses API, as far as it is text and function tools.

Owns its request, which becomes a chat, and the form of its answers. Nothing is stored: a request that goes on from an
earlier response, or asks for tools that a server runs, is refused by name.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from expertserve.engine.request import FinishEvent
from expertserve.errors import ExpertServeError, RequestError
from expertserve.server.blocks import BlockStream, BlockTexts
from expertserve.server.chat import call_id
from expertserve.server.envelope import Envelope, named_event
from expertserve.server.generation import Generation
from expertserve.server.protocol import Body, ChatBody, chat_body
from expertserve.text.answer import AnswerParser, Piece


class ResponsesTool(Body):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextOptions(Body):
    format: TextFormat | None = None


class ReasoningOptions(Body):
    effort: str | None = None


class ResponsesBody(Body):
    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    tools: list[ResponsesTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    grammar: str | None = None
    store: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    previous_response_id: str | None = None
    background: bool | None = None

    def chat(self) -> ChatBody:
        """The same as a chat.

        Raises:
            RequestError: an item or field is not served.
        """
        for name in ("previous_response_id", "background"):
            if getattr(self, name):
                raise RequestError(f"responses are not stored: '{name}' is not served", param=name)
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            for index, item in enumerate(self.input):
                _add_item(messages, item, f"input[{index}]")
        fields: dict[str, Any] = {
            "messages": messages,
            "model": self.model,
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "grammar": self.grammar,
            "user": self.user,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "response_format": _response_format(self.text.format if self.text else None),
        }
        return chat_body({**fields, **self._tool_fields()})

    def _tool_fields(self) -> dict[str, Any]:
        if not self.tools:
            return {}
        tools = []
        for index, tool in enumerate(self.tools):
            if tool.type != "function" or tool.name is None:
                raise RequestError(
                    f"tools of type '{tool.type}' are not served, only functions with a name", param=f"tools[{index}]"
                )
            function = {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters or {}}
            tools.append({"type": "function", "function": function})
        choice = self.tool_choice
        if isinstance(choice, dict):
            choice = {"type": "function", "function": {"name": str(choice.get("name"))}}
        parallel = self.parallel_tool_calls is not False
        return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}


def _response_format(format: TextFormat | None) -> dict[str, Any] | None:
    if format is None or format.type != "json_schema":
        return None if format is None else {"type": format.type}
    if format.schema_ is None:
        raise RequestError("'text.format.schema' is needed for type json_schema", param="text.format.schema")
    return {"type": "json_schema", "json_schema": {"name": format.name, "schema": format.schema_}}


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message" and item.get("role") in ("user", "assistant", "system", "developer"):
        messages.append({"role": item["role"], "content": _content(item.get("content"), where)})
    elif kind == "function_call":
        function = {"name": str(item.get("name")), "arguments": str(item.get("arguments", "{}"))}
        call = {"id": str(item.get("call_id")), "type": "function", "function": function}
        if messages and messages[-1].get("tool_calls"):
            messages[-1]["tool_calls"].append(call)
        elif messages and messages[-1]["role"] == "assistant":
            messages[-1]["tool_calls"] = [call]
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind == "function_call_output":
        output = _content(item.get("output"), where)
        messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": output})
    elif kind != "reasoning":
        raise RequestError(f"'{where}' is neither a message nor a call of a function or its output", param=where)


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type") not in ("input_text", "output_text", "text"):
            raise RequestError("only text is served as content", param=f"{where}.content")
        texts.append(str(part.get("text", "")))
    return "\n".join(texts)


class _Form:
    """What bodies and events have in common."""

    def __init__(self, envelope: Envelope, body: ResponsesBody, parser: AnswerParser) -> None:
        self._envelope = envelope
        self._request = body
        self._parser = parser

    def response(self, output: list[Any], finish: FinishEvent | None, error: ExpertServeError | None = None) -> Any:
        cut = finish is not None and finish.reason == "length"
        status = "in_progress" if finish is None else "incomplete" if cut else "completed"
        asked = self._request
        return {
            "id": self._envelope.id,
            "object": "response",
            "created_at": int(time.time()),
            "status": status if error is None else "failed",
            "error": None if error is None else {"code": "server_error", "message": str(error)},
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self._envelope.model.names[0],
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "text": {"format": {"type": "text"}} if asked.text is None else asked.text.model_dump(by_alias=True),
            "tool_choice": asked.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in asked.tools or []],
            "metadata": asked.metadata or {},
            "usage": None if finish is None else _usage(finish, self._parser.reasoning_tokens),
        }


def _usage(finish: FinishEvent, reasoning_tokens: int) -> dict[str, Any]:
    usage = finish.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _item(piece: Piece, item_id: str, status: str) -> dict[str, Any]:
    if piece.part == "call":
        call = {"type": "function_call", "call_id": piece.id or call_id(), "name": piece.name, "arguments": piece.text}
        return {"id": item_id, "status": status, **call}
    if piece.part == "reasoning":
        content = [{"type": "reasoning_text", "text": piece.text}] if piece.text else []
        return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}
    content = [_text_part(piece.text)] if piece.text else []
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item_id(piece: Piece) -> str:
    prefix = {"call": "fc", "reasoning": "rs", "content": "msg"}[piece.part]
    return f"{prefix}_{uuid.uuid4().hex}"


class ResponseBody(BlockTexts):
    """One body."""

    def __init__(self, envelope: Envelope, body: ResponsesBody, parser: AnswerParser) -> None:
        super().__init__(parser)
        self._form = _Form(envelope, body, parser)

    def body(self, generation: Generation) -> bytes:
        output = [_item(piece, _item_id(piece), "completed") for piece in self.blocks()]
        return json.dumps(self._form.response(output, generation.finished[0])).encode()


class ResponseEvents(BlockStream):
    """Events, numbered."""

    def __init__(self, envelope: Envelope, body: ResponsesBody, parser: AnswerParser) -> None:
        super().__init__(parser)
        self._form = _Form(envelope, body, parser)
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._current: dict[str, Any] = {}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named_event({"type": f"response.{kind}", "sequence_number": self._number - 1, **fields})

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, output_index=self.index, item_id=self._current["id"], **fields)

    def opening(self) -> bytes:
        response = self._form.response([], None)
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def begin_block(self, piece: Piece) -> bytes:
        self._current = _item(replace(piece, text=""), _item_id(piece), "in_progress")
        data = self._event("output_item.added", output_index=self.index, item=self._current)
        if piece.part == "content":
            data += self._of_item("content_part.added", content_index=0, part=_text_part(""))
        return data

    def continue_block(self, piece: Piece) -> bytes:
        if piece.part == "call":
            return self._of_item("function_call_arguments.delta", delta=piece.text)
        if piece.part == "reasoning":
            return self._of_item("reasoning_text.delta", content_index=0, delta=piece.text)
        return self._of_item("output_text.delta", content_index=0, delta=piece.text, logprobs=[])

    def end_block(self, block: Piece) -> bytes:
        done = _item(block, self._current["id"], "completed")
        if block.part == "call":
            done["call_id"] = self._current["call_id"]
            data = self._of_item("function_call_arguments.done", arguments=block.text, name=block.name)
        elif block.part == "reasoning":
            data = self._of_item("reasoning_text.done", content_index=0, text=block.text)
        else:
            data = self._of_item("output_text.done", content_index=0, text=block.text, logprobs=[])
            data += self._of_item("content_part.done", content_index=0, part=_text_part(block.text))
        self._output.append(done)
        return data + self._event("output_item.done", output_index=self.index, item=done)

    def closing(self, generation: Generation) -> bytes:
        finish = generation.finished[0]
        kind = "incomplete" if finish.reason == "length" else "completed"
        return self._event(kind, response=self._form.response(self._output, finish))

    def failure(self, error: ExpertServeError) -> bytes:
        return self._event("failed", response=self._form.response(self._output, None, error))
