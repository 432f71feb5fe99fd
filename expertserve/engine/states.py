"""Who holds which slots of recurrent state: the running sequences, and what a step under way will write.

A recurrent state can't be cut back token by token, so what may be reused later is kept when it is passed: the state
before the last token of a prompt (a prompt asked again, or gone on with differently, starts there) and the last one.
The invariants: every slot named in a `SequenceState` is one reference; the slot that a step needs is always to be had,
because what is held beside a running sequence's present and next state can be dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from expertserve.kv.states import NO_STATE, StateSlots

SNAPSHOTS = 4
"""Slots beside the two that a running sequence needs, for states that a later request may start from."""


def slots_for(parallel: int, draft_tokens: int = 0) -> int:
    """How many slots an engine of `parallel` sequences works with: the present state and those a step leaves."""
    return parallel * (2 + draft_tokens) + SNAPSHOTS


@dataclass(slots=True)
class SequenceState:
    """One sequence's slots.

    Attributes:
        current: where the state after the evaluated tokens is.
        kept: states at earlier lengths, by length.
        planned: the lengths at which the step under way leaves states, rising, and the slots it leaves them in.
        may_skip: only the last of these is needed.
    """

    current: int = NO_STATE
    kept: dict[int, int] = field(default_factory=dict)
    planned: list[tuple[int, int]] = field(default_factory=list)
    may_skip: bool = True

    def runs(self, start: int, row: int) -> list[tuple[int, int, int, int]]:
        """The runs of rows that begin at `row` with token `start`: source, target, first row, row after the last."""
        found, source = [], self.current
        for length, slot in self.planned:
            end = row + length - start
            found.append((source, slot, row, end))
            source, row, start = slot, end, length
        return found

    def held(self) -> list[int]:
        """Every slot, once for each reference."""
        slots = [self.current, *self.kept.values(), *(slot for _, slot in self.planned)]
        return [slot for slot in slots if slot != NO_STATE]


class StateKeeper:
    """Hands slots to sequences, steps and cached prefixes.

    Args:
        slots: none where the model has no recurrent state; then nothing is ever held.
        drop_cached: gives up one state that only a cached prefix holds; False if there is none.
    """

    def __init__(self, slots: StateSlots, drop_cached: Callable[[], bool]) -> None:
        self.slots = slots
        self._drop_cached = drop_cached

    def plan(
        self, state: SequenceState, ends: Iterable[int], running: Iterable[SequenceState], *, may_skip: bool
    ) -> None:
        """Gives a step slots for the states it leaves at the lengths `ends`; `may_skip`: the last is enough."""
        if not self.slots.capacity:
            return
        state.may_skip = may_skip
        others = [*running]
        for length in ends:
            state.planned.append((length, self._take(others)))

    def commit(self, state: SequenceState, start: int, end: int, keep: int) -> None:
        """The step from length `start` is done: what it left at `end` is current, that at length `keep` is kept."""
        if not state.planned:
            return
        left = {start: state.current, **dict(state.planned)}
        state.current, state.planned = left.pop(end), []
        if left.get(keep, NO_STATE) != NO_STATE:
            self.slots.release(state.kept.pop(keep, NO_STATE))
            state.kept[keep] = left.pop(keep)
        self.release(left)

    def cut_plan(self, state: SequenceState, end: int) -> None:
        """The step under way goes no further than length `end`."""
        self.release({length: slot for length, slot in state.planned if length > end})
        state.planned = [(length, slot) for length, slot in state.planned if length <= end]

    def give_up(self, state: SequenceState, length: int) -> dict[int, int]:
        """Ends a sequence's hold, as far as evaluated to `length`; what the step under way would have written goes."""
        for _, slot in state.planned:
            self.slots.release(slot)
        states, state.kept, state.planned = state.kept, {}, []
        if state.current != NO_STATE:
            self.slots.release(states.pop(length, NO_STATE))
            states[length] = state.current
        state.current = NO_STATE
        return states

    def release(self, states: dict[int, int]) -> None:
        for slot in states.values():
            self.slots.release(slot)

    def _take(self, running: list[SequenceState]) -> int:
        while not self.slots.free and (self._drop_cached() or self._drop_kept(running)):
            pass
        return self.slots.allocate()

    def _drop_kept(self, running: list[SequenceState]) -> bool:
        """Gives up one state that a running sequence could do without."""
        for state in running:
            if state.kept:
                self.slots.release(state.kept.pop(min(state.kept)))
                return True
            if state.may_skip and len(state.planned) > 1:
                self.slots.release(state.planned.pop(0)[1])
                return True
        return False
