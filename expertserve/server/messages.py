"""Anthropic's Messages API.

Owns its request, which becomes a chat, and the form of its answers. What cannot be expressed in a chat of text and
tools (images, documents, tools that a server runs) is refused by name.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from expertserve.engine.request import FinishEvent
from expertserve.errors import ExpertServeError, RequestError
from expertserve.server.blocks import BlockStream, BlockTexts
from expertserve.server.chat import call_id
from expertserve.server.envelope import Envelope, named_event
from expertserve.server.errors import error_object
from expertserve.server.generation import Generation
from expertserve.server.protocol import Body, ChatBody, Stop, chat_body
from expertserve.text.answer import AnswerParser, Piece

Blocks = str | list[dict[str, Any]]


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class MessagesTool(Body):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class MessagesToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]


class CountBody(Body):
    """What counting tokens needs; MessagesBody has more."""

    model: str | None = None
    messages: list[Message] = Field(min_length=1)
    system: Blocks | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None

    def chat(self) -> ChatBody:
        """The same as a chat.

        Raises:
            RequestError: a block is not served.
        """
        messages = [{"role": "system", "content": _plain(self.system, "system")}] if self.system else []
        for index, message in enumerate(self.messages):
            messages += _chat_messages(message, f"messages[{index}].content")
        fields: dict[str, Any] = {"messages": messages, "model": self.model}
        if self.thinking is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.thinking.type != "disabled"}
        return chat_body({**fields, **self._tool_fields(), **self._sampling()})

    def _tool_fields(self) -> dict[str, Any]:
        if not self.tools:
            return {}
        tools = []
        for index, tool in enumerate(self.tools):
            if tool.type not in (None, "custom"):
                raise RequestError(f"tools of type '{tool.type}' are not served", param=f"tools[{index}].type")
            function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema or {}}
            tools.append({"type": "function", "function": function})
        choice: Any = "auto"
        if self.tool_choice is not None:
            choice = {"auto": "auto", "any": "required", "none": "none"}.get(self.tool_choice.type)
            choice = choice or {"type": "function", "function": {"name": self.tool_choice.name or ""}}
        single = self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use
        return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": not single}

    def _sampling(self) -> dict[str, Any]:
        return {}


class MessagesBody(CountBody):
    max_tokens: int = Field(ge=1)
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    stop_sequences: Stop | None = None
    stream: bool | None = None
    seed: int | None = None
    grammar: str | None = None
    metadata: dict[str, Any] | None = None

    def _sampling(self) -> dict[str, Any]:
        names = ("max_tokens", "temperature", "top_p", "top_k", "stream", "seed", "grammar")
        given = {name: getattr(self, name) for name in names}
        return {**given, "stop": self.stop_sequences}


def _plain(content: Blocks, param: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_text(block, f"{param}[{index}]") for index, block in enumerate(content))


def _text(block: dict[str, Any], param: str) -> str:
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise RequestError(f"content blocks of type '{block.get('type')}' are not served here", param=param)
    text: str = block["text"]
    return text


def _chat_messages(message: Message, param: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own in a chat, and come before what the user says beside them."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts, calls, results, reasoning = [], [], [], ""
    for index, block in enumerate(message.content):
        where = f"{param}[{index}]"
        kind = block.get("type")
        if kind == "tool_result" and message.role == "user":
            content = block.get("content") or ""
            if not isinstance(content, str | list):
                raise RequestError("the content of a result is a string or a list of blocks", param=where)
            results.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id", where),
                            "content": _plain(content, where)})  # fmt: skip
        elif kind == "tool_use" and message.role == "assistant":
            function = {"name": _string(block, "name", where), "arguments": json.dumps(block.get("input", {}))}
            calls.append({"id": _string(block, "id", where), "type": "function", "function": function})
        elif kind == "thinking" and message.role == "assistant":
            reasoning += str(block.get("thinking", ""))
        elif kind != "redacted_thinking":
            texts.append(_text(block, where))
    own: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
    if calls:
        own["tool_calls"] = calls
    if reasoning:
        own["reasoning_content"] = reasoning
    return results + ([own] if texts or calls or reasoning or not results else [])


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"'{where}.{name}' is not a string", param=f"{where}.{name}")
    return value


def _stop_reason(finish: FinishEvent, parser: AnswerParser) -> str:
    if finish.reason == "length":
        return "max_tokens"
    if parser.calls:
        return "tool_use"
    return "end_turn" if _stop_sequence(finish, parser) is None else "stop_sequence"


def _stop_sequence(finish: FinishEvent, parser: AnswerParser) -> str | None:
    """The string of the request's own that ended the text."""
    return None if finish.stop == parser.stop else finish.stop


