"""Which pages from elsewhere may use the server from a browser.

Owns the answer to a browser's questions beforehand, which carry no key and need no model, and the headers without which
a page sees neither an answer nor why it was refused; so it stands before the guard. Starlette knows the rules; the
origins are those of the settings in force.
"""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

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
