"""Speculative decoding by the model's own draft layer: proposes tokens, which one forward of the target then judges.

Each draft forward is a step of its own. The draft layer's K and V of token i + 1 lie in cell i, beside the target's of
token i, and are computed from the target's hidden state as soon as the next token is known; what a chain of drafts
writes goes to scratch cells, since it comes from guessed states. The target samples every token itself, and a draft is
accepted when it is the token sampled. For a draft that is one token this is exact rejection sampling
(arXiv:2211.17192): the distribution, and from a seed the very tokens, are those without drafts. The invariant: a draft
that fails or is wrong costs time, never a token.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from expertserve.engine.ports import ForwardPass
from expertserve.engine.scheduler import Work
from expertserve.engine.sequence import Sequence
from expertserve.errors import ExpertServeError
from expertserve.experts.trial import Trial, TrialPlan
from expertserve.kv.cache import BUCKET, Cells, KVCells, attention_mask, bucket_length
from expertserve.models.batch import Batch

DraftMode = Literal["off", "mtp", "mtp-always"]
TRIAL = TrialPlan(  # of iterations that only decode, by their seconds a token
    window=12, sides=(True, False, False, True, True, False), kept_for=512, least_gain=1.02
)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one sequence in a draft step: token indices [first, last) given, K and V to the cells before them."""

    sequence: Sequence
    first: int
    last: int


