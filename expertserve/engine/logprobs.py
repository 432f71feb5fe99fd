"""Log-probabilities of tokens under the model's own distribution.

They come from the unmodified logits (log-softmax before biases, penalties, truncation and temperature), as the OpenAI
API and vLLM report them; the sampler's distribution is another one. Rows are taken in small groups, so that the
temporaries stay small beside the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from expertserve.engine.request import TokenLogprob
from expertserve.engine.sampler import largest

ROWS_AT_ONCE = 8


def token_logprobs(logits: NDArray[np.float32], chosen: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """One TokenLogprob a row of logits, [n, vocab], for the token chosen there and the `num_top` likeliest."""
    result: list[TokenLogprob] = []
    for start in range(0, len(chosen), ROWS_AT_ONCE):
        rows = logits[start : start + ROWS_AT_ONCE]
        peaks = rows.max(axis=1, keepdims=True)
        sums = np.exp(rows - peaks).sum(axis=1, dtype=np.float64)
        norms = peaks[:, 0] + np.log(sums)
        for row, norm, token in zip(rows, norms, chosen[start : start + ROWS_AT_ONCE], strict=True):
            result.append(_row_logprob(row, float(norm), token, num_top))
    return result


def _row_logprob(row: NDArray[np.float32], norm: float, token: int, num_top: int) -> TokenLogprob:
    top: list[tuple[int, float]] = []
    if num_top:
        ids = largest(row, min(num_top, len(row)))
        top = list(zip(ids.tolist(), (row[ids].astype(np.float64) - norm).tolist(), strict=True))
    return TokenLogprob(token, float(row[token]) - norm, top)
