"""Errors a user can see.

Each class carries the process exit code and the HTTP status under which it is reported. A message says what is wrong,
where, and what to do about it, on one line. `assert` is for our own bugs; everything a user can cause is one of these.
"""

from __future__ import annotations


class ExpertServeError(Exception):
    """Base of every error shown to a user.

    Attributes:
        exit_code: status of the command-line process when the error ends it.
        http_status: status of the HTTP response when a request ends in it.
        error_type: the `type` field of the OpenAI error object.
    """

    exit_code = 1
    http_status = 500
    error_type = "server_error"


class ConfigError(ExpertServeError):
    """A flag, environment variable or configuration file has a value that cannot be used."""

    exit_code = 2
    http_status = 400
    error_type = "invalid_request_error"


class GGUFError(ExpertServeError):
    """A GGUF file is malformed, truncated or incomplete."""

    exit_code = 3


class UnsupportedModelError(ExpertServeError):
    """A well-formed model that is not served: architecture, tensor type or tokenizer."""

    exit_code = 4


class CapacityError(ExpertServeError):
    """What was asked for does not fit the memory, context or slots there are."""

    exit_code = 5
    http_status = 503


class ExpertReadError(ExpertServeError):
    """Expert bytes could not be read in full; the requests that needed them fail."""

    exit_code = 6


class KernelUnavailableError(ExpertServeError):
    """A compute kernel or its library is missing or failed; the message has the command that builds it."""

    exit_code = 7


class RequestError(ExpertServeError):
    """A request that cannot be served as it was asked.

    Attributes:
        param: name of the request field at fault, or None.
        code: short machine-readable reason, or None.
    """

    exit_code = 2
    http_status = 400
    error_type = "invalid_request_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, http_status: int | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        if http_status is not None:
            self.http_status = http_status


class InterruptError(ExpertServeError):
    """The user ended the command (Ctrl-C) before its end."""

    exit_code = 130
