"""Look-ahead: reads the experts the next layer will likely want while the disk has nothing else to do.

Owns the guesses (who was guessed for which layer, what became of them) and the trial that decides whether guessing
pays. It starts reads and takes them back; it never waits, never pins, and takes no slot while slots are scarce.
Invariant: every guess ends as used, wasted or cancelled, and demand is served first.
"""

from __future__ import annotations

from statistics import median
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from expertserve.experts.pool import Fill
from expertserve.experts.stats import ExpertStats
from expertserve.experts.streamer import Purpose
from expertserve.experts.table import LayerTable

MOST_ROWS = 8  # wider batches use too many of a layer's experts for a guess to be worth a slot
WIDE = 4  # pairs for each expert of a layer, from which on nearly every expert is chosen: nothing to guess either
_SCARCE = 4  # slots of a class, in multiples of a token's experts, under which a guess would cost a certain expert
_SHARE = 8  # of a class's slots, one part may hold what a long prompt reads ahead: the others keep what decode uses
_WINDOW = 16  # steps of one side of a trial
_SIDES = (True, False, False, True, True, False, False, True)  # with, without: drift falls on both alike
_KEPT_FOR = 1024  # steps a verdict holds
_LEAST_GAIN = 1.01


class LookAheadTrial:
    """Decides by measurement whether guessing pays: decode steps with it against steps without, the median of each."""

    def __init__(self, mode: Literal["on", "off", "auto"]) -> None:
        self.active = mode != "off"
        self.verdict: str = "measuring" if mode == "auto" else mode
        self._measures = mode == "auto"
        self._left = _WINDOW  # the first window only warms up
        self._side = -1
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    def end_step(self, seconds: float) -> None:
        """A decode step took that long."""
        if not self._measures:
            return
        if 0 <= self._side < len(_SIDES):
            self._seconds[self.active].append(seconds)
        self._left -= 1
        if self._left:
            return
        self._side += 1
        if self._side < len(_SIDES):
            self.active, self._left = _SIDES[self._side], _WINDOW
        elif self._side == len(_SIDES):
            self._decide()
        else:
            self._side, self._left, self.active = 0, _WINDOW, _SIDES[0]

    def _decide(self) -> None:
        gain = median(self._seconds[False]) / max(1e-9, median(self._seconds[True]))
        self.active = gain >= _LEAST_GAIN
        self.verdict = f"{'on' if self.active else 'off'}, {gain:.2f}x the speed without"
        self._seconds = {True: [], False: []}
        self._left = _KEPT_FOR


class LookAhead:
    """The guesses of one lane."""

    def __init__(self, mode: Literal["on", "off", "auto"], stats: ExpertStats) -> None:
        self.trial = LookAheadTrial(mode)
        self._stats = stats
        self._asked: tuple[LayerTable, list[int]] | None = None  # experts of a layer, likeliest first
        self._guesses: dict[int, Fill] = {}  # by key of the layer they are for
        self._for: LayerTable | None = None

    @property
    def pending(self) -> bool:
        return self._for is not None

    @property
    def asked(self) -> bool:
        return self._asked is not None

    def ask(self, table: LayerTable, ids: NDArray[np.int32]) -> None:
        """Notes what a layer will likely choose; reading starts when `issue` is called.

        Forgotten where slots are scarce: a guess would cost a certain expert.
        """
        experts = list(dict.fromkeys(ids.T.ravel().tolist()))
        if table.cache.slot_count >= _SCARCE * len(experts):
            self._asked = table, experts

    def ask_all(self, table: LayerTable) -> None:
        """Notes that a layer will choose nearly every expert, as a long prompt's does."""
        self._asked = table, np.flatnonzero(table.address[0] == 0)[: table.cache.slot_count // _SHARE].tolist()

    def issue(self) -> None:
        """Starts reading what was asked for, as far as there are slots; called with all demand under way."""
        asked, self._asked = self._asked, None
        if asked is None or self._for is not None:
            return
        table, experts = asked
        self._for = table
        for expert in experts:
            key = table.first_key + expert
            if table.cache.slot_of[key] >= 0:
                continue
            fill = table.streamer.begin(key, Purpose.LOOK_AHEAD)
            if fill is None:
                break
            self._guesses[key] = fill

    def settle(self, chosen: NDArray[np.int64] | None) -> None:
        """The guessed layer runs with the `chosen` keys (None: it does not run): guesses are judged and expire."""
        table, self._for = self._for, None
        guesses, self._guesses = self._guesses, {}
        if table is None or not guesses:
            return
        counters = self._stats.current
        wanted = set() if chosen is None else set(chosen.tolist())
        for key, fill in guesses.items():
            under_way = table.streamer.filling.get(key) is fill
            if key in wanted:
                counters.lookahead_used += 1
                counters.lookahead_late += under_way
            elif not (under_way and table.streamer.cancel(key)):
                counters.lookahead_wasted += 1

    def is_for(self, table: LayerTable) -> bool:
        return self._for is table