def _message(
    envelope: Envelope, content: list[Any], finish: FinishEvent | None, parser: AnswerParser
) -> dict[str, Any]:
    return {
        "id": envelope.id,
        "type": "message",
        "role": "assistant",
        "model": envelope.model.names[0],
        "content": content,
        "stop_reason": None if finish is None else _stop_reason(finish, parser),
        "stop_sequence": None if finish is None else _stop_sequence(finish, parser),
        "usage": {"input_tokens": 0, "output_tokens": 0} if finish is None else _usage(finish),
    }


def _usage(finish: FinishEvent) -> dict[str, int]:
    """Anthropic's input tokens are those that were not cached."""
    usage = finish.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _block(piece: Piece) -> dict[str, Any]:
    if piece.part == "reasoning":
        return {"type": "thinking", "thinking": piece.text, "signature": ""}
    if piece.part == "content":
        return {"type": "text", "text": piece.text}
    try:
        arguments = json.loads(piece.text or "{}")
    except ValueError:  # the limit has cut them off
        arguments = {}
    return {"type": "tool_use", "id": piece.id or call_id(), "name": piece.name, "input": arguments}


class MessageResponse(BlockTexts):
    """One body."""

    def __init__(self, envelope: Envelope, parser: AnswerParser) -> None:
        super().__init__(parser)
        self._envelope = envelope

    def body(self, generation: Generation) -> bytes:
        content = [_block(piece) for piece in self.blocks()]
        return json.dumps(_message(self._envelope, content, generation.finished[0], self.parser)).encode()


class MessageEvents(BlockStream):
    """Events."""

    def __init__(self, envelope: Envelope, parser: AnswerParser, prompt_tokens: int) -> None:
        super().__init__(parser)
        self._envelope = envelope
        self._prompt_tokens = prompt_tokens

    def opening(self) -> bytes:
        message = _message(self._envelope, [], None, self.parser)
        message["usage"]["input_tokens"] = self._prompt_tokens
        return named_event({"type": "message_start", "message": message})

    def begin_block(self, piece: Piece) -> bytes:
        block = _block(replace(piece, text=""))
        return named_event({"type": "content_block_start", "index": self.index, "content_block": block})

    def continue_block(self, piece: Piece) -> bytes:
        kind, field = {
            "reasoning": ("thinking_delta", "thinking"),
            "content": ("text_delta", "text"),
            "call": ("input_json_delta", "partial_json"),
        }[piece.part]
        delta = {"type": kind, field: piece.text}
        return named_event({"type": "content_block_delta", "index": self.index, "delta": delta})

    def end_block(self, block: Piece) -> bytes:
        return named_event({"type": "content_block_stop", "index": self.index})

    def closing(self, generation: Generation) -> bytes:
        finish = generation.finished[0]
        delta = {"stop_reason": _stop_reason(finish, self.parser), "stop_sequence": _stop_sequence(finish, self.parser)}
        end = named_event({"type": "message_delta", "delta": delta, "usage": _usage(finish)})
        return end + named_event({"type": "message_stop"})

    def failure(self, error: ExpertServeError) -> bytes:
        return named_event({"type": "error", "error": error_object(error)})
