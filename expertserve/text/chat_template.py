"""Chat messages to a prompt, by the Jinja template a GGUF carries.

Owns choosing the template, what a template may see, and turning everything that goes wrong inside one into a
RequestError. How far a template may go is sandbox.py. Does not tokenise. A rendered prompt is to be encoded with
`add_special=True` and `parse_special=True`; for that, a BOS or EOS the template writes itself is taken off where
encoding adds it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from expertserve.errors import ConfigError, RequestError
from expertserve.text.sandbox import Sandbox
from expertserve.text.tokenizer import Tokenizer
from expertserve.text.vocabulary import MetadataSource

CHATML = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
_KEY = "tokenizer.chat_template"
# Templates that know the reasoning of a message by this name and not as `reasoning_content`.
_THINKING = re.compile(r"\w\.thinking\b|\[.thinking.\]")


class ChatTemplate:
    """Renders conversations for one model.

    Attributes:
        source: text of the template.
        origin: where it comes from: "file" (the GGUF), "override", or "chatml" where the GGUF has none.
    """

    def __init__(
        self, source: str, tokenizer: Tokenizer, *, origin: str = "override", tool_use: str | None = None
    ) -> None:
        self.source = source
        self.origin = origin
        self._sandbox = Sandbox()
        self._special = tokenizer.special_texts
        self._added = (
            self._special.get("bos", "") if tokenizer.add_bos else "",
            self._special.get("eos", "") if tokenizer.add_eos else "",
        )
        self._template = self._compile(source)
        self._tool_template = self._template if tool_use is None else self._compile(tool_use)
        self._arguments_as_objects: bool | None = None

    @classmethod
    def from_gguf(cls, file: MetadataSource, tokenizer: Tokenizer, override: str | None = None) -> ChatTemplate:
        """Returns the template `override` spells out, else the file's, else ChatML as llama.cpp does.

        Raises:
            ConfigError: `override` is not a template.
        """
        if override is not None:
            template = cls(override, tokenizer)
            if isinstance(template._template, RequestError):
                raise ConfigError(f"--chat-template: {template._template}")
            return template
        source, tool_use = file.metadata.get(_KEY), file.metadata.get(f"{_KEY}.tool_use")
        if not isinstance(source, str) or not source:
            source, origin = (tool_use, "file") if isinstance(tool_use, str) else (CHATML, "chatml")
        else:
            origin = "file"
        return cls(source, tokenizer, origin=origin, tool_use=tool_use if isinstance(tool_use, str) else None)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Returns the prompt for a conversation.

        Args:
            messages: OpenAI messages; text parts are joined, other parts are refused.
            tools: OpenAI tool definitions, or None.
            add_generation_prompt: whether the assistant's turn is opened at the end.
            kwargs: what else the template may read, such as `enable_thinking`.

        Raises:
            RequestError: the template refuses the conversation, fails or runs away.
        """
        template = self._tool_template if tools else self._template
        if isinstance(template, RequestError):
            raise template
        plain = [_plain(message) for message in messages]
        if any(message.get("tool_calls") for message in plain):
            if self._arguments_as_objects is None:
                self._arguments_as_objects = self._wants_objects(template)
            if self._arguments_as_objects:
                plain = [_with_objects(message) for message in plain]
        if _THINKING.search(self.source):
            alone = "<|channel|>" in self.source
            plain = [_with_thinking(message, alone) for message in plain]
        prompt = self._render(template, plain, tools, add_generation_prompt, kwargs)
        bos, eos = self._added
        if eos:
            prompt = prompt.removesuffix(eos)
        return prompt.removeprefix(bos)

    def _compile(self, source: str) -> jinja2.Template | RequestError:
        """Returns the template, or the error every use of it will meet: a model is served without chat all the same."""
        try:
            return self._sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            return RequestError(f"chat template: {_line(error)} (line {error.lineno})", param="messages")
        except (SyntaxError, RecursionError, MemoryError):
            return RequestError("chat template: nested too deeply", param="messages")

    def _render(
        self,
        template: jinja2.Template,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        seen: dict[str, Any] = {f"{role}_token": text for role, text in self._special.items()}
        seen |= kwargs
        if "enable_thinking" in kwargs:  # DeepSeek and Granite have another name for it
            seen.setdefault("thinking", kwargs["enable_thinking"])
        seen |= {"messages": messages, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        seen |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            return self._sandbox.render(template, seen)
        except RecursionError:
            raise RequestError("chat template: calls itself without end", param="messages") from None
        except Exception as error:
            # A template is a program that nobody has vetted: whatever it raises is the template's fault.
            raise RequestError(f"chat template: {_line(error)}", param="messages") from None

    def _wants_objects(self, template: jinja2.Template) -> bool:
        """Returns whether arguments of tool calls show as the model writes them only when they are given as an object.

        OpenAI's messages carry them as a string. Some templates print that, others print an object as JSON, or its
        entries in a form of their own.
        """

        def shown(arguments: Any) -> str:
            call = {"type": "function", "id": "call00000", "function": {"name": "probe", "arguments": arguments}}
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            try:
                return self._render(template, [{"role": "user", "content": "x"}, turn], None, False, {})
            except RequestError:
                return ""

        as_object = shown({"needle": 1})
        if "needle" not in as_object or "'needle'" in as_object:  # refused, or printed as Python does
            return False
        return '"needle":' not in as_object or '"needle":' not in shown('{"needle": 1}')


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message with its content as one text."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts: list[str] = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"content parts of type {kind!r} are not served; send text", param="messages")
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message with the arguments of its tool calls parsed; what is no JSON object stays as it is."""

    def parsed(call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return call
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            return call
        try:
            value = json.loads(arguments)
        except ValueError:
            return call
        return {**call, "function": {**function, "arguments": value}} if isinstance(value, dict) else call

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [parsed(call) for call in calls]} if isinstance(calls, list) else dict(message)


def _with_thinking(message: Mapping[str, Any], alone: bool) -> dict[str, Any]:
    """Returns the message with its reasoning under another name; `alone`: a call of tools takes no content beside it,
    as in harmony's template, so that what there is goes into the reasoning."""
    reasoning = message.get("reasoning_content")
    if not isinstance(reasoning, str) or not reasoning:
        return dict(message)
    content = message.get("content")
    if alone and message.get("tool_calls") and isinstance(content, str) and content:
        return {**message, "thinking": f"{reasoning}\n{content}", "content": ""}
    return {**message, "thinking": reasoning}


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _line(error: BaseException) -> str:
    """Returns an exception's message on one line of bounded length."""
    message = " ".join(str(error).split()) or type(error).__name__
    return message if len(message) <= 300 else message[:297] + "..."
