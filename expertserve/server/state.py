"""The served model and its life: loading, ready, failed, draining.

Owns the one answer to "can this server take a request now?", asked from the event loop and changed by the loading
thread and by the shutdown. Does not load or stop anything itself. What the server needs of engine, tokenizer and
template is written here as protocols, so that handlers and tests depend on nothing below.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from expertserve.engine.request import Request
from expertserve.errors import ConfigError, ExpertServeError, RequestError
from expertserve.server.errors import UnavailableError
from expertserve.text.grammar import GrammarCompiler

Status = Literal["loading", "ready", "failed", "draining"]


class TextStream(Protocol):
    def push(self, token_id: int, /) -> str: ...
    def flush(self) -> str: ...


class ServedTokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def eog_ids(self) -> Collection[int]: ...
    @property
    def special_texts(self) -> Mapping[str, str]: ...
    def is_special(self, token_id: int, /) -> bool: ...
    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]: ...
    def min_tokens(self, text: str, /) -> int: ...
    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str: ...
    def token_bytes(self, token_id: int, /) -> bytes: ...
    def token_text(self, token_id: int, /) -> str: ...
    def special_id(self, text: str, /) -> int | None: ...
    def stream(self, *, skip_special: bool = True, marks: Mapping[int, str] = ...) -> TextStream: ...


class ServedTemplate(Protocol):
    @property
    def source(self) -> str: ...
    def render(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str: ...


class ServedEngine(Protocol):
    @property
    def state(self) -> str: ...
    @property
    def error(self) -> ExpertServeError | None: ...
    def submit(self, request: Request, /) -> None: ...
    def cancel(self, request_id: str, /) -> None: ...
    def snapshot(self) -> Mapping[str, float]: ...


def _nothing() -> None:
    """Default of ServedModel.close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What `load` returns. `names[0]` is the name reported; a request may use any of `names`."""

    engine: ServedEngine
    tokenizer: ServedTokenizer
    chat_template: ServedTemplate | None
    grammars: GrammarCompiler
    names: tuple[str, ...]
    context_length: int
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))
    metadata: Mapping[str, Any] = field(default_factory=dict)
    stream_snapshot: Callable[[], Mapping[str, Any]] = dict
    heat: Callable[[], Mapping[int, tuple[NDArray[np.float64], NDArray[np.bool_]]]] = dict
    memory_plan: Mapping[str, int] = field(default_factory=dict)
    close: Callable[[], None] = _nothing


def key_digest(key: bytes) -> bytes:
    """What is kept and compared of an API key."""
    return hashlib.sha256(key).digest()


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the HTTP side; the command line fills them from config.py."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    key_limit: int = 0
    cors_origins: tuple[str, ...] = ()
    max_sequences: int = 1024
    queue_timeout_s: float = math.inf
    request_timeout_s: float = math.inf
    max_body_bytes: int = 32 * 2**20
    drain_timeout_s: float = 30.0
    keep_alive_s: float = 15.0
    stall_timeout_s: float = 60.0
    retry_after_s: int = 5
    max_logprob_entries: int = 4 << 20
    exit_on_failed_load: bool = True

    @cached_property
    def key_digests(self) -> list[bytes]:
        return [key_digest(key.encode()) for key in self.api_keys]

    def __post_init__(self) -> None:
        if any(not key for key in self.api_keys):
            raise ConfigError("an API key is empty: give a key of at least one character, or none")


class ServerState:
    """Single assignments only, so that threads need no lock. `settings` may be replaced by others of the same process:
    whoever obeys one reads it when it counts."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self._model: ServedModel | None = None
        self._load_error: ExpertServeError | None = None
        self._draining = False

    def set_ready(self, model: ServedModel) -> None:
        self._model = model

    def set_failed(self, error: ExpertServeError) -> None:
        self._load_error = error

    def set_draining(self) -> None:
        self._draining = True

    @property
    def loaded(self) -> ServedModel | None:
        return self._model

    @property
    def error(self) -> ExpertServeError | None:
        """Why the server is `failed`."""
        if self._load_error is not None:
            return self._load_error
        if self._model is not None and self._model.engine.state == "failed":
            return self._model.engine.error or ExpertServeError("the engine failed")
        return None

    @property
    def status(self) -> Status:
        if self.error is not None:
            return "failed"
        if self._draining:
            return "draining"
        return "loading" if self._model is None else "ready"

    def model(self) -> ServedModel:
        """The model to serve a request with.

        Raises:
            ExpertServeError: the failure, or UnavailableError while loading or draining.
        """
        if (error := self.error) is not None:
            raise error
        if self._draining:
            raise UnavailableError("the server is shutting down", code="server_draining")
        if self._model is None:
            wait_s = self.settings.retry_after_s
            raise UnavailableError("the model is still loading", code="model_loading", retry_after_s=wait_s)
        return self._model

    def model_named(self, name: str | None) -> ServedModel:
        """As `model`, where a request names it; a request without a name takes what is served."""
        model = self.model()
        if name is not None and name not in model.names:
            raise RequestError(
                f"the model '{name}' does not exist; this server has '{model.names[0]}'",
                param="model",
                code="model_not_found",
                http_status=404,
            )
        return model
