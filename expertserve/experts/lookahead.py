"""Look-ahead: reads the experts the next layer will likely want while the disk has nothing else to do.

Owns the guesses: who was guessed for which layer, and what became of them; a trial decides whether guessing pays. It
starts reads and takes them back; it never waits, never pins, and takes no slot while slots are scarce. Invariant: every
guess ends as used, wasted or cancelled, and demand is served first.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from expertserve.experts.pool import Fill
from expertserve.experts.stats import ExpertStats
from expertserve.experts.streamer import Purpose
from expertserve.experts.table import LayerTable
from expertserve.experts.trial import Trial, TrialPlan

MOST_ROWS = 8  # wider batches use too many of a layer's experts for a guess to be worth a slot
WIDE = 4  # pairs for each expert of a layer, from which on nearly every expert is chosen: nothing to guess either
_SCARCE = 4  # slots of a class, in multiples of a token's experts, under which a guess would cost a certain expert
_SHARE = 8  # of a class's slots, one part may hold what a long prompt reads ahead: the others keep what decode uses
TRIAL = TrialPlan(  # of decode steps
    window=16, sides=(True, False, False, True, True, False, False, True), kept_for=1024, least_gain=1.01
)


class LookAhead:
    """The guesses of one lane."""

    def __init__(self, mode: Literal["on", "off", "auto"], stats: ExpertStats) -> None:
        self.trial = Trial(mode, TRIAL)
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
            if table.cache.slot_of[key] >= 0 or table.streamer.is_below(key):
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
