"""Which pages from elsewhere may use the server from a browser.

Owns the answer to a browser's questions beforehand, which carry no key and need no model, and the headers without which
a page sees neither an answer nor why it was refused; so it stands before the guard. Starlette knows the rules; the
origins are those of the settings in force. A browser asks nothing before it sends what it does not call JSON, so for
such requests the guard asks `strange_origin`.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from expertserve.errors import RequestError
from expertserve.server.state import ServerState

_READABLE = ("retry-after", "x-request-id")


class Cors:
    """ASGI middleware; see the module docstring."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._origins: tuple[str, ...] = ()
        self._next: ASGIApp = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (origins := self._state.settings.cors_origins) != self._origins:
            self._origins = origins
            self._next = self._allowing(origins) if origins else self._app
        await self._next(scope, receive, send)

    def _allowing(self, origins: tuple[str, ...]) -> ASGIApp:
        return CORSMiddleware(
            self._app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=_READABLE
        )


def strange_origin(headers: Headers, allowed: Collection[str]) -> str | None:
    """The origin of the page that has a browser send this without having asked; None where that is no page, one of
    ours or one of those `allowed`."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is None or site in ("same-origin", "none") or is_json(headers.get("content-type", "")):
        return None
    ours = urlsplit(origin).netloc == headers.get("host")  # where a proxy has changed it, the browser's word is enough
    return None if ours or "*" in allowed or origin in allowed else origin


def origin_refused(origin: str) -> RequestError:
    """The error that a page of `origin` causes."""
    error = RequestError(
        f"pages of {origin} may not use this server: --cors-origin allows it",
        code="origin_not_allowed",
        http_status=403,
    )
    error.error_type = "permission_error"
    return error


def is_json(content_type: str) -> bool:
    """Whether a body is declared as JSON."""
    return content_type.partition(";")[0].strip().lower().endswith(("/json", "+json"))
