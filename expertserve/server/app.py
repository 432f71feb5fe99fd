"""The HTTP application and its routes.

Owns which path does what, and puts the parts together. Each route is a few calls: choices from the body (prompts.py),
a generation from the choices (generation.py), a response from the generation (delivery.py, in the form of chat.py or
completions.py).
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from expertserve import __version__, log
from expertserve.config import Settings
from expertserve.experts.stats import ExpertStats
from expertserve.server.body import BodyRoute
from expertserve.server.chat import ChatChunks, ChatResponse
from expertserve.server.completions import CompletionChunks, CompletionResponse, CompletionTexts
from expertserve.server.cors import Cors
from expertserve.server.delivery import EventStream, deliver_body
from expertserve.server.envelope import Envelope, response_id
from expertserve.server.errors import error_object, install_error_handlers
from expertserve.server.generation import Choice, Generations
from expertserve.server.guard import Guard
from expertserve.server.live import live_object
from expertserve.server.messages import CountBody, MessageEvents, MessageResponse, MessagesBody
from expertserve.server.metrics import CONTENT_TYPE, ServerMetrics
from expertserve.server.page import add_page
from expertserve.server.process import ServerProcess
from expertserve.server.prompts import chat_choices, chat_text, check_ids, completion_choices
from expertserve.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, tools_for_template
from expertserve.server.reload import Reloader, server_settings
from expertserve.server.responses import ResponseBody, ResponseEvents, ResponsesBody
from expertserve.server.state import ServedModel, ServerState
from expertserve.server.token_names import TokenNames
from expertserve.text.grammar import GrammarCompiler


def create_app(state: ServerState) -> FastAPI:
    """The application over `state`; it answers from the moment it runs, also while nothing is loaded."""
    metrics = ServerMetrics(state)

    # The interactive pages load scripts from elsewhere; the schema itself is served.
    app = FastAPI(
        title="expertserve",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.router.route_class = BodyRoute
    app.state.generations = Generations(metrics, state)
    app.add_middleware(Guard, state=state, metrics=metrics)
    app.add_middleware(Cors, state=state)
    install_error_handlers(app)
    add_page(app)
    _add_generation_routes(app, state)
    _add_block_routes(app, state)
    _add_token_routes(app, state)
    _add_status_routes(app, state, metrics)
    return app


def serve(settings: Settings, stats: ExpertStats) -> int:
    """The command `serve`: answers until a signal; returns the exit status.

    Raises:
        ExpertServeError: the port is taken or the model cannot be loaded.
    """
    state = ServerState(server_settings(settings))
    process = ServerProcess(create_app(state), state, lambda: _load(settings, stats), Reloader(settings, state))
    log.get_logger(__name__).info("listening", url=process.bind())
    process.run()
    return 0


def _load(settings: Settings, stats: ExpertStats) -> ServedModel:
    from expertserve.engine.load import load_model

    model = load_model(settings, stats)
    stats.about["disk_limit_bytes_s"] = model.lane.disk_rate()
    return ServedModel(
        engine=model.engine,
        tokenizer=model.tokenizer,
        chat_template=model.template,
        grammars=GrammarCompiler(model.tokenizer),
        names=(settings.alias or model.name,),
        context_length=model.engine.context,
        fingerprint=_fingerprint(model.file.fingerprint()),
        metadata={"architecture": model.file.architecture},
        stream_snapshot=stats.snapshot,
        heat=model.lane.heat,
        memory_plan=model.memory_plan,
        close=model.close,
    )


def _fingerprint(of_file: tuple[Any, ...]) -> str:
    """Says whether two answers came from one version of the program on one file."""
    return "fp_" + hashlib.sha256(repr((__version__, of_file)).encode()).hexdigest()[:12]


def _num_logprobs(choices: list[Choice]) -> int:
    """Candidates in the whole response, about: what decides where it is written."""
    each = [
        (choice.params.logprobs or 0) * (choice.params.max_tokens or 100)
        + (choice.params.prompt_logprobs or 0) * len(choice.prompt)
        for choice in choices
    ]
    return sum(each)


def _add_generation_routes(app: FastAPI, state: ServerState) -> None:
    settings = state.settings

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        model = state.model_named(body.model)
        body.refuse_unserved()
        choices, parser = await asyncio.to_thread(chat_choices, body, model, settings.max_logprob_entries)
        parsers = [parser() for _ in choices]
        names = TokenNames(model.tokenizer, bool(body.return_tokens_as_token_ids))
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        envelope = Envelope(response_id("chatcmpl"), kind, model)
        generation = app.state.generations.start(model.engine, envelope.id, choices)
        if body.stream:
            chunks = ChatChunks(envelope, parsers, names, body.include_usage)
            return EventStream(generation, chunks, settings.keep_alive_s)
        answer = ChatResponse(envelope, parsers, names, bool(body.logprobs))
        return await deliver_body(generation, answer, request.receive, _num_logprobs(choices))

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        model = state.model_named(body.model)
        body.refuse_unserved()
        choices, echoes = await asyncio.to_thread(completion_choices, body, model, settings.max_logprob_entries)
        names = TokenNames(model.tokenizer, bool(body.return_tokens_as_token_ids))
        texts = CompletionTexts(
            choices, echoes if body.echo else None, model.tokenizer, names, body.logprobs is not None
        )
        envelope = Envelope(response_id("cmpl"), "text_completion", model)
        generation = app.state.generations.start(model.engine, envelope.id, choices)
        if body.stream:
            return EventStream(generation, CompletionChunks(envelope, texts, body.include_usage), settings.keep_alive_s)
        answer = CompletionResponse(envelope, texts)
        return await deliver_body(generation, answer, request.receive, _num_logprobs(choices))


def _add_block_routes(app: FastAPI, state: ServerState) -> None:
    settings = state.settings

    @app.post("/v1/responses")
    async def responses(body: ResponsesBody, request: Request) -> Response:
        model = state.model_named(body.model)
        choices, parser = await asyncio.to_thread(
            chat_choices, body.chat(), model, settings.max_logprob_entries, "input"
        )
        envelope = Envelope(response_id("resp"), "response", model)
        generation = app.state.generations.start(model.engine, envelope.id, choices)
        if body.stream:
            return EventStream(generation, ResponseEvents(envelope, body, parser()), settings.keep_alive_s)
        return await deliver_body(generation, ResponseBody(envelope, body, parser()), request.receive, 0)

    @app.post("/v1/messages")
    async def messages(body: MessagesBody, request: Request) -> Response:
        model = state.model_named(body.model)
        choices, parser = await asyncio.to_thread(chat_choices, body.chat(), model, settings.max_logprob_entries)
        envelope = Envelope(response_id("msg"), "message", model)
        generation = app.state.generations.start(model.engine, envelope.id, choices)
        if body.stream:
            events = MessageEvents(envelope, parser(), len(choices[0].prompt))
            return EventStream(generation, events, settings.keep_alive_s)
        return await deliver_body(generation, MessageResponse(envelope, parser()), request.receive, 0)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountBody) -> Response:
        model = state.model_named(body.model)
        choices, _ = await asyncio.to_thread(chat_choices, body.chat(), model, settings.max_logprob_entries)
        return JSONResponse({"input_tokens": len(choices[0].prompt)})


def _add_token_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        model = state.model()
        ids = await asyncio.to_thread(_tokenize, body, model)
        tokens: list[Any] = [_piece(model, id) for id in ids] if body.with_pieces else ids
        return JSONResponse({"tokens": tokens, "count": len(ids), "max_model_len": model.context_length})

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Response:
        model = state.model()
        check_ids(body.tokens, model, "tokens")
        text = await asyncio.to_thread(model.tokenizer.decode, body.tokens)
        return JSONResponse({"content": text, "prompt": text})

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """What evaluation harnesses ask for when they tokenise here."""
        model = state.model()
        roles = {f"{role}_token": model.tokenizer.special_texts.get(role) for role in ("bos", "eos", "pad", "unk")}
        template = None if model.chat_template is None else model.chat_template.source
        return JSONResponse({**roles, "chat_template": template, "max_model_len": model.context_length})


def _tokenize(body: TokenizeBody, model: ServedModel) -> list[int]:
    if body.messages is not None:
        tools, kwargs = tools_for_template(body.tools), body.chat_template_kwargs or {}
        text = chat_text(model, body.messages, tools, body.add_generation_prompt, kwargs)
        return model.tokenizer.encode(text, add_special=True, parse_special=True)
    if body.prompt is not None:
        text, add_special = body.prompt, body.add_special_tokens
    else:
        text, add_special = body.content or "", body.add_special
    return model.tokenizer.encode(text, add_special=add_special, parse_special=body.parse_special)


def _piece(model: ServedModel, token_id: int) -> dict[str, Any]:
    """As llama.cpp: text where the token's bytes are text, else the bytes."""
    raw = model.tokenizer.token_bytes(token_id)
    try:
        return {"id": token_id, "piece": raw.decode()}
    except UnicodeDecodeError:
        return {"id": token_id, "piece": list(raw)}


