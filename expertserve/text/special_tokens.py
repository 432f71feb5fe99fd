"""Cutting text at the special tokens spelt out in it.

Owns which spellings are recognised and in which order: the longest token takes all its occurrences first, then the
next, as in llama.cpp, which is not the same as the leftmost match. Does not encode what lies between.
"""

from __future__ import annotations

from expertserve.text.vocabulary import SPECIAL, TokenKind, Vocabulary

C_SPACES = " \t\n\v\f\r"


class SpecialTokens:
    """The special tokens of a vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        found = [id_ for id_, kind in enumerate(vocabulary.kinds) if kind in SPECIAL]
        found.sort(key=lambda id_: -len(vocabulary.tokens[id_].encode()))
        self._all = [(vocabulary.tokens[id_], id_) for id_ in found]
        # Control tokens in text are not meant as such unless the caller says so; user-defined ones always are.
        self._user_defined = [
            (vocabulary.tokens[id_], id_) for id_ in found if vocabulary.kinds[id_] is TokenKind.USER_DEFINED
        ]
        self._strip_after = vocabulary.strip_after

    def split(self, text: str, *, parse_special: bool) -> list[str | int]:
        """Returns the pieces of `text` in order: ids of special tokens, and the non-empty text between them."""
        pieces: list[str | int] = [text] if text else []
        present = set(text)
        for spelling, token in self._all if parse_special else self._user_defined:
            if spelling[0] in present and spelling in text:
                pieces = [part for piece in pieces for part in self._cut(piece, spelling, token)]
        return pieces

    def _cut(self, piece: str | int, spelling: str, token: int) -> list[str | int]:
        if isinstance(piece, int) or spelling not in piece:
            return [piece]
        cut: list[str | int] = []
        for index, part in enumerate(piece.split(spelling)):
            if index:
                cut.append(token)
                if token in self._strip_after:
                    part = part.lstrip(C_SPACES)
            if part:
                cut.append(part)
        return cut
