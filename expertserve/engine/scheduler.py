"""Which rows the next step evaluates, with the cells they need.

It owns the queue, the running sequences and the KV budget they share with the cached prefixes; it evaluates nothing
and talks to nobody. The invariants: sequences start in the order they came, at most `parallel` run, every running
sequence of a plan owns a cell for each of its rows, and the oldest sequence always gets at least one row, so every
step makes progress.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from expertserve.engine.pacing import PromptPacer
from expertserve.engine.prefix import PrefixCache
from expertserve.engine.sequence import Sequence
from expertserve.engine.states import StateKeeper
from expertserve.kv.cache import KVCells
from expertserve.kv.states import StateSlots


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Rows of one sequence in one step: token indices [start, end), logits wanted of [first_output, last_output)."""

    sequence: Sequence
    start: int
    end: int
    first_output: int
    last_output: int
    decode: bool

    @property
    def num_outputs(self) -> int:
        return max(0, self.last_output - self.first_output)


class Scheduler:
    """Continuous batching: all running decodes first, then prompt chunks in order of arrival."""

    def __init__(
        self,
        kv: KVCells,
        states: StateSlots,
        *,
        parallel: int,
        max_rows: int,
        chunk: int,
        max_outputs: int,
        draft_tokens: int = 0,
        slowdown: float = 0.0,
    ) -> None:
        self.kv = kv
        self.pacer = PromptPacer(chunk, slowdown)
        self.cache = PrefixCache(kv, states)
        self.states = StateKeeper(states, self.cache.drop_state)
        self.queue: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self.preemptions = 0
        self._parallel = parallel
        self._max_rows = max_rows
        self._chunk = chunk
        # A sequence may need a row of logits to sample from, and one a draft; prompt log-probabilities share the rest.
        self._max_echo_rows = max(1, max_outputs - parallel * (1 + draft_tokens))
        self._plan: list[Work] = []
        self._rows_left = 0
        self._echo_rows_left = 0

    def has_work(self) -> bool:
        return bool(self.running or self.queue)

    def plan(self) -> list[Work]:
        """Chooses the rows of the next step and gives each a cell."""
        self._plan = []
        self._echo_rows_left = self._max_echo_rows
        for sequence in [s for s in self.running if s.decoding]:
            if sequence in self.running:  # an older one may have preempted it meanwhile
                self._schedule(sequence, self._decode_rows(sequence), decode=True)
        decoded = sum(work.end - work.start for work in self._plan)
        self._rows_left = min(self.pacer.rows if decoded else self._chunk, self._max_rows - decoded)
        for sequence in [s for s in self.running if s.pending and not s.decoding]:
            if sequence in self.running:
                self._schedule(sequence, self._chunk_rows(sequence), decode=False)
        while self._rows_left > 0 and self.queue and len(self.running) < self._parallel:
            if not self._admit(self.queue[0]):
                break
        return self._plan

    def finish(self, sequence: Sequence, *, keep: bool) -> None:
        """Ends a sequence wherever it is; its evaluated cells stay cached if `keep`, else all become free."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._give_up_cells(sequence, keep=keep)
        else:
            self.queue.remove(sequence)

    def without_drafts(self, work: Work) -> Work:
        """The same work, but for the rows of drafts: they are given up with their cells and states."""
        sequence = work.sequence
        if not sequence.drafts:
            return work
        end = work.start + 1
        self.states.cut_plan(sequence.state, end)
        self.cache.give_back(sequence.drop_drafts(end))
        return replace(work, end=end, last_output=end)

    def evaluated(self, work: Work, end: int) -> None:
        """The rows of `work` are evaluated; those from token `end` on were drafts that proved wrong."""
        sequence = work.sequence
        self.states.commit(sequence.state, work.start, end, sequence.prompt_length - 1)
        self.cache.give_back(sequence.keep_evaluated(end))

    def requeue(self, sequence: Sequence) -> None:
        """Puts a running sequence back to the head of the queue, to be evaluated again; nothing is kept of it."""
        self.running.remove(sequence)
        self._give_up_cells(sequence, keep=False)
        self.queue.appendleft(sequence)

    def cells_in_use(self) -> tuple[int, int]:
        """Cells that running sequences hold, and those that only cached prefixes hold."""
        cached = self.cache.evictable
        return self.kv.capacity - self.kv.free - cached, cached

    def check_integrity(self) -> None:
        """Raises AssertionError when cells and their holders disagree; between steps only."""
        self.kv.check_integrity()
        self.cache.check_integrity()
        expected = self.cache.held.copy()
        for sequence in self.running:
            assert sequence.num_cells == sequence.evaluated, "a cell is owned and not evaluated"
            expected[sequence.cells] += 1
        assert bool((expected == self.kv.refs).all()), "reference counts differ from the holders"
        assert not any(sequence.num_cells for sequence in self.queue), "a queued sequence owns cells"
        slots = [*self.cache.held_states(), *(slot for sequence in self.running for slot in sequence.state.held())]
        counts = np.bincount(np.array(slots, np.int64), minlength=self.states.slots.capacity)
        assert bool((counts == self.states.slots.refs).all()), "state slots differ from their holders"

    def _decode_rows(self, sequence: Sequence) -> int:
        """The token sampled last and its drafts; without these where cells are short."""
        if 1 + len(sequence.drafts) > self.kv.free + self.cache.evictable:
            sequence.drafts = []
        return 1 + len(sequence.drafts)

    def _chunk_rows(self, sequence: Sequence) -> int:
        count = min(sequence.pending, self._rows_left)
        if sequence.wants_prompt_logprobs:
            count = min(count, self._echo_rows_left)
        return count

    def _schedule(self, sequence: Sequence, count: int, *, decode: bool) -> None:
        if sequence is self.running[-1] and not decode:
            count = min(count, max(1, self.kv.free + self.cache.evictable))
        if count <= 0 or not self._allocate(sequence, count):
            return
        echo = sequence.wants_prompt_logprobs
        start, end = sequence.num_cells - count, sequence.num_cells
        running = (other.state for other in self.running)
        self.states.plan(sequence.state, sequence.state_ends(start, end), running, may_skip=not decode)
        outputs = (start, end) if decode else sequence.outputs(start, end)
        work = Work(sequence, start, end, *outputs, decode)
        self._plan.append(work)
        if not decode:
            self._rows_left -= count
        if echo:
            self._echo_rows_left -= count

    def _allocate(self, sequence: Sequence, count: int) -> bool:
        """Gives a running sequence its next cells: free ones, then cached ones, then those of newer sequences."""
        while self.kv.free < count:
            self.cache.reclaim(count)
            if self.kv.free >= count:
                break
            newest = self.running[-1]
            self._preempt(newest)
            if newest is sequence:
                return False
        sequence.extend(self.kv.allocate(count))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's cells; it keeps its tokens and goes on from the head of the queue.

        What it evaluated stays cached until it is needed, so it is evaluated again only as far as cells were short.
        """
        self.preemptions += 1
        self.running.remove(sequence)
        self._plan = [work for work in self._plan if work.sequence is not sequence]  # its decode, if it had one
        self._give_up_cells(sequence, keep=True)
        self.queue.appendleft(sequence)

    def _give_up_cells(self, sequence: Sequence, *, keep: bool) -> None:
        cells = sequence.cells
        kept = sequence.evaluated if keep else 0
        states = self.states.give_up(sequence.state, sequence.evaluated)
        if not keep:
            self.states.release(states)
        self.cache.give_back(cells[kept:])
        self.cache.add(sequence.tokens[:kept], cells[:kept], states)
        sequence.forget_cells()

    def _admit(self, sequence: Sequence) -> bool:
        """Starts the head of the queue if all its tokens will fit beside what runs; it preempts nobody."""
        if sequence.wants_prompt_logprobs and self._echo_rows_left <= 0:
            return False
        running = ((other.tokens, other.cells) for other in self.running)
        cells, state = self.cache.take(sequence.tokens, sequence.reusable, running)
        if self.running:
            growth = sum(other.pending + 1 for other in self.running)
            needed = sequence.num_tokens - len(cells) + 1 + growth
            if needed > self.kv.free + self.cache.evictable:
                self.cache.give_back(cells)
                self.states.slots.release(state)
                return False
        self.queue.popleft()
        self.running.append(sequence)
        sequence.adopt(cells, state)
        self._schedule(sequence, self._chunk_rows(sequence), decode=False)
        return True
