"""What every request passes first and every response last.

Owns API keys, the limit on bodies, refusing while no model is ready, taking a body as JSON whatever it is called, the
request id, the access log and the request metrics. It is the outermost layer but for CORS, so an exception of a route
ends here as an error object, never as a bare connection loss.
"""

from __future__ import annotations

import hmac
import time
import uuid
from collections import Counter
from collections.abc import Iterable

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expertserve import log
from expertserve.errors import ExpertServeError, RequestError
from expertserve.server.cors import origin_refused, strange_origin
from expertserve.server.errors import OverloadedError, error_response
from expertserve.server.metrics import ServerMetrics
from expertserve.server.page import is_page
from expertserve.server.state import ServerState, key_digest

_WITHOUT_KEY = {"/health", "/ready"}
_WITHOUT_MODEL = {"/health", "/ready", "/metrics", "/openapi.json"}
_QUIET = _WITHOUT_MODEL | {"/stats", "/", "/ui/{name}"}  # asked every few seconds
# More than any client sends; a parser holds no more than twice that (connection.py).
MAX_HEADER_BYTES = 32 << 10
_log = log.get_logger(__name__)


class Guard:
    """ASGI middleware; see the module docstring."""

    def __init__(self, app: ASGIApp, state: ServerState, metrics: ServerMetrics) -> None:
        self._app = app
        self._state = state
        self._metrics = metrics
        self._under_way: Counter[bytes] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(receive, send, self._state.settings.max_body_bytes)
        with structlog.contextvars.bound_contextvars(request_id=exchange.request_id):
            try:
                key = self._key_of(dict(scope["headers"]))
                if (refusal := self._refusal(scope, key)) is not None:
                    await exchange.refuse(refusal, scope)
                else:
                    await self._answer(scope, exchange, key)
            except Exception:
                _log.exception("a request failed", method=scope["method"], path=scope["path"])
                if exchange.status is None:
                    await error_response(ExpertServeError("internal error"))(scope, receive, exchange.send)
            finally:
                self._note(scope, exchange)

    async def _answer(self, scope: Scope, exchange: _Exchange, key: bytes | None) -> None:
        """Counts what a key has under way; asking how the server does is free."""
        MutableHeaders(scope=scope)["content-type"] = "application/json"
        if key is None or scope["method"] != "POST":
            await self._app(scope, exchange.receive, exchange.send)
            return
        self._under_way[key] += 1
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            self._under_way[key] -= 1

    def _refusal(self, scope: Scope, key: bytes | None) -> ExpertServeError | None:
        path = scope["path"]
        if (length := sum(len(name) + len(value) for name, value in scope["headers"])) > MAX_HEADER_BYTES:
            return RequestError(
                f"the headers have {length} bytes; at most {MAX_HEADER_BYTES} are taken",
                code="headers_too_large",
                http_status=431,
            )
        if is_page(path):
            return None
        origin = strange_origin(Headers(scope=scope), self._state.settings.cors_origins)
        if scope["method"] == "POST" and origin is not None:
            return origin_refused(origin)
        if path not in _WITHOUT_KEY and self._state.settings.key_digests and key is None:
            error = RequestError(
                "a valid API key is needed: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                http_status=401,
            )
            error.error_type = "authentication_error"
            return error
        limit = self._state.settings.key_limit
        if key is not None and limit and scope["method"] == "POST" and self._under_way[key] >= limit:
            self._metrics.refused.labels("key_limit").inc()
            return OverloadedError(
                f"this API key has {limit} requests under way, as many as it may",
                code="key_limit",
                retry_after_s=self._state.settings.retry_after_s,
            )
        if path not in _WITHOUT_MODEL:
            try:
                self._state.model()
            except ExpertServeError as unavailable:
                return unavailable
        return None

    def _key_of(self, headers: dict[bytes, bytes]) -> bytes | None:
        """The digest of the key that a request carries, if it is one of ours.

        Every key is compared, in constant time, so that timing tells nothing.
        """
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        digest = key_digest(given)
        equal = [hmac.compare_digest(digest, known) for known in self._state.settings.key_digests]
        return digest if any(equal) else None

    def _note(self, scope: Scope, exchange: _Exchange) -> None:
        seconds = time.perf_counter() - exchange.started
        route = scope.get("route")
        path = getattr(route, "path", "unmatched")
        status = exchange.status or 499
        self._metrics.http_requests.labels(path, str(status)).inc()
        self._metrics.request_s.observe(seconds)
        write = _log.debug if path in _QUIET else _log.info
        write("request", method=scope["method"], path=scope["path"], status=status, ms=round(1000 * seconds, 1))


class _Exchange:
    """One request and its response, seen from outside the application."""

    def __init__(self, receive: Receive, send: Send, max_body_bytes: int) -> None:
        self.request_id = uuid.uuid4().hex
        self.started = time.perf_counter()
        self.status: int | None = None
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes
        self._body_bytes = 0

    async def receive(self) -> Message:
        """Counts the body, announced or chunked. What is left of a refused one uvicorn reads and drops, so that a
        client that is still sending gets the answer."""
        message = await self._receive()
        if message["type"] == "http.request":
            self._body_bytes += len(message.get("body", b""))
            if self._body_bytes > self._max_body_bytes:
                raise HTTPException(413, f"the body is larger than {self._max_body_bytes} bytes")
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
        await self._send(message)

    async def refuse(self, error: ExpertServeError, scope: Scope) -> None:
        headers = dict(_challenge(error))
        await error_response(error, headers)(scope, self._receive, self.send)


def _challenge(error: ExpertServeError) -> Iterable[tuple[str, str]]:
    return [("www-authenticate", "Bearer")] if error.http_status == 401 else []
