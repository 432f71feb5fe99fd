"""What the engine needs of a model and of a tokenizer, as structural types.

Any object with these members will do: the real forward and tokenizer, or the fakes of the tests. The engine calls a
forward only from its own thread, and one sequence's text stream only from there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from expertserve.models.batch import Batch


class ForwardPass(Protocol):
    """One forward of a model over one batch of at most `max_rows` rows and `max_outputs` rows of logits.

    The logits, [outputs, vocab], are valid until the next call. `hidden` and `draft` are asked for only by an engine
    that drafts.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_rows(self) -> int: ...
    @property
    def max_outputs(self) -> int: ...
    @property
    def kv_cells(self) -> int: ...
    @property
    def state_slots(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def hidden(self) -> NDArray[np.float32]: ...
    def __call__(self, batch: Batch, /) -> NDArray[np.float32]: ...
    def draft(self, batch: Batch, hidden: NDArray[np.float32], /) -> NDArray[np.float32]: ...


class TextStream(Protocol):
    """Turns token ids into text as they come, never splitting a character."""

    def push(self, token_id: int, /) -> str: ...
    def flush(self) -> str: ...


class ConstraintState(Protocol):
    """Which tokens may come next in one text, [vocab]; `ended` once nothing may."""

    @property
    def ended(self) -> bool: ...
    def mask(self) -> NDArray[np.bool_]: ...
    def accept(self, token_id: int, /) -> None: ...


class Constraint(Protocol):
    """What a text must look like."""

    def start(self) -> ConstraintState: ...


class TextSource(Protocol):
    """The part of a tokenizer that the engine uses."""

    @property
    def eog_ids(self) -> Collection[int]: ...
    def stream(self, *, marks: Mapping[int, str]) -> TextStream: ...
