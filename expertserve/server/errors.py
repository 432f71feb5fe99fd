"""OpenAI error objects.

Owns the mapping from an exception to status, headers and body. Every body of a failed request has this one shape,
also for unknown paths, wrong methods and bodies that are no JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from expertserve.errors import ExpertServeError, RequestError

_STATUS_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# Fields that hold fields; of others, what follows in a location is a tag of pydantic's or a key the client made up.
_NESTED = {
    *("messages", "tools", "stream_options", "response_format", "structured_outputs"),
    *("tool_choice", "thinking", "text", "reasoning"),
}


class UnavailableError(ExpertServeError):
    """The server cannot take the request now; a later try may succeed."""

    http_status = 503
    error_type = "server_error"

    def __init__(self, message: str, *, code: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class OverloadedError(RequestError):
    """Too much is under way; a later try may succeed."""

    error_type = "rate_limit_error"

    def __init__(self, message: str, *, code: str, retry_after_s: int) -> None:
        super().__init__(message, code=code, http_status=429)
        self.retry_after_s = retry_after_s


def error_object(error: ExpertServeError) -> dict[str, Any]:
    """The value of "error" in a body or an SSE error event."""
    return {
        "message": str(error),
        "type": error.error_type,
        "param": getattr(error, "param", None),
        "code": getattr(error, "code", None),
    }


def error_response(error: ExpertServeError, headers: Mapping[str, str] | None = None) -> Response:
    """The whole response for an error known before anything was sent."""
    retry_after_s = getattr(error, "retry_after_s", None)
    all_headers = dict(headers or {})
    if retry_after_s is not None:
        all_headers["retry-after"] = str(retry_after_s)
    body = json.dumps({"error": error_object(error)}).encode()
    return Response(body, status_code=error.http_status, headers=all_headers, media_type="application/json")


def _field_name(location: Iterable[int | str]) -> str | None:
    """messages[0].content from ("body", "messages", 0, "content", ...), without the tags pydantic adds for unions."""
    name = ""
    for part in list(location)[1:]:
        if name and name.replace("[", ".").partition(".")[0] not in _NESTED:
            break
        if isinstance(part, int):
            name += f"[{part}]" if name else ""
        elif not part.isidentifier():
            break
        else:
            name += f".{part}" if name else part
    return name or None


def validation_error(error: RequestValidationError) -> RequestError:
    """The first thing wrong with a body, in one line."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "malformed")
        return RequestError(
            f"the body is not valid JSON: {reason} at character {first['loc'][-1]}", code="invalid_json"
        )
    param = _field_name(first["loc"])
    if first["loc"] == ("body",) and first["type"] == "missing":
        return RequestError("the body is empty: send a JSON object")
    if param is None:
        return RequestError(f"the body cannot be used: {first['msg']}")
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return RequestError(f"'{param}' cannot be used: {first['msg']}", param=param, code=code)


def _http_error(error: HTTPException, request: Request) -> ExpertServeError:
    message, code = str(error.detail), None
    if error.status_code == 404:
        message, code = f"unknown path {request.url.path}", "unknown_url"
    elif error.status_code == 405:
        message, code = f"{request.method} is not allowed for {request.url.path}", "method_not_allowed"
    mapped = RequestError(message, code=code, http_status=error.status_code)
    mapped.error_type = _STATUS_TYPES.get(error.status_code, "invalid_request_error")
    return mapped


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception of a route with an OpenAI error object."""

    @app.exception_handler(ExpertServeError)
    async def _on_error(request: Request, error: ExpertServeError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def _on_invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(validation_error(error))

    @app.exception_handler(HTTPException)
    async def _on_http(request: Request, error: HTTPException) -> Response:
        return error_response(_http_error(error, request), error.headers)
