"""A vocabulary of any size for a synthetic model: bytes, then letters joined, then the tokens of a chat.

Text goes to ids and back without loss. It is written as byte pairs (`gpt2` in GGUF's terms) or as SentencePiece
(`llama`); the chat is ChatML.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import gguf

from expertserve.errors import ConfigError
from expertserve.text.byte_pairs import byte_alphabet
from expertserve.text.vocabulary import TokenKind

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def word_ids(size: int) -> range:
    """The ids that are neither bytes nor for control."""
    return range(259, size - len(_CONTROL))


def add_vocabulary(writer: gguf.GGUFWriter, size: int, *, pre: str, score_merged: bool) -> None:
    """Writes `tokenizer.*` with exactly `size` tokens, the last of which are for control.

    Raises:
        ConfigError: there are not so many different joined letters.
    """
    if score_merged:
        space, base = "\u2581", ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        kinds = [TokenKind.UNKNOWN, TokenKind.CONTROL, TokenKind.CONTROL, *[TokenKind.BYTE] * 256]
        first = [*_LETTERS, space]
    else:
        alphabet = byte_alphabet()
        space, base, first = alphabet[ord(" ")], [alphabet[byte] for byte in range(256)], []
        kinds = [TokenKind.NORMAL] * 256
    room = size - len(base) - len(first) - len(_CONTROL)
    pairs = list(islice(_joined(space), max(room, 0)))
    if room < 0 or len(pairs) < room:
        raise ConfigError(f"a synthetic vocabulary has between 512 and 400000 tokens, not {size}")
    pieces = [a + b for a, b in pairs] + first
    writer.add_token_list([*base, *pieces, *_CONTROL])
    writer.add_token_types([*kinds, *[TokenKind.NORMAL] * len(pieces), *[TokenKind.CONTROL] * len(_CONTROL)])
    if score_merged:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores([0.0] * len(base) + [-float(n) for n in range(size - len(base))])
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([f"{a} {b}" for a, b in pairs])
    writer.add_bos_token_id(1 if score_merged else size - 3)
    writer.add_eos_token_id(size - 1)
    writer.add_add_bos_token(score_merged)
    writer.add_chat_template(CHAT_TEMPLATE)


def _joined(space: str) -> Iterator[tuple[str, str]]:
    """Pairs to join, frequent ones first, each of parts that came before: two letters, then two pairs."""
    ranked = sorted((i + j, a, b) for i, a in enumerate(space + _LETTERS) for j, b in enumerate(_LETTERS))
    yield from ((a, b) for _, a, b in ranked)
    halves = [a + b for _, a, b in ranked]
    inner = [half for half in halves if half[0] != space]
    yield from ((a, b) for rank in range(len(halves)) for a, b in _shell(halves, inner, rank))


def _shell(halves: list[str], inner: list[str], rank: int) -> Iterator[tuple[str, str]]:
    """Pairs of which the less frequent half is at `rank`."""
    yield from ((halves[rank], b) for b in inner[: rank + 1])
    if rank < len(inner):
        yield from ((a, inner[rank]) for a in halves[:rank])
