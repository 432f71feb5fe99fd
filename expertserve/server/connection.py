"""One connection of a client: how much of it is held, and for how long.

Owns the bound on the parser's memory, and cutting off a client that takes nothing of what it asked for: it would hold
its answer, its place under its key's limit and a descriptor for as long as it likes. The rest is uvicorn's.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from expertserve import log
from expertserve.server.guard import MAX_HEADER_BYTES

MAX_HEAD_BYTES = 2 * MAX_HEADER_BYTES
_SYSTEM_BUFFER = 128 << 10
_log = log.get_logger(__name__)


class Connection(H11Protocol):
    """uvicorn's protocol with our bounds.

    Args:
        stall_timeout_s: how long a client may take nothing of what waits for it.
    """

    def __init__(self, *args: Any, stall_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stall_timeout_s = stall_timeout_s
        self._waiting_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # What waits shows whether the client takes anything only where the system does not hold megabytes of it.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SYSTEM_BUFFER)
        transport.set_write_buffer_limits(high=0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_timer()
        self._watch()

    def resume_writing(self) -> None:
        self._stop_timer()
        super().resume_writing()

    def _watch(self) -> None:
        self._waiting_bytes = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(self._stall_timeout_s, self._check)

    def _check(self) -> None:
        """Nothing is written while a client is behind, so that what waits becomes less where it takes anything."""
        if self.transport.get_write_buffer_size() < self._waiting_bytes:
            self._watch()
            return
        _log.warning("a client took nothing of its answer and was cut off", seconds=self._stall_timeout_s)
        self.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(f"This is no HTTP/1.1, or its head has over {MAX_HEAD_BYTES} bytes.")
