"""The rows of one forward: the plain value that the engine hands to a model, and how far back a layer sees of them.

It knows no device and no model. The invariant: every row writes the K and V of its token into its own cell, all rows
write before any row attends (so a row may see cells that an earlier row of the same batch writes), and a row sees
exactly the cells whose mask entry is 0. `outputs` may be empty: a prefill chunk that does not end its prompt needs no
logits. The arrays belong to the engine and are valid only during the call.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back a layer sees.

    Attributes:
        tokens: itself and the tokens before it, so many in all; with `chunked` those of its own stretch of so many.
    """

    tokens: int
    chunked: bool = False

    def includes(self, position: NDArray[np.int32], other: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Whether a token at `position` reaches one at `other`, which is not after it."""
        inside: NDArray[np.bool_]
        if self.chunked:
            inside = position // self.tokens == other // self.tokens
        else:
            inside = position - other < self.tokens
        return inside


def _no_runs() -> NDArray[np.int32]:
    return np.empty((0, 4), np.int32)


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch; T rows, decode rows first.

    Attributes:
        tokens: token id of each row, [T].
        positions: position of each row's token in its sequence, [T].
        cells: KV cell each row writes, [T].
        mask: 0 where a row sees a cell, -inf where not, [T, n_kv].
        outputs: rows whose logits are returned, ascending, [n].
        decode_rows: rows that belong to decode; the others are prefill.
        runs: for a model with recurrent state, the stretches of rows that belong to one sequence, in order: source slot
            of the state (-1 for none yet), target slot, first row, row after the last, [runs, 4].
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    cells: NDArray[np.int64]
    mask: NDArray[np.float16]
    outputs: NDArray[np.int32]
    decode_rows: int
    runs: NDArray[np.int32] = field(default_factory=_no_runs)
