"""What a level of load showed: figures of its answers, what must be known beside them, and why they do not count.

Figures are of answers that came whole; the others are counted by kind. A row is void where its figures would tell
of something else than the server: of its death, of answers that were not streamed, or of this process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from expertserve.bench.load_client import Answer
from expertserve.bench.results import Column, Row

_BUSY = 0.9  # share of one core from which on this process makes answers late
_MANY = 1.1  # tokens an event from which on the time between events is not that between tokens

COLUMNS = (
    Column("sent", "requests", 1, "d"),
    Column("whole", "completed", 1, "d"),
    Column("tok/s", "output_tok_s", 1, ".1f"),
    Column("TTFT p50 ms", "first_token_p50_ms", 1, ".0f"),
    Column("p99", "first_token_p99_ms", 1, ".0f"),
    Column("ITL p50 ms", "interval_p50_ms", 1, ".1f"),
    Column("p99", "interval_p99_ms", 1, ".1f"),
    Column("req/s", "requests_s", 1, ".2f"),
    Column("good/s", "goodput_requests_s", 1, ".2f"),
    Column("good %", "met_limits", 100, ".0f"),
    Column("cached %", "cached", 100, ".0f"),
    Column("client CPU %", "client_cpu", 100, ".0f"),
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What an answer must keep to count as good, in milliseconds."""

    first_token_ms: float
    interval_ms: float

    def met(self, answer: Answer) -> bool:
        return answer.first_token_ms <= self.first_token_ms and answer.mean_interval_ms <= self.interval_ms


def figures(answers: Sequence[Answer], seconds: float, limits: Limits) -> dict[str, Any]:
    """What is told of one level of load that took `seconds`."""
    whole = [answer for answer in answers if answer.error is None]
    failed = [answer for answer in answers if answer.error is not None]
    counted = [answer for answer in whole if answer.prompt_tokens and answer.cached_tokens is not None]
    good, output = sum(map(limits.met, whole)), sum(answer.output_tokens for answer in whole)
    return {
        "requests": len(answers),
        "completed": len(whole),
        "errors": dict(Counter(str(answer.error) for answer in failed)),
        "error_details": {str(answer.error): answer.detail for answer in reversed(failed)},
        "seconds": round(seconds, 3),
        "most_at_once": _most_at_once(answers),
        "output_tok_s": round(output / seconds, 3),
        "requests_s": round(len(whole) / seconds, 3),
        "goodput_requests_s": round(good / seconds, 3),
        "met_limits": _share(good, len(answers)),
        "prompt_tokens": median([n for answer in whole if (n := answer.prompt_tokens)] or [0]) or None,
        "cached": _share(sum(n.cached_tokens or 0 for n in counted), sum(n.prompt_tokens or 0 for n in counted)),
        "output_tokens": median([answer.output_tokens for answer in whole] or [0]) or None,
        "tokens_an_event": _share(output, sum(len(answer.times) for answer in whole)),
        "counted_by_events": sum(answer.counted_by_events for answer in whole),
        **_spread("first_token", [answer.first_token_ms for answer in whole]),
        **_spread("interval", [ms for answer in whole for ms in answer.intervals_ms]),
        **_spread("answer", [1000 * (answer.ended - answer.sent) for answer in whole]),
    }


def _share(part: float, of: float) -> float | None:
    return round(part / of, 4) if of else None


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    found = [np.mean(values), *np.percentile(values, (50, 99))] if values else [None] * 3
    named = zip(("mean", "p50", "p99"), found, strict=True)
    return {f"{name}_{which}_ms": None if value is None else round(float(value), 2) for which, value in named}


def _most_at_once(answers: Sequence[Answer]) -> int:
    moments = sorted([(answer.sent, 1) for answer in answers] + [(answer.ended, -1) for answer in answers])
    return int(np.cumsum([change for _, change in moments]).max()) if moments else 0


def void_reason(row: Row, asked: int, dead: str | None) -> str | None:
    """Why the figures of `row` must not be used; None where they count.

    Args:
        asked: tokens that were asked of each answer.
        dead: why the server gives no answer after the measurement; None where it does.
    """
    if dead is not None:
        return f"the server does not answer any more: {dead}; later rows were not tried"
    if not row["completed"]:
        return f"no answer came whole: {', '.join(_failures(row))}"
    if asked > 1 and row["interval_mean_ms"] is None:
        return "each answer came as one piece: this server does not stream"
    if row["client_cpu"] > _BUSY:
        return f"the load generator was the limit: it used {row['client_cpu']:.0%} of a core"
    return None


def remarks(row: Row, asked: int) -> Iterator[str]:
    """What must be known beside the figures of a row."""
    yield from _failures(row)
    if not row["completed"]:
        return
    if row["counted_by_events"]:
        yield "tokens are counted by events: the server sends no usage"
    elif row["tokens_an_event"] > _MANY:
        yield f"{row['tokens_an_event']:.1f} tokens an event: ITL is the time between events"
    if row["output_tokens"] < asked:
        yield f"the server ended answers itself, at {row['output_tokens']:g} of {asked} tokens"


def _failures(row: Mapping[str, Any]) -> Iterator[str]:
    for kind, count in row["errors"].items():
        yield f"{count} x {kind} ({row['error_details'][kind]})"
