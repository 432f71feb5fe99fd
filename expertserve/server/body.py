"""Reading a body: what is refused before its fields are looked at.

Owns the limit on what JSON has many of, and the reasons of a body that cannot be read. Text is cheap to read; millions
of small values are not, and they are made into objects while the interpreter does nothing else, the writing of other
answers included.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from json import JSONDecodeError
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

# More than the token ids or the commas of a text that fills a context, and about a second's work at the most.
MAX_MARKS = 1_500_000


class BodyRoute(APIRoute):
    """A route that refuses a body of too many values before anything is made of it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            try:
                body = await request.body()
            except ClientDisconnect:
                raise HTTPException(400, "the client left before the end of its request") from None
            if sum(body.count(mark) for mark in (b",", b"[", b"{")) > MAX_MARKS:
                raise HTTPException(
                    413, f"the body has more than {MAX_MARKS} commas and opening brackets: send less in one request"
                )
            await _read_json(request)
            return await handle(request)

        return checked


async def _read_json(request: Request) -> None:
    """Has the request keep what its body says; a mistake of syntax is left to the route, which says where it is."""
    try:
        with suppress(JSONDecodeError):
            await request.json()
    except RecursionError:
        raise HTTPException(400, "the body is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise HTTPException(400, f"the body is not {error.encoding.upper()} text: byte {error.start}") from None
    except ValueError as error:
        raise HTTPException(400, f"the body cannot be read: {error}") from None
