"""From the body of a request to the choices that the engine gets.

Owns what depends on the loaded model: template and tokenizer, the context's length, the vocabulary's bounds.
Everything that can be known about a request is refused here, before it is queued. Nothing here awaits, so it can run
in a worker thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from expertserve.engine.request import SamplingParams
from expertserve.errors import RequestError
from expertserve.server.generation import Choice
from expertserve.server.parts import AnswerForm, answer_form, known_effort
from expertserve.server.protocol import ChatBody, ChatMessage, CompletionBody, GenerationBody, tools_for_template
from expertserve.server.state import ServedModel
from expertserve.server.structure import requested_structure
from expertserve.text.answer import AnswerParser

DEFAULT_COMPLETION_TOKENS = 16
_RESERVED_TEMPLATE_NAMES = {"messages", "tools", "add_generation_prompt"}
_PARAMS_OF_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repeat_penalty",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
)


def chat_choices(
    body: ChatBody, model: ServedModel, max_logprob_entries: int, param: str = "messages"
) -> tuple[list[Choice], Callable[[], AnswerParser]]:
    """One prompt, `n` choices; with what makes the parser of one of them. `param` is the field that the messages are
    in."""
    max_tokens = _limit(body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens)
    tools = tools_for_template(body.tools) if body.tool_choice != "none" else None
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", known_effort(body.reasoning_effort, model))
    if body.reasoning_effort == "none":
        kwargs.setdefault("enable_thinking", False)
    text = chat_text(model, body.messages, tools, body.add_generation_prompt is not False, kwargs)
    prompt = _encoded(text, model, max_tokens, param)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    _check_logprobs(logprobs, "top_logprobs", model)
    form, parser = answer_form(body, model, text)
    choices = _choices(body, model, [prompt], max_tokens, logprobs, None, form)
    _check_entries(choices, model, max_logprob_entries, "top_logprobs")
    return choices, parser


def completion_choices(
    body: CompletionBody, model: ServedModel, max_logprob_entries: int
) -> tuple[list[Choice], list[str]]:
    """`n` choices for each prompt, and for each prompt the text that `echo` gives back."""
    max_tokens = _limit(DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens)
    prompts, texts = [], []
    for prompt in _as_list(body.prompt):
        text, ids = _completion_prompt(prompt, body, model, max_tokens)
        prompts.append(ids)
        texts.append(text)
    _check_logprobs(body.logprobs, "logprobs", model)
    structure = requested_structure(body)
    constraint = None if structure is None else model.grammars.compile(*structure)
    prompt_logprobs = body.logprobs if body.echo else None
    form = AnswerForm(constraint)
    choices = _choices(body, model, prompts, max_tokens, body.logprobs, prompt_logprobs, form)
    _check_entries(choices, model, max_logprob_entries, "logprobs")
    return choices, texts


def chat_text(
    model: ServedModel,
    messages: list[ChatMessage],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
    kwargs: dict[str, Any],
) -> str:
    """A conversation as text; a rendered template has no BOS where encoding adds it."""
    if model.chat_template is None:
        raise RequestError("the model has no chat template: start the server with one, or use /v1/completions")
    if reserved := _RESERVED_TEMPLATE_NAMES & kwargs.keys():
        name = min(reserved)
        raise RequestError(f"'{name}' is a field of its own", param=f"chat_template_kwargs.{name}")
    return model.chat_template.render(
        [message.for_template(index) for index, message in enumerate(messages)],
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        **kwargs,
    )


def _as_list(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [[id for id in prompt if isinstance(id, int)]]
    return [part for part in prompt if not isinstance(part, int)]


def _completion_prompt(
    prompt: str | list[int], body: CompletionBody, model: ServedModel, max_tokens: int | None
) -> tuple[str, list[int]]:
    if isinstance(prompt, str):
        return prompt, _encoded(prompt, model, max_tokens, "prompt", body.add_special_tokens is not False)
    check_ids(prompt, model, "prompt")
    _check_length(len(prompt), model, max_tokens, "prompt")
    return model.tokenizer.decode(prompt, skip_special=False) if body.echo else "", prompt


def _encoded(text: str, model: ServedModel, max_tokens: int | None, param: str, add_special: bool = True) -> list[int]:
    """The tokens of a text that may fit the context; one that cannot is refused without encoding it."""
    least = model.tokenizer.min_tokens(text)
    if least > model.context_length:
        raise _too_long(f"at least {least}", model, param)
    ids = model.tokenizer.encode(text, add_special=add_special, parse_special=True)
    _check_length(len(ids), model, max_tokens, param)
    return ids


def check_ids(ids: list[int], model: ServedModel, param: str) -> None:
    largest = max(ids, default=0)
    if largest >= model.tokenizer.vocab_size:
        raise RequestError(
            f"token id {largest} is not in the vocabulary of {model.tokenizer.vocab_size} tokens", param=param
        )


def _check_length(num_tokens: int, model: ServedModel, max_tokens: int | None, param: str) -> None:
    """Where anything is to be generated, at least one token must fit behind the prompt."""
    if not num_tokens:
        raise RequestError("the prompt has no tokens", param=param)
    if num_tokens + (0 if max_tokens == 0 else 1) > model.context_length:
        raise _too_long(str(num_tokens), model, param)


def _too_long(num_tokens: str, model: ServedModel, param: str) -> RequestError:
    return RequestError(
        f"This model's maximum context length is {model.context_length} tokens. However, your {param} resulted in "
        f"{num_tokens} tokens. Please reduce the length of the {param}.",
        param=param,
        code="context_length_exceeded",
    )


def _limit(max_tokens: int | None) -> int | None:
    return None if max_tokens == -1 else max_tokens


def _check_logprobs(count: int | None, param: str, model: ServedModel) -> None:
    if count is not None and count > model.tokenizer.vocab_size:
        raise RequestError(f"'{param}' is {count}, the vocabulary has {model.tokenizer.vocab_size} tokens", param=param)


def _check_entries(choices: list[Choice], model: ServedModel, limit: int, param: str) -> None:
    """Whole vocabularies at every position of a long text would not fit memory."""
    entries = 0
    for choice in choices:
        room = model.context_length - len(choice.prompt)
        wanted = room if choice.params.max_tokens is None else min(room, choice.params.max_tokens)
        entries += wanted * _entries_each(choice.params.logprobs)
        entries += len(choice.prompt) * _entries_each(choice.params.prompt_logprobs)
    if entries > limit:
        raise RequestError(
            f"'{param}' asks for {entries} log-probabilities in one response, at most {limit} are given: "
            "ask for fewer, or for shorter texts",
            param=param,
        )


def _entries_each(count: int | None) -> int:
    return 0 if count is None else count + 1


def _choices(
    body: GenerationBody,
    model: ServedModel,
    prompts: list[list[int]],
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    form: AnswerForm,
) -> list[Choice]:
    values: dict[str, Any] = {name: getattr(body, name) for name in _PARAMS_OF_SAME_NAME}
    if values["repeat_penalty"] is None:
        values["repeat_penalty"] = body.repetition_penalty
    given = {name: value for name, value in values.items() if value is not None}
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    bias = _logit_bias(body, model)
    return [
        Choice(
            prompt,
            SamplingParams(
                **given,
                logit_bias=bias,
                seed=_seed(body.seed, number),
                stop=stop + form.stop,
                max_tokens=max_tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                constraint=form.constraint,
                marks=form.marks,
            ),
            prompt_index,
        )
        for prompt_index, prompt in enumerate(prompts)
        for number in range(body.n or 1)
    ]


def _logit_bias(body: GenerationBody, model: ServedModel) -> dict[int, float]:
    bias = {int(id): value for id, value in (body.logit_bias or {}).items()}
    check_ids(list(bias), model, "logit_bias")
    return bias


def _seed(seed: int | None, number: int) -> int | None:
    """Choice `number` of a request draws with the next seed; -1 asks for none."""
    return None if seed is None or seed == -1 else (seed + number) % 2**63
