"""Decides by measurement whether something pays that can be switched on and off: looking ahead, drafting.

Owns the alternation and the verdict, no clock and no knowledge of what is tried. Invariant: both sides are measured in
turn over the same stretch of work, so that drift falls on both alike, and a verdict expires.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Literal


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """How a trial goes.

    Attributes:
        window: measurements of one side in a row.
        sides: the order of windows, with it (True) and without.
        kept_for: measurements for which a verdict holds.
        least_gain: speed with it over the speed without from which on it stays on.
    """

    window: int
    sides: tuple[bool, ...]
    kept_for: int
    least_gain: float


class Trial:
    """What is tried, on or off; `auto` measures, the other modes never do."""

    def __init__(self, mode: Literal["on", "off", "auto"], plan: TrialPlan) -> None:
        self.active = mode != "off"
        self.verdict: str = "measuring" if mode == "auto" else mode
        self._measures = mode == "auto"
        self._plan = plan
        self._left = plan.window  # the first window only warms up
        self._side = -1
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    def add(self, seconds: float) -> None:
        """A unit of work, a step or a token, took that long; the median of each side counts."""
        if not self._measures:
            return
        sides = self._plan.sides
        if 0 <= self._side < len(sides):
            self._seconds[self.active].append(seconds)
        self._left -= 1
        if self._left:
            return
        self._side += 1
        if self._side < len(sides):
            self.active, self._left = sides[self._side], self._plan.window
        elif self._side == len(sides):
            self._decide()
        else:
            self._side, self._left, self.active = 0, self._plan.window, sides[0]

    def _decide(self) -> None:
        gain = median(self._seconds[False]) / max(1e-9, median(self._seconds[True]))
        self.active = gain >= self._plan.least_gain
        self.verdict = f"{'on' if self.active else 'off'}, {gain:.2f}x the speed without"
        self._seconds = {True: [], False: []}
        self._left = self._plan.kept_for
