"""How a token is written in the log-probabilities of a response.

Owns the names only: the token's text; "bytes:\\x.." where its bytes alone are no UTF-8, so that such tokens stay
distinguishable; "token_id:N" on request, which is the one form that is unique for every token of any vocabulary.
"""

from __future__ import annotations

from expertserve.server.state import ServedTokenizer

# JSON has no -Infinity; this is what other servers send in its place.
LOWEST_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


class TokenNames:
    """Names of one response's tokens, each made once."""

    def __init__(self, tokenizer: ServedTokenizer, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._names: dict[int, str] = {}

    def name(self, token_id: int) -> str:
        known = self._names.get(token_id)
        if known is None:
            known = self._names[token_id] = f"token_id:{token_id}" if self._as_ids else self._text(token_id)
        return known

    def raw(self, token_id: int) -> bytes:
        """The token's bytes; a special token's are those of its name."""
        return self._tokenizer.token_bytes(token_id) or self._tokenizer.token_text(token_id).encode()

    def _text(self, token_id: int) -> str:
        raw = self.raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
