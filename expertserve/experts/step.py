"""The step: one forward of one model over one batch, and the clock that counts steps.

Owns whether a step is open and how many have ended; knows nothing of experts. A step opened inside a step raises on
every path, and a step that is left, by return or by exception, has ended and was counted exactly once: the clock
cannot be dead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType


class StepError(RuntimeError):
    """The forward broke the contract of the step: a bug of ours, never a user's doing."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """What one step computes.

    Attributes:
        decode_rows: rows that continue a sequence.
        prefill_rows: rows of prompts.
        draft: the step is a draft's own forward; it does not age the target's hotness.
    """

    decode_rows: int
    prefill_rows: int
    draft: bool = False


class StepClock:
    """Counts ended steps; `target_steps` leaves the draft's out."""

    def __init__(self) -> None:
        self.steps = 0
        self.target_steps = 0
        self.current: StepRows | None = None

    def begin(self, rows: StepRows) -> None:
        if self.current is not None:
            raise StepError("a step was opened inside a step: every forward is exactly one step of its own")
        self.current = rows

    def end(self) -> StepRows:
        """Ends the open step, counts it and returns what it was."""
        rows = self.current
        if rows is None:
            raise StepError("a step was closed that is not open")
        self.current = None
        self.steps += 1
        if not rows.draft:
            self.target_steps += 1
        return rows

    def require_open(self) -> None:
        if self.current is None:
            raise StepError("experts were asked for outside a step: open one with `with lane.step(...)`")


class Step:
    """The context manager a forward runs under; calls `on_begin` and `on_end` of the lane around the clock."""

    __slots__ = ("_clock", "_on_begin", "_on_end", "_rows")

    def __init__(
        self,
        clock: StepClock,
        rows: StepRows,
        on_begin: Callable[[StepRows], None],
        on_end: Callable[[StepRows], None],
    ) -> None:
        self._clock = clock
        self._rows = rows
        self._on_begin = on_begin
        self._on_end = on_end

    def __enter__(self) -> None:
        self._clock.begin(self._rows)
        try:
            self._on_begin(self._rows)
        except BaseException:
            self._clock.end()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._on_end(self._clock.end())
