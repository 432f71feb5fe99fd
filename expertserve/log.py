"""What the program says about itself: structured lines on standard error, as text or JSON.

Generated text goes to standard output and the `[expert-stream]` lines are printed by experts/stats.py; neither passes
through here. Fields bound with `structlog.contextvars` (a request's id) appear on every line logged in that context.
Records of the standard library's logging, as uvicorn writes them, take the same way out.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO, cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor


def configure(format: str, level: str, stream: TextIO | None = None) -> None:
    """Sends every log line of this process to `stream` (standard error) as `text` or `json`, from `level` on."""
    out = sys.stderr if stream is None else stream
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.StackInfoRenderer(),
    ]
    last: list[Processor]
    if format == "json":
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(ensure_ascii=False)]
    else:
        last = [
            structlog.dev.ConsoleRenderer(
                colors=out.isatty(),
                timestamp_key="time",
                pad_event_to=0,
                exception_formatter=structlog.dev.plain_traceback,
            )
        ]
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def get_logger(name: str, **fields: Any) -> FilteringBoundLogger:
    """The logger of a module (`get_logger(__name__)`); `fields` are added to each of its lines."""
    return cast(FilteringBoundLogger, structlog.get_logger(name, **fields))
