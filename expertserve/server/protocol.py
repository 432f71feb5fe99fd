"""Bodies of requests, as OpenAI, llama.cpp and vLLM clients send them.

Owns names, types and ranges of the fields. Does not own what depends on the loaded model (vocabulary, context,
template): see prompts.py. Unknown fields are tolerated; a known field with a wrong type is refused with its name; a
field that would change the answer but is not served is refused by name, never ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from expertserve.engine.stop import MAX_STOP_LENGTH, MAX_STOP_STRINGS
from expertserve.errors import RequestError

MAX_CHOICES = 128
MAX_PROMPTS = 2048

_TOKEN_ID_LIMIT = 2**31 - 1
_UNSERVED = {
    "audio": "audio output is not served",
    "function_call": "use tools in place of functions",
    "functions": "use tools in place of functions",
    "suffix": "insertion (suffix) is not served",
}


def _described(description: str) -> WrapValidator:
    """One error in plain words for a union, in place of one error per alternative."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("wrong_type", "Input should be {expected}", {"expected": description}) from error

    return WrapValidator(check)


TokenId = Annotated[int, Field(ge=0, le=_TOKEN_ID_LIMIT)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Prompt = Annotated[
    str | TokenIds | Annotated[list[str] | list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)],
    _described(
        "a string, a list of token ids, or a list of up to "
        f"{MAX_PROMPTS} strings or lists of token ids (ids are integers from 0, lists are not empty)"
    ),
]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)],
    _described(f"a string or up to {MAX_STOP_STRINGS} strings, each of 1 to {MAX_STOP_LENGTH} characters"),
]
LogitBias = dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]]


class Body(BaseModel):
    """Strict types: a string is not a number, a boolean is not an integer."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = None


class JsonSchema(Body):
    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """`schema` beside json_object is llama.cpp's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


JsonSource = Annotated[dict[str, Any] | str, _described("a JSON schema, or its text")]


class StructuredOutputs(Body):
    """vLLM's form."""

    json_: JsonSource | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class GenerationBody(Body):
    """What chat and text completions share."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=-1, description="-1: up to the context")
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 or -1: off")
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, gt=0)
    repetition_penalty: float | None = Field(None, gt=0, description="the same as repeat_penalty")
    repeat_last_n: int | None = Field(None, ge=-1, description="-1: the whole context")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="-1: none")
    stop: Stop | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(None, description='logprobs name tokens "token_id:N"')
    user: str | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = Field(None, description="GBNF, or Lark as llguidance reads it")
    json_schema: dict[str, Any] | None = None
    guided_json: JsonSource | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    def refuse_unserved(self) -> None:
        """Raise for a field whose meaning would be lost if it were ignored."""
        for name, value in (self.model_extra or {}).items():
            if name in _UNSERVED and value not in (None, False, "", [], {}):
                raise RequestError(f"{_UNSERVED[name]}: remove '{name}'", param=name, code="unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            raise RequestError("'stream_options' is only allowed when 'stream' is true", param="stream_options")
        penalties = (self.repeat_penalty, self.repetition_penalty)
        if None not in penalties and penalties[0] != penalties[1]:
            raise RequestError(
                "'repeat_penalty' and 'repetition_penalty' are the same setting and differ", param="repetition_penalty"
            )

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ContentPart(Body):
    type: str
    text: str | None = None


Content = Annotated[str | list[ContentPart], _described("a string or a list of content parts of type text")]


class ToolFunction(Body):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A function that the model may call, as the template gets it."""

    type: Literal["function"]
    function: ToolFunction


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    """A choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    _described('"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'),
]


def tools_for_template(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """The tools as they were sent; None for none."""
    return [tool.model_dump(exclude_unset=True) for tool in tools] if tools else None


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def for_template(self, index: int) -> dict[str, Any]:
        """The message as templates know it; they have no developer role. What is no text is refused by name."""
        param = f"messages[{index}].content"
        if self.content is None and self.role != "assistant":
            raise RequestError(f"'{param}' is missing: only an assistant message may have none", param=param)
        for part in self.content if isinstance(self.content, list) else []:
            if part.type != "text" or part.text is None:
                raise RequestError(f"content parts of type '{part.type}' are not served, only text", param=param)
        message: dict[str, Any] = self.model_dump(exclude_none=True)
        message["content"] = message.get("content", "")
        if self.role == "developer":
            message["role"] = "system"
        return message


class ChatBody(GenerationBody):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=-1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_format: Literal["none", "auto", "deepseek"] | None = Field(
        None, description="none: reasoning stays in the content, as the model writes it"
    )
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None

    def refuse_unserved(self) -> None:
        super().refuse_unserved()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("'top_logprobs' needs 'logprobs' to be true", param="top_logprobs")
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise RequestError("two tools have the same name", param="tools")
        if self.tool_choice in (None, "none", "auto"):
            return
        if not names:
            raise RequestError("'tool_choice' needs 'tools' to choose from", param="tool_choice")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise RequestError(f"there is no tool named '{self.tool_choice.function.name}'", param="tool_choice")


def chat_body(fields: dict[str, Any]) -> ChatBody:
    """A chat made from another API's request, whose fields were checked under their own names.

    Raises:
        RequestError: what only a chat checks.
    """
    try:
        body = ChatBody.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"'{name}' cannot be used: {first['msg']}", param=name) from None
    body.refuse_unserved()
    return body


class CompletionBody(GenerationBody):
    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0)
    best_of: int | None = Field(None, ge=1)
    add_special_tokens: bool | None = None

    def refuse_unserved(self) -> None:
        super().refuse_unserved()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError("'best_of' is served only where it equals 'n'", param="best_of")
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        if several and len(self.prompt) * (self.n or 1) > MAX_PROMPTS:
            raise RequestError(
                f"{len(self.prompt)} prompts with 'n' of {self.n} are more than {MAX_PROMPTS} answers: send fewer",
                param="n",
            )


class TokenizeBody(Body):
    """llama.cpp's form (content) or vLLM's (prompt, or messages)."""

    content: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special: bool = False
    add_special_tokens: bool = True
    parse_special: bool = True
    with_pieces: bool = False
    add_generation_prompt: bool = True
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeBody:
        if sum(source is not None for source in (self.content, self.prompt, self.messages)) != 1:
            raise PydanticCustomError("one_source", "Exactly one of content, prompt and messages is needed")
        return self


class DetokenizeBody(Body):
    tokens: list[TokenId]
