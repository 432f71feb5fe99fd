"""Chooses one token from a row of logits.

The order is llama.cpp's: logit bias, penalties, the constraint's mask, then top-k, top-p, min-p and the temperature
last, so top-p and min-p look at the model's untempered distribution. It owns the request's random generator and its
place in the constraint: a draw takes exactly one number from the generator and greedy none, so a request's tokens do
not depend on what runs beside it. Ties are broken towards the lower token id everywhere. Log-probabilities are another
module's and come from the unmodified logits.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from expertserve.engine.request import SamplingParams
from expertserve.errors import ExpertServeError

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]

GREEDY_BELOW = 1e-5  # a temperature this small cannot be told from greedy, and dividing by it overflows
NUCLEUS_FIRST = 128
NUCLEUS_BINS = 2048
NUCLEUS_DEPTH = 20.0  # logits further below the peak share the last bin
NUCLEUS_PART = 16384
DRAW_BLOCK = 512


class Sampler:
    """Draws a request's tokens."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._greedy = params.temperature < GREEDY_BELOW
        seed = None if params.seed is None else params.seed & (2**64 - 1)
        self._generator = None if self._greedy else np.random.default_rng(seed)
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int64)
        self._constraint = None if params.constraint is None else params.constraint.start()
        with np.errstate(over="ignore"):  # a number too large for float32 is infinite
            self._temperature = np.float32(params.temperature)
            self._biases = np.array([*params.logit_bias.values()], np.float32)
        self._penalise = params.repeat_last_n != 0 and (
            params.repeat_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )

    @property
    def ended(self) -> bool:
        """Whether the constraint lets no token follow."""
        return self._constraint is not None and self._constraint.ended

    def sample(self, logits: Logits, history: NDArray[np.int32]) -> int:
        """Chooses a token; `history` is all tokens so far, prompt included. The logits are not changed."""
        token = self._choose(logits, history)
        if self._constraint is not None:
            self._constraint.accept(token)
        return token

    def _choose(self, logits: Logits, history: NDArray[np.int32]) -> int:
        row = self._adjusted(logits, history)
        if self._generator is None:
            best = int(row.argmax())
            _check_finite(float(row[best]))
            return best
        peak = float(row.max())
        _check_finite(peak)
        ids, values = self._candidates(row, peak)
        weights = np.exp((values - np.float32(peak)) / self._temperature)
        index = _draw(weights, self._generator.random())
        return index if ids is None else int(ids[index])

    def _adjusted(self, logits: Logits, history: NDArray[np.int32]) -> Logits:
        if not self._penalise and not len(self._bias_ids) and self._constraint is None:
            return logits
        row = logits.copy()
        row[self._bias_ids] += self._biases
        if self._penalise:
            self._apply_penalties(row, history)
        if self._constraint is not None:
            row[~self._constraint.mask()] = -np.inf
        return row

    def _apply_penalties(self, row: Logits, history: NDArray[np.int32]) -> None:
        params = self._params
        recent = history if params.repeat_last_n < 0 else history[-params.repeat_last_n :]
        ids, counts = np.unique(recent, return_counts=True)
        values = row[ids]
        repeat = np.float32(params.repeat_penalty)
        values = np.where(values > 0, values / repeat, values * repeat)
        row[ids] = values - np.float32(params.presence_penalty) - np.float32(params.frequency_penalty) * counts

    def _candidates(self, row: Logits, peak: float) -> tuple[Ids | None, Logits]:
        """The tokens that may be drawn and their logits; ids None means that all may."""
        params = self._params
        ids: Ids | None = None
        if 0 < params.top_k < len(row):
            ids = largest(row, params.top_k)
            if params.top_p < 1:
                cumulative = np.cumsum(_weights(row[ids], peak), dtype=np.float64)
                ids = ids[: _reach(cumulative, params.top_p * float(cumulative[-1]))]
        elif params.top_p < 1:
            ids = _nucleus(row, peak, params.top_p)
        values = row if ids is None else row[ids]
        if params.min_p > 0:
            kept = values >= np.float32(peak + math.log(params.min_p))
            if ids is None and 8 * np.count_nonzero(kept) > len(row):  # gathering most of a row costs more
                return None, np.where(kept, values, np.float32(-np.inf))
            places = np.flatnonzero(kept)
            ids, values = (places if ids is None else ids[places]), values[places]
        return ids, values


