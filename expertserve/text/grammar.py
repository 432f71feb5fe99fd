"""What a text must look like, as a mask over the tokens that may come next.

Owns compiling a JSON schema, a regular expression, a list of choices or a grammar (GBNF or Lark) with llguidance, and
following one text through it. Chooses no token. The invariant: as long as only tokens of the mask are accepted, the
bytes so far can be completed to a text of the grammar, and the mask is never empty.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, Protocol

import llguidance
import numpy as np
from numpy.typing import NDArray

from expertserve.errors import RequestError

MAX_GRAMMAR_LENGTH = 1 << 18  # characters; compiling takes up to microseconds for each
MAX_RULES_LENGTH = 1 << 16  # of written rules and expressions, where the time may grow with the square
CACHED_GRAMMARS = 32
# llguidance follows rules that refer to rules by recursion, up to 10 KiB a rule; a full stack ends the process.
_STACK_BYTES = 512 << 20
_stack_size = threading.Lock()
# The default takes white space without end, which is what small models write for ever.
JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x09]{1,20}"}

GrammarKind = Literal["json_schema", "regex", "choice", "gbnf", "lark"]


class TokenSource(Protocol):
    """The part of a tokenizer that grammars use."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eog_ids(self) -> Collection[int]: ...
    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]: ...
    def token_bytes(self, token_id: int, /) -> bytes: ...
    def is_special(self, token_id: int, /) -> bool: ...


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as it was sent: `text` is the schema's JSON, the expression, a JSON list of choices or the rules.

    Attributes:
        structure: the grammar that Lark rules call `@structure`.
    """

    kind: GrammarKind
    text: str
    structure: GrammarSource | None = None


def schema_source(schema: Any) -> GrammarSource:
    """Of a JSON schema as parsed; properties come in the schema's order."""
    return GrammarSource("json_schema", json.dumps(schema))


class GrammarCompiler:
    """Compiles grammars for one tokenizer; safe to use from several threads."""

    def __init__(self, tokenizer: TokenSource) -> None:
        self._tokenizer = tokenizer
        self._compiled = lru_cache(CACHED_GRAMMARS)(self._compile)

    def compile(self, source: GrammarSource, param: str) -> Grammar:
        """The grammar of `source`, which the request gave as `param`.

        Raises:
            RequestError: it is none, or asks for what llguidance does not have.
        """
        most = MAX_RULES_LENGTH if source.kind in ("gbnf", "regex") else MAX_GRAMMAR_LENGTH
        if len(source.text) > most:
            raise RequestError(f"'{param}' has {len(source.text)} characters; at most {most} are compiled", param=param)
        try:
            return self._compiled(source)
        except RequestError as error:
            raise RequestError(f"'{param}' cannot be used: {error}", param=param, code="invalid_grammar") from None
        except (ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())[:300] or "it is nested too deeply"
            raise RequestError(f"'{param}' cannot be used: {reason}", param=param, code="invalid_grammar") from None

    def _compile(self, source: GrammarSource) -> Grammar:
        vocabulary = self._vocabulary
        matcher = _on_deep_stack(lambda: llguidance.LLMatcher(vocabulary, _rules(source), log_level=0))
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        grammar = Grammar(matcher, self._tokenizer.vocab_size)
        grammar.start().mask()  # fails where no text follows the grammar
        return grammar

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        ends = sorted(self._tokenizer.eog_ids)
        wrapped = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, ends))
        return llguidance.LLTokenizer(wrapped, n_vocab=self._tokenizer.vocab_size, eos_token=ends)


def _on_deep_stack(compile: Callable[[], llguidance.LLMatcher]) -> llguidance.LLMatcher:
    """Runs in a thread with room for every rule of the longest grammar to refer to the next; room is no memory."""
    with _stack_size:
        before = threading.stack_size(_STACK_BYTES)
        try:
            pool = ThreadPoolExecutor(1, "grammar")
            compiled = pool.submit(compile)  # starts the thread
        finally:
            threading.stack_size(before)
    with pool:
        return compiled.result()


def _rules(source: GrammarSource) -> str:
    """The grammar in a form that llguidance compiles."""
    if source.structure is not None:
        (inner,) = json.loads(_as_json(source.structure))["grammars"]
        return json.dumps({"grammars": [{"lark_grammar": source.text}, {**inner, "name": "structure"}]})
    if source.kind == "json_schema":
        return llguidance.LLMatcher.grammar_from_json_schema(source.text, defaults=JSON_OPTIONS)
    return llguidance.grammar_from(source.kind, source.text)


def _as_json(source: GrammarSource) -> str:
    rules = _rules(source)
    return rules if source.kind in ("json_schema", "regex") else json.dumps({"grammars": [{"lark_grammar": rules}]})


class _Vocabulary:
    """A tokenizer in the form that llguidance reads."""

    bos_token_id = None

    def __init__(self, tokenizer: TokenSource, ends: list[int]) -> None:
        ids = range(tokenizer.vocab_size)
        self._tokenizer = tokenizer
        self.eos_token_id = ends[0]
        self.tokens = [tokenizer.token_bytes(id) for id in ids]
        self.special_token_ids = [id for id in ids if tokenizer.is_special(id) or id in ends]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, parse_special=False)


class Grammar:
    """A compiled grammar; each text that follows it has a state of its own."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def start(self) -> GrammarState:
        return GrammarState(self._matcher.deep_copy(), self._vocab_size)


class GrammarState:
    """How far one text has come in its grammar. One thread at a time."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._bits = np.zeros(-(-vocab_size // 32), np.int32)

    @property
    def ended(self) -> bool:
        """Whether the text is complete and nothing can follow it."""
        return self._matcher.is_stopped()

    def mask(self) -> NDArray[np.bool_]:
        """Which tokens may come next, [vocab]; those that end the text are among them where it may end.

        Raises:
            RequestError: no text follows the grammar, or it needs more work for a token than llguidance allows.
        """
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        return np.unpackbits(self._bits.view(np.uint8), count=self._vocab_size, bitorder="little").astype(bool)

    def accept(self, token_id: int) -> None:
        """Takes the next token; one of the last mask."""
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = " ".join(self._matcher.get_error().partition("<state>")[0].split())[:300]
            message = f"the grammar of the answer cannot be followed: {reason}"
            raise RequestError(message, code="invalid_grammar")
