"""The vocabulary of a GGUF: its tokens, what kind each is, and the ids with a role.

Owns reading `tokenizer.ggml.*` with llama.cpp's defaults and corrections: tokens that end a generation are known by
their spelling, and some are of another kind than the file says. Does not encode or decode. A vocabulary is immutable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from expertserve.errors import GGUFError, UnsupportedModelError
from expertserve.text.pretokenizers import PRETOKENIZERS, PreTokenizer


class MetadataSource(Protocol):
    """What text needs of a GGUF file."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...


class TokenKind(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# The spellings llama.cpp takes for tokens that end a generation.
_END_OF_GENERATION = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> [e~[ <|ifm|im_end|> "
    "<|plamo:eos|> <\uff5cend\u2581of\u2581sentence\uff5c>".split()
)
# Roles a token has by its spelling where the file gives the role to none; the first in the vocabulary is taken.
_BY_SPELLING: dict[str, frozenset[str]] = {
    role: frozenset(spellings.split())
    for role, spellings in {
        "eot": "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> [EOT] "
        "<\uff5cend\u2581of\u2581sentence\uff5c> <end_of_utterance>",
        "eom": "<|eom_id|>",
        "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> <PRE> \u2581<PRE> "
        "<|code_prefix|> <|prefix|> <|plamo:fim_prefix|>",
        "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c> <SUF> \u2581<SUF> "
        "<|code_suffix|> <|suffix|> <|plamo:fim_suffix|>",
        "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> <MID> \u2581<MID> "
        "<|code_middle|> <|middle|> <|plamo:fim_middle|>",
        "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
        "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
        "fim_sep": "<|file_sep|> <|plamo:file_separator|>",
    }.items()
}
_ALWAYS_SHOWN = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})
_ROLE_KEYS: tuple[tuple[str, str], ...] = (
    ("bos", "bos_token_id"),
    ("eos", "eos_token_id"),
    ("eot", "eot_token_id"),
    ("eom", "eom_token_id"),
    ("unk", "unknown_token_id"),
    ("pad", "padding_token_id"),
    ("fim_pre", "fim_pre_token_id"),
    ("fim_suf", "fim_suf_token_id"),
    ("fim_mid", "fim_mid_token_id"),
    ("fim_pad", "fim_pad_token_id"),
    ("fim_rep", "fim_rep_token_id"),
    ("fim_sep", "fim_sep_token_id"),
    ("fim_pre", "prefix_token_id"),
    ("fim_suf", "suffix_token_id"),
    ("fim_mid", "middle_token_id"),
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens and rules of one model's text.

    Attributes:
        tokens: text of every id, in the alphabet of the model.
        kinds: kind of every id.
        ids: id of every text.
        roles: ids by role: bos, eos, eot, eom, unk, pad, fim_*.
        end_of_generation: ids that end a generation.
        add_bos, add_eos: whether encoding adds them when asked for special tokens.
        pretokenizer: of byte-pair vocabularies; None means merging by score.
        merges: "left right" lines of byte-pair vocabularies.
        scores: score of every id for merging by score.
        space_prefix: a space goes before text that starts or follows a special token.
        strip_after: special ids that swallow the white space after them.
    """

    tokens: tuple[str, ...]
    kinds: tuple[TokenKind, ...]
    ids: Mapping[str, int]
    roles: Mapping[str, int]
    end_of_generation: frozenset[int]
    add_bos: bool
    add_eos: bool
    pretokenizer: PreTokenizer | None
    merges: Sequence[str]
    scores: Sequence[float]
    space_prefix: bool
    strip_after: frozenset[int]


def read_vocabulary(file: MetadataSource) -> Vocabulary:
    """Reads the vocabulary; raises UnsupportedModelError by name, GGUFError where the metadata contradicts itself."""
    metadata = file.metadata
    pretokenizer = _pretokenizer(metadata)
    tokens = tuple(text or f"[EMPTY_{id_}]" for id_, text in enumerate(_list(metadata, "tokens")))
    ids = {text: id_ for id_, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(text for id_, text in enumerate(tokens) if ids[text] != id_)
        raise GGUFError(f"tokenizer.ggml.tokens lists {twice!r} twice")
    kinds = _kinds(metadata, len(tokens))
    roles = _roles(metadata, len(tokens), pretokenizer)
    end_of_generation = _correct(ids, kinds, roles)
    merged_by_score = pretokenizer is None
    vocabulary = Vocabulary(
        tokens=tokens,
        kinds=tuple(kinds),
        ids=ids,
        roles=roles,
        end_of_generation=frozenset(end_of_generation),
        add_bos=_flag(metadata, "add_bos_token", merged_by_score or (pretokenizer is not None and pretokenizer.add_bos))
        or (pretokenizer is not None and pretokenizer.force_bos),
        add_eos=_flag(metadata, "add_eos_token", False),
        pretokenizer=pretokenizer,
        merges=() if merged_by_score else _merges(metadata),
        scores=_scores(metadata, len(tokens)) if merged_by_score else (),
        space_prefix=_flag(metadata, "add_space_prefix", merged_by_score),
        strip_after=_strip_after(metadata, ids, kinds),
    )
    for name, added in (("bos", vocabulary.add_bos), ("eos", vocabulary.add_eos)):
        if added and name not in roles:
            raise GGUFError(f"the tokenizer adds a {name.upper()} token but tokenizer.ggml.{name}_token_id is missing")
    return vocabulary


def _pretokenizer(metadata: Mapping[str, Any]) -> PreTokenizer | None:
    model = metadata.get("tokenizer.ggml.model")
    name = metadata.get("tokenizer.ggml.pre") or "default"
    if model == "llama":
        return None
    if model == "gemma4":
        return PRETOKENIZERS["gemma4"]
    if model != "gpt2":
        raise UnsupportedModelError(f"tokenizer model {model!r} is not served; supported are gpt2, llama and gemma4")
    if name not in PRETOKENIZERS:
        supported = ", ".join(sorted(PRETOKENIZERS))
        raise UnsupportedModelError(f"pre-tokenizer {name!r} is not served; supported are {supported}")
    return PRETOKENIZERS[name]


def _list(metadata: Mapping[str, Any], key: str, of: frozenset[type] = frozenset({str})) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if values is None:
        raise GGUFError(f"tokenizer.ggml.{key} is missing; convert the model again")
    if not isinstance(values, list) or not {*map(type, values)} <= of:
        raise GGUFError(f"tokenizer.ggml.{key} has an element of the wrong type")
    return values


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, bool):
        raise GGUFError(f"tokenizer.ggml.{key} is {value!r}, not a boolean")
    return value


def _kinds(metadata: Mapping[str, Any], count: int) -> list[TokenKind]:
    if "tokenizer.ggml.token_type" not in metadata:
        return [TokenKind.NORMAL] * count
    known = {int(kind): kind for kind in TokenKind}
    values = _list(metadata, "token_type", frozenset({int}))
    if len(values) < count:
        raise GGUFError(f"tokenizer.ggml.token_type has {len(values)} entries for {count} tokens")
    return [known.get(value, TokenKind.UNDEFINED) for value in values[:count]]


def _scores(metadata: Mapping[str, Any], count: int) -> list[float]:
    if "tokenizer.ggml.scores" not in metadata:
        return [0.0] * count
    values = _list(metadata, "scores", frozenset({int, float}))
    if len(values) < count:
        raise GGUFError(f"tokenizer.ggml.scores has {len(values)} entries for {count} tokens")
    return [float(value) for value in values]


def _merges(metadata: Mapping[str, Any]) -> list[str]:
    if metadata.get("tokenizer.ggml.pre") == "kimi-k2" and "tokenizer.ggml.merges" not in metadata:
        return []
    return _list(metadata, "merges")


def _roles(metadata: Mapping[str, Any], count: int, pretokenizer: PreTokenizer | None) -> dict[str, int]:
    """Returns ids by role: llama.cpp's defaults, replaced by what the file says where that lies in the vocabulary."""
    roles: dict[str, int] = {}
    if pretokenizer is None:
        roles = {"bos": 1, "eos": 2, "unk": 0}
    elif metadata.get("tokenizer.ggml.model") != "gemma4":
        roles = {"bos": 11, "eos": 11} if pretokenizer.default_bos else {"eos": 11}
    roles = {role: id_ for role, id_ in roles.items() if id_ < count}
    for role, key in _ROLE_KEYS:
        id_ = metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(id_, int) and 0 <= id_ < count:
            roles[role] = id_
    return roles


def _correct(ids: Mapping[str, int], kinds: list[TokenKind], roles: dict[str, int]) -> set[int]:
    """Fills in roles and corrects kinds by spelling, as llama.cpp does; returns the ids that end a generation."""
    for role, spellings in _BY_SPELLING.items():
        if role not in roles:
            found = [ids[text] for text in spellings if text in ids]
            if found:
                roles[role] = min(found)
                kinds[roles[role]] = TokenKind.CONTROL
    ending = {roles[role] for role in ("fim_pad", "fim_rep", "fim_sep") if role in roles}
    for text in _END_OF_GENERATION & ids.keys():
        ending.add(ids[text])
        kinds[ids[text]] = TokenKind.CONTROL
    for text in _ALWAYS_SHOWN & ids.keys():
        kinds[ids[text]] = TokenKind.USER_DEFINED
    ending |= {roles[role] for role in ("eos", "eot", "eom") if role in roles}

    def ends(*texts: str) -> bool:
        return any(ids.get(text) in ending for text in texts)

    # Where messages end with a token of their own, <|end|> only closes a part of one.
    if ends("<|end|>") and ends("<|call|>", "<|calls|>") and ends("<|return|>", "<|flush|>"):
        ending.discard(ids["<|end|>"])
        kinds[ids["<|end|>"]] = TokenKind.USER_DEFINED
    if ends("</s>") and ends("<|tool_response>", "<|plamo:eos|>"):
        ending.discard(ids["</s>"])
        kinds[ids["</s>"]] = TokenKind.NORMAL
    return ending


def _strip_after(metadata: Mapping[str, Any], ids: Mapping[str, int], kinds: Sequence[TokenKind]) -> frozenset[int]:
    """Returns the special tokens of Phi-3 models, which swallow white space; only the model's name tells."""
    name = str(metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    special = {id_ for id_, kind in enumerate(kinds) if kind in SPECIAL}
    special |= {ids[text] for text in ("</s>",) if text in ids}
    return frozenset(special - {ids[text] for text in ("<unk>", "<s>", "<|endoftext|>") if text in ids})


SPECIAL = frozenset({TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN})
