"""Lays the rows of a plan out as one Batch.

It owns the mask's buffer, which is reused from step to step (a Batch is valid only during its forward). The attention
length covers the cells that this batch sees, not all cells in use, so prefixes cached at higher cells cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from expertserve.engine.scheduler import Work
from expertserve.kv.cache import KVCells, attention_mask
from expertserve.models.batch import Batch


class BatchBuilder:
    """Builds the Batch of each step."""

    def __init__(self, kv: KVCells) -> None:
        self._kv = kv
        self._mask = np.empty(0, np.float16)

    def build(self, works: SequenceOf[Work]) -> Batch:
        """The rows of `works` in order; decode works come first."""
        visible = [work.sequence.cells[: work.end] for work in works]
        new = [cells[work.start :] for cells, work in zip(visible, works, strict=True)]
        outputs: list[int] = []
        runs: list[tuple[int, int, int, int]] = []
        row = 0
        for work in works:
            runs.extend(work.sequence.state.runs(work.start, row))
            shift = row - work.start
            outputs.extend(range(work.first_output + shift, work.last_output + shift))
            row += work.end - work.start
        n_kv = self._kv.bucket(max(int(cells.max()) for cells in visible) + 1)
        if self._mask.size < row * n_kv:
            self._mask = np.empty(row * n_kv, np.float16)
        mask = self._mask[: row * n_kv].reshape(row, n_kv)
        return Batch(
            tokens=np.concatenate([work.sequence.rows(work.start, work.end) for work in works]),
            positions=np.concatenate([np.arange(work.start, work.end, dtype=np.int32) for work in works]),
            cells=np.concatenate(new),
            mask=attention_mask([(c, work.start) for c, work in zip(visible, works, strict=True)], n_kv, mask),
            outputs=np.array(outputs, np.int32),
            decode_rows=sum(work.end - work.start for work in works if work.decode),
            runs=np.array(runs, np.int32).reshape(-1, 4),
        )
