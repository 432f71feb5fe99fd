"""Stop strings: ends a text at the first of them and holds back what may become one.

It sees text, not tokens. The invariant: what was returned so far is always a prefix of the final text, which ends just
before the first stop string (the one that starts earliest, as soon as any is complete).
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters; the suffix search below is quadratic in it


class StopFilter:
    """Passes text through until a stop string is complete."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.found: str | None = None
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""

    @property
    def stopped(self) -> bool:
        return self.found is not None

    def push(self, text: str) -> str:
        """Takes new text and returns what is safe to send."""
        if not self._stops:
            return text
        if not text or self.stopped:
            return ""
        pending = self._held + text
        starts = [start for stop in self._stops if (start := pending.find(stop)) >= 0]
        if starts:
            first = min(starts)
            self.found = next(stop for stop in self._stops if pending.startswith(stop, first))
            self._held = ""
            return pending[:first]
        keep = self._suffix_that_may_grow(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def flush(self) -> str:
        """Returns what was held back: the text is over and no stop string was completed."""
        held, self._held = self._held, ""
        return held

    def _suffix_that_may_grow(self, pending: str) -> int:
        for length in range(min(len(pending), self._longest - 1), 0, -1):
            if any(stop.startswith(pending[-length:]) for stop in self._stops):
                return length
        return 0