def largest(row: Logits, k: int) -> Ids:
    """Indices of the k largest values, largest first, lower index first on ties; 0 < k <= len(row)."""
    if k == len(row):
        return np.argsort(-row, kind="stable")
    candidates = _at_least_kth_block_maximum(row, k)
    values = row if candidates is None else row[candidates]
    threshold = np.partition(values, len(values) - k)[len(values) - k]
    above = np.flatnonzero(values > threshold)
    ties = np.flatnonzero(values == threshold)[: k - len(above)]
    kept = np.concatenate((above, ties))
    kept = kept[np.argsort(-values[kept], kind="stable")]
    return kept if candidates is None else candidates[kept]


def _at_least_kth_block_maximum(row: Logits, k: int) -> Ids | None:
    """A small superset of the k largest: the k-th largest of the block maxima bounds the k-th largest value below.

    Two passes over the row instead of a selection over all of it; None where that would not pay.
    """
    blocks = 16 * k
    width = len(row) // blocks
    if width < 8:
        return None
    maxima = row[: blocks * width].reshape(blocks, width).max(axis=1)
    bound = np.partition(maxima, blocks - k)[blocks - k]
    return np.flatnonzero(row >= bound)


def _nucleus(row: Logits, peak: float, top_p: float) -> Ids:
    """The fewest likeliest tokens that reach top_p, in no particular order; mostly a few suffice."""
    weights = _weights(row, peak)
    target = top_p * float(weights.sum(dtype=np.float64))
    ids = largest(row, min(NUCLEUS_FIRST, len(row)))
    cumulative = np.cumsum(weights[ids], dtype=np.float64)
    if cumulative[-1] < target and len(ids) < len(row):
        return _wide_nucleus(row, peak, weights, target)
    return ids[: _reach(cumulative, target)]


def _wide_nucleus(row: Logits, peak: float, weights: Logits, target: float) -> Ids:
    """The same for a flat distribution, whose nucleus would be slow to sort.

    A histogram of the weight by distance from the peak finds the bin where the target is reached; only that bin is
    sorted. Parts of the row are taken, so that the temporaries stay in the processor's cache.
    """
    bins = np.empty(len(row), np.int16)
    mass = np.zeros(NUCLEUS_BINS)
    for start in range(0, len(row), NUCLEUS_PART):
        part = slice(start, start + NUCLEUS_PART)
        below = (np.float32(peak) - row[part]) * np.float32(NUCLEUS_BINS / NUCLEUS_DEPTH)
        places = np.minimum(below, NUCLEUS_BINS - 1).astype(np.intp)
        bins[part] = places
        mass += np.bincount(places, weights[part], NUCLEUS_BINS)
    cumulative = np.cumsum(mass)
    crossing = _reach(cumulative, target) - 1
    members = np.flatnonzero(bins == crossing)
    members = members[np.argsort(-row[members], kind="stable")]
    before = float(cumulative[crossing - 1]) if crossing else 0.0
    kept = _reach(before + np.cumsum(weights[members], dtype=np.float64), target)
    return np.concatenate((np.flatnonzero(bins < crossing), members[:kept]))


def _weights(values: Logits, peak: float) -> Logits:
    weights: Logits = np.exp(values - np.float32(peak))
    return weights


def _reach(cumulative: NDArray[np.float64], target: float) -> int:
    """How many leading entries it takes to reach the target; never none."""
    return min(int(np.searchsorted(cumulative, target)), len(cumulative) - 1) + 1


def _draw(weights: Logits, uniform: float) -> int:
    """The index where the cumulative weight passes `uniform` of the total; sums blocks first, then within one."""
    starts = np.arange(0, len(weights), DRAW_BLOCK)
    sums = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    target = min(uniform * float(sums[-1]), math.nextafter(float(sums[-1]), 0.0))
    block = int(np.searchsorted(sums, target, side="right"))
    inside = np.cumsum(weights[starts[block] : starts[block] + DRAW_BLOCK], dtype=np.float64)
    target -= float(sums[block - 1]) if block else 0.0
    index = int(np.searchsorted(inside, target, side="right"))
    return int(starts[block]) + min(index, int(np.flatnonzero(np.diff(inside, prepend=0.0))[-1]))


def _check_finite(peak: float) -> None:
    if not math.isfinite(peak):
        raise ExpertServeError(f"no token can be sampled: the largest logit is {peak} after biases and penalties")