def _add_status_routes(app: FastAPI, state: ServerState, metrics: ServerMetrics) -> None:
    @app.get("/health")
    async def health() -> Response:
        status = state.status
        body: dict[str, Any] = {"status": status}
        if (error := state.error) is not None:
            body["error"] = error_object(error)
        elif (model := state.loaded) is not None:
            body["model"] = model.names[0]
        code = {"ready": 200, "failed": 500}.get(status, 503)
        retry = {"retry-after": str(state.settings.retry_after_s)} if status == "loading" else None
        return JSONResponse(body, status_code=code, headers=retry)

    @app.get("/metrics")
    async def metrics_page() -> Response:
        return Response(metrics.exposition(), media_type=CONTENT_TYPE)

    @app.get("/stats")
    async def live() -> Response:
        return JSONResponse(live_object(state.model()))

    @app.get("/ready")
    async def ready() -> Response:
        state.model()
        return JSONResponse({"status": "ready"})

    @app.get("/v1/models")
    async def models() -> Response:
        model = state.model()
        return JSONResponse({"object": "list", "data": [_model_object(model, name) for name in model.names]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        return JSONResponse(_model_object(state.model_named(name), name))


def _model_object(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "expertserve",
        "max_model_len": model.context_length,
        "meta": {"n_vocab": model.tokenizer.vocab_size, "n_ctx": model.context_length, **model.metadata},
    }