class Drafter:
    """Proposes up to `tokens` tokens for each sequence that decodes.

    Args:
        forward: one with a draft layer.
        kv: the target's cells; the forward has `scratch_cells` more.
        report: told how many tokens were drafted and taken, and whether drafting is on.
    """

    def __init__(
        self,
        forward: ForwardPass,
        kv: KVCells,
        *,
        parallel: int,
        tokens: int,
        mode: DraftMode,
        report: Callable[[int, int, str], None],
    ) -> None:
        self.trial = Trial("auto" if mode == "mtp" else "on", TRIAL)
        self.drafted = self.accepted = self.failed = 0
        self._report = report
        self._forward = forward
        self._kv = kv
        self._tokens = tokens
        self._filled = np.zeros(kv.capacity, bool)
        scratch = kv.capacity + np.arange(parallel * (tokens - 1))
        self._scratch = scratch.reshape(parallel, -1)

    def observe(self, works: SequenceOf[Work]) -> None:
        """The target has run these rows: keeps their hidden states until the token after each is known."""
        row = 0
        for work in works:
            count, sequence = work.end - work.start, work.sequence
            self._filled[sequence.cells[work.start : work.end]] = False
            if self.trial.active:
                new = self._forward.hidden[row : row + count]
                sequence.hidden = np.concatenate([sequence.hidden, new]) if len(sequence.hidden) else new.copy()
            row += count

    def judge(self, drafted: int, accepted: int) -> None:
        """The target has judged a sequence's drafts."""
        self.drafted += drafted
        self.accepted += accepted
        self._report(drafted, accepted, self.trial.verdict)

    def counters(self) -> dict[str, float]:
        """What became of the drafts so far."""
        return {"drafts_judged": self.drafted, "drafts_accepted": self.accepted, "drafts_failed": self.failed}

    def propose(self, running: SequenceOf[Sequence]) -> None:
        """Brings the draft layer's K and V up to date and leaves drafts with the sequences that decode."""
        if not self.trial.active:
            for sequence in running:
                sequence.hidden = sequence.hidden[:0]
            return
        rows = [self._rows_of(sequence) for sequence in running if len(sequence.hidden)]
        rows = [r for r in rows if r.last > r.first]
        try:
            for part in self._parts(rows):
                self._draft(part)
        except ExpertServeError:  # the target will meet it too, if it needs the same, and says so
            self.failed += 1
            for r in rows:
                self._filled[r.sequence.cells[r.first - 1 : r.last - 1]] = False
                r.sequence.hidden, r.sequence.drafts = r.sequence.hidden[:0], []

    def _rows_of(self, sequence: Sequence) -> _Rows:
        """Hidden state i goes with token i + 1, as far as that is known."""
        first = sequence.evaluated - len(sequence.hidden) + 1
        return _Rows(sequence, first, min(sequence.evaluated + 1, sequence.num_tokens))

    def _parts(self, rows: list[_Rows]) -> list[list[_Rows]]:
        """Batches of at most as many rows as a forward takes."""
        parts: list[list[_Rows]] = [[]]
        for part in rows:
            if sum(r.last - r.first for r in parts[-1]) + part.last - part.first > self._forward.max_rows:
                parts.append([])
            parts[-1].append(part)
        return [part for part in parts if part]

    def _draft(self, rows: list[_Rows]) -> None:
        """One step over the rows whose hidden states are the target's, then one a token over guessed ones."""
        hidden = np.concatenate([r.sequence.hidden[: r.last - r.first] for r in rows])
        for r in rows:
            self._filled[r.sequence.cells[r.first - 1 : r.last - 1]] = True
            r.sequence.hidden = r.sequence.hidden[r.last - r.first :].copy()
        wanted = np.array([r.sequence.decoding and self._room(r.sequence) > 0 for r in rows])
        ends = (np.cumsum([r.last - r.first for r in rows]) - 1)[wanted]
        logits = self._forward.draft(self._batch(rows, ends), hidden)
        drafting = [r.sequence for r, want in zip(rows, wanted, strict=True) if want]
        states = self._forward.hidden[ends].copy()
        self._take(drafting, logits)
        scratch = self._scratch[: len(drafting)]
        for depth in range(1, self._tokens):
            going = [i for i, s in enumerate(drafting) if self._room(s) > depth]
            if not going:
                return
            drafting, scratch = [drafting[i] for i in going], scratch[going]
            logits = self._forward.draft(self._chain_batch(drafting, scratch[:, :depth]), states[going])
            states = self._forward.hidden[: len(drafting)].copy()
            self._take(drafting, logits)

    def _room(self, sequence: Sequence) -> int:
        """How many drafts could be of use: one token comes from the target in any case."""
        return min(self._tokens, sequence.max_new - sequence.generated - 1)

    def _take(self, sequences: list[Sequence], logits: NDArray[np.float32]) -> None:
        for sequence, row in zip(sequences, logits, strict=True):
            sequence.drafts.append(int(row.argmax()))

    def _batch(self, rows: list[_Rows], outputs: NDArray[np.int64]) -> Batch:
        visible = [r.sequence.cells[: r.last - 1] for r in rows]
        n_kv = self._kv.bucket(max(int(cells.max()) for cells in visible) + 1)
        mask = attention_mask([(c, r.first - 1) for c, r in zip(visible, rows, strict=True)], n_kv)
        mask[:, ~self._filled[:n_kv]] = -np.inf
        decoding = all(r.sequence.decoding for r in rows)
        return Batch(
            tokens=np.concatenate([r.sequence.tokens[r.first : r.last] for r in rows]),
            positions=np.concatenate([np.arange(r.first, r.last, dtype=np.int32) for r in rows]),
            cells=np.concatenate([c[r.first - 1 :] for c, r in zip(visible, rows, strict=True)]),
            mask=mask,
            outputs=outputs.astype(np.int32),
            decode_rows=len(mask) if decoding else 0,
        )

    def _chain_batch(self, sequences: list[Sequence], own: NDArray[np.int64]) -> Batch:
        """One row a sequence: its last draft, which sees what the target has seen and the drafts before it.

        `own` are the scratch cells of each sequence's drafts, [sequences, drafts so far].
        """
        seen: list[Cells] = [np.concatenate([s.cells, cells]) for s, cells in zip(sequences, own, strict=True)]
        n_kv = bucket_length(int(own.max()) + 1, self._forward.kv_cells)
        mask = attention_mask([(cells, len(cells) - 1) for cells in seen], n_kv)
        mask[:, : self._kv.capacity][:, ~self._filled] = -np.inf
        return Batch(
            tokens=np.array([s.drafts[-1] for s in sequences], np.int32),
            positions=np.array([s.num_tokens + own.shape[1] - 1 for s in sequences], np.int32),
            cells=own[:, -1].copy(),
            mask=mask,
            outputs=np.arange(len(sequences), dtype=np.int32),
            decode_rows=len(sequences),
        )


def scratch_cells(parallel: int, tokens: int) -> int:
    """Cells after the target's that chains of drafts write to, in whole buckets."""
    return -(-parallel * max(0, tokens - 1) // BUCKET) * BUCKET
