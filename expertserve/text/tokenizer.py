"""Text to token ids and back, by the vocabulary a GGUF carries.

Owns the public face of tokenisation: special tokens, BOS and EOS, the space prefix, exact bytes of a token, streaming.
The merging itself is byte_pairs.py or sentencepiece.py. Ids equal llama.cpp's `llama_tokenize` on the same file. A
tokenizer is immutable but for its caches, which are safe to share between threads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from expertserve.errors import RequestError
from expertserve.text.byte_pairs import BytePairEncoder, byte_alphabet
from expertserve.text.floor import TokenFloor
from expertserve.text.sentencepiece import ScoreMerger
from expertserve.text.special_tokens import SpecialTokens
from expertserve.text.stream import NO_MARKS, StreamDecoder
from expertserve.text.vocabulary import SPECIAL, MetadataSource, TokenKind, Vocabulary, read_vocabulary

_SURROGATES = re.compile("[\ud800-\udfff]")
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_HIDDEN = frozenset({TokenKind.CONTROL, TokenKind.UNKNOWN})
_BYTES = {char: byte for byte, char in byte_alphabet().items()}


class Tokenizer:
    """Encodes and decodes one model's text.

    Attributes:
        vocab_size: number of tokens in the file.
        bos_id, eos_id: ids, or None where the model has none.
        eog_ids: ids that end a generation.
        add_bos, add_eos: whether `encode` adds them when asked for special tokens.
        special_texts: spelling of the bos, eos, unk and pad tokens there are, by that name.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._special = SpecialTokens(vocabulary)
        self._model: BytePairEncoder | ScoreMerger
        if vocabulary.pretokenizer is None:
            self._model = ScoreMerger(vocabulary.ids, vocabulary.scores)
        else:
            self._model = BytePairEncoder(vocabulary.ids, vocabulary.merges, vocabulary.pretokenizer)
        self._floor = TokenFloor(vocabulary)
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id = vocabulary.roles.get("bos")
        self.eos_id = vocabulary.roles.get("eos")
        self.eog_ids = vocabulary.end_of_generation
        self.add_bos = vocabulary.add_bos
        self.add_eos = vocabulary.add_eos
        self.special_texts = {
            role: vocabulary.tokens[vocabulary.roles[role]]
            for role in ("bos", "eos", "unk", "pad")
            if role in vocabulary.roles
        }

    @classmethod
    def from_gguf(cls, file: MetadataSource) -> Tokenizer:
        """Builds the tokenizer a GGUF describes; UnsupportedModelError where its kind is not served."""
        return cls(read_vocabulary(file))

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Returns the tokens of `text`.

        Args:
            text: what to encode; halves of surrogate pairs count as U+FFFD.
            add_special: add BOS and EOS where the model wants them.
            parse_special: recognise control tokens spelt out in the text. Off for text from outside.
        """
        text = _whole(text)
        output: list[int] = []
        if add_special and self.add_bos and self.bos_id is not None:
            output.append(self.bos_id)
        score_merged = self._vocabulary.pretokenizer is None
        after_special = True
        for piece in self._special.split(text, parse_special=parse_special):
            if isinstance(piece, int):
                output.append(piece)
                after_special = True
                continue
            if score_merged:
                prefix = " " if self._vocabulary.space_prefix and after_special else ""
                piece = (prefix + piece).replace(" ", "\u2581")
                after_special = False
            output += self._model.encode(piece)
        if add_special and self.add_eos and self.eos_id is not None:
            output.append(self.eos_id)
        return output

    def min_tokens(self, text: str) -> int:
        """Returns a number of tokens that `encode` cannot go below, hundreds of times faster than encoding."""
        return self._floor(_whole(text).encode())

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Returns the text of a whole sequence, the inverse of `encode`.

        The space that encoding put before the text is taken off again; a continuation is decoded by `stream`, which
        keeps it. Bytes that are no UTF-8 become U+FFFD.
        """
        bytes_of = self._shown if skip_special else self.token_bytes
        ids = list(ids)
        if self._vocabulary.space_prefix:
            start = 0
            while skip_special and start < len(ids) and self._kind(ids[start]) in _HIDDEN:
                start += 1
            pieces = [bytes_of(id_) for id_ in ids[start:]]
            if pieces:
                pieces[0] = pieces[0].removeprefix(b" ")
        else:
            pieces = [bytes_of(id_) for id_ in ids]
        return b"".join(pieces).decode("utf-8", "replace")

    def stream(self, *, skip_special: bool = True, marks: Mapping[int, str] = NO_MARKS) -> StreamDecoder:
        """Returns a decoder for tokens as they are generated; `marks` as in StreamDecoder."""
        return StreamDecoder(self._shown if skip_special else self.token_bytes, marks)

    def special_id(self, text: str) -> int | None:
        """Returns the id of the special token spelt so, or None where there is none."""
        id_ = self._vocabulary.ids.get(text)
        return id_ if id_ is not None and self._vocabulary.kinds[id_] in SPECIAL else None

    def token_bytes(self, id: int) -> bytes:
        """Returns exactly the bytes a token stands for; they need not be whole characters."""
        piece = self._bytes.get(id)
        if piece is None:
            piece = self._bytes[id] = self._read_bytes(id)
        return piece

    def token_text(self, id: int) -> str:
        """Returns a token's text for display; bytes that are no UTF-8 become U+FFFD."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def is_special(self, id: int) -> bool:
        """Returns whether a token is a control or unknown token, which text for users does not show."""
        return self._kind(id) in _HIDDEN

    def _shown(self, id: int) -> bytes:
        return b"" if self._kind(id) in _HIDDEN else self.token_bytes(id)

    def _kind(self, id: int) -> TokenKind:
        if not 0 <= id < self.vocab_size:
            raise RequestError(f"token id {id} is not in the vocabulary; ids are 0 to {self.vocab_size - 1}")
        return self._vocabulary.kinds[id]

    def _read_bytes(self, id: int) -> bytes:
        kind = self._kind(id)
        text = self._vocabulary.tokens[id]
        if kind in SPECIAL:
            return text.encode()
        if kind is TokenKind.BYTE:
            byte = _BYTE_TOKEN.fullmatch(text)
            return bytes([int(byte[1], 16)]) if byte else text.encode()
        if kind is not TokenKind.NORMAL:
            return b""
        pretokenizer = self._vocabulary.pretokenizer
        if pretokenizer is None or not pretokenizer.byte_level:
            return text.replace("\u2581", " ").encode()
        return b"".join(bytes([_BYTES[char]]) if char in _BYTES else char.encode() for char in text)


def _whole(text: str) -> str:
    """Returns the text with halves of surrogate pairs replaced."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)
