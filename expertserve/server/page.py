"""The page at `/`: files of the package, served from memory, with a policy that lets them load nothing else.

Owns which files there are. The page talks to the same API as any other client, so it has no rights of its own.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import Response

_TYPES = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
_HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def is_page(path: str) -> bool:
    """Whether a path is a file of the page, which needs neither a key nor a model."""
    return path == "/" or path.startswith("/ui/")


def add_page(app: FastAPI) -> None:
    """Adds the routes of the page."""
    folder = files("expertserve.server") / "static"
    found = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _TYPES}

    def respond(name: str) -> Response:
        if name not in found:
            raise HTTPException(404)
        return Response(found[name], headers=_HEADERS, media_type=_TYPES[name.rpartition(".")[2]])

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return respond("index.html")

    @app.get("/ui/{name}", include_in_schema=False)
    async def asset(name: str) -> Response:
        return respond(name)
