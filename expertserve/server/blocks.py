"""An answer as a sequence of blocks: what Anthropic's and OpenAI's newer API have in common.

Owns when a block begins and ends: with each change of part and each call. How that is written is for the subclasses.
One choice only, as both APIs have it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

from expertserve.engine.request import Event, FinishEvent
from expertserve.server.chat import pieces_of
from expertserve.server.generation import Generation
from expertserve.text.answer import AnswerParser, Piece


def ordered_parts(pieces: list[Piece]) -> list[Piece]:
    """Pieces that continue each other joined: one a block."""
    blocks: list[Piece] = []
    for piece in pieces:
        last = blocks[-1] if blocks else None
        if last is not None and last.part == piece.part and piece.name is None:
            blocks[-1] = replace(last, text=last.text + piece.text)
        else:
            blocks.append(piece)
    return blocks


class BlockStream(ABC):
    """Writes the events of one generation as named server-sent events."""

    def __init__(self, parser: AnswerParser) -> None:
        self.parser = parser
        self.index = -1  # of the block that is open
        self._open: Piece | None = None

    def chunk(self, index: int, event: Event, generation: Generation) -> bytes:
        data = b""
        for piece in pieces_of(event, self.parser):
            if self._open is None or self._open.part != piece.part or piece.name is not None:
                data += self._end()
                self.index += 1
                self._open = piece
                data += self.begin_block(piece)
            elif self._open is not None:
                self._open = replace(self._open, text=self._open.text + piece.text)
            data += self.continue_block(piece) if piece.text else b""
        return data + (self._end() if isinstance(event, FinishEvent) else b"")

    def _end(self) -> bytes:
        if self._open is None:
            return b""
        block, self._open = self._open, None
        return self.end_block(block)

    @abstractmethod
    def begin_block(self, piece: Piece) -> bytes: ...
    @abstractmethod
    def continue_block(self, piece: Piece) -> bytes: ...
    @abstractmethod
    def end_block(self, block: Piece) -> bytes:
        """`block` has all of its text."""


class BlockTexts:
    """Gathers the events of one generation."""

    def __init__(self, parser: AnswerParser) -> None:
        self.parser = parser
        self._pieces: list[Piece] = []

    def add(self, index: int, event: Event) -> None:
        self._pieces += pieces_of(event, self.parser)

    def blocks(self) -> list[Piece]:
        return ordered_parts(self._pieces)
