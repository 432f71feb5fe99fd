"""How unevenly a model routes, taken from a trace and given to another model's routers.

Owns the figures (which share of experts gets which share of the tokens, how alike the choices of neighbouring tokens
are) and the router matrices that reproduce them. The model behind both is a threshold one: an expert's logit is a
constant plus a normal variable of the token, of which a part stays while the text stays with one topic. Embeddings
carry that as `Directions`: one that all tokens share, one for each topic, and noise of the token's own.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from expertserve.bench.lab import read_decode, trace_stats, uses
from expertserve.errors import ConfigError
from expertserve.experts.router import RouterRule, route

Floats = NDArray[np.float32]

_SAMPLES = 2048
_ROUNDS = 10
_SHARED, _TOPIC = 0.25, 0.2
"""Shares of an embedding's variance: of the direction common to all tokens, of its topic's."""
_OWN = 1 - _SHARED - _TOPIC
"""What is left for the token alone."""
_DWELL = 16
"""Tokens that text stays with a topic."""
_LOGITS, _LEAD = 2.0, 9.0
"""Deviation of logits; in such deviations, how far the next word is ahead (the best of 200000 others comes to 4.9)."""
_BLOCK = 256


@dataclass(frozen=True, slots=True)
class LayerSkew:
    """One layer: each expert's share of the selections as a multiple of the mean, falling, and what stays.

    Attributes:
        popularity: [experts of the source], mean 1.
        correlation: of an expert's logit between one token and the next, in the threshold model.
    """

    popularity: tuple[float, ...]
    correlation: float


@dataclass(frozen=True, slots=True)
class Skew:
    """Skew of all layers of a source."""

    layers: tuple[LayerSkew, ...]

    @classmethod
    def of_trace(cls, path: Path) -> Skew:
        """Measures a trace's decode steps.

        Raises:
            ConfigError: it is no trace, or too short.
        """
        requests = read_decode(path)
        steps = int(requests.step_rows[:, 0].astype(bool).sum())
        counts = uses(requests)
        layers = []
        for layer in trace_stats(requests).layers:
            used = np.sort(counts[layer.layer])[::-1]
            if used.sum() < 10 * len(used):
                raise ConfigError(f"{path}: the trace is too short for a skew; record some hundred tokens")
            popularity = used / used.mean()
            top_k = min(max(1, round(layer.selections / steps)), len(used))
            correlation = _correlation(popularity, top_k, layer.repeated)
            layers.append(LayerSkew(tuple(round(float(p), 4) for p in popularity), round(correlation, 3)))
        return cls(tuple(layers))

    @classmethod
    def shipped(cls) -> Skew:
        """That of the embedded model on text it was not trained on."""
        rows = json.loads(Path(__file__).parents[1].joinpath("data", "skew.json").read_bytes())["layers"]
        return cls(tuple(LayerSkew(tuple(row["popularity"]), row["correlation"]) for row in rows))

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    def at(self, depth: float) -> LayerSkew:
        """The source's layer at a relative depth in [0, 1)."""
        return self.layers[int(depth * len(self.layers))]


def chances(skew: LayerSkew, experts: int, top_k: int) -> NDArray[np.float64]:
    """Of each of `experts`, by falling popularity, the chance that a token selects it; they sum up to `top_k`."""
    source = (np.arange(len(skew.popularity)) + 0.5) / len(skew.popularity)
    wanted = np.interp((np.arange(experts) + 0.5) / experts, source, skew.popularity)
    low, high = 0.0, 1e3
    for _ in range(60):  # what the most popular ones cannot take goes to the others
        factor = (low + high) / 2
        low, high = (factor, high) if np.clip(factor * wanted, 0, 0.98).sum() < top_k else (low, factor)
    return np.clip(low * wanted, 0, 0.98)


def constants(wanted: NDArray[np.float64], rule: RouterRule) -> NDArray[np.float64]:
    """The constants of the experts' logits, in deviations of the token's part, with which `rule` selects so often."""
    draws = np.random.default_rng(0).standard_normal((_SAMPLES, len(wanted)))
    goal = _quantiles(wanted)
    order = np.random.default_rng(1).permutation(len(wanted))  # groups hold experts of all kinds
    found = goal.copy()
    for _ in range(_ROUNDS):
        logits = draws + found
        ids, _ = route(logits[:, order].astype(np.float32), rule)
        got = np.empty(len(wanted))
        got[order] = np.bincount(ids.ravel(), minlength=len(wanted)) / _SAMPLES
        found += 0.7 * (goal - _quantiles(got))
    result: NDArray[np.float64] = found - found.mean()
    return result


def _quantiles(chance: NDArray[np.float64]) -> NDArray[np.float64]:
    inverse = NormalDist().inv_cdf
    return np.array([inverse(p) for p in np.clip(chance, 0.25 / _SAMPLES, 1 - 0.25 / _SAMPLES)])


def _correlation(popularity: NDArray[np.float64], top_k: int, repeated: float) -> float:
    """The correlation of neighbouring tokens with which a share `repeated` of the selections is the same."""
    rule = RouterRule(top_k)
    constant = constants(np.clip(popularity * top_k / len(popularity), 0, 0.98), rule)
    draws = np.random.default_rng(2).standard_normal((2, _SAMPLES, len(popularity)))

    def selected(logits: NDArray[np.float64]) -> NDArray[np.bool_]:
        chosen = np.zeros(logits.shape, bool)
        np.put_along_axis(chosen, route(logits.astype(np.float32), rule)[0], True, axis=1)
        return chosen

    first = selected(draws[0] + constant)
    low, high = 0.0, 0.99
    for _ in range(12):
        middle = (low + high) / 2
        second = selected(middle * draws[0] + (1 - middle**2) ** 0.5 * draws[1] + constant)
        low, high = (middle, high) if (first & second).sum() < repeated * first.sum() else (low, middle)
    return low


class Directions:
    """What the embeddings of a synthetic model carry, and the matrices that read it.

    Greedy text walks through the vocabulary in the order of ids, `_DWELL` tokens of one topic after those of another,
    so that it neither stands still nor comes back before it has been everywhere.

    Args:
        seed: of all randomness.
        hidden: elements of an embedding.
        words: the ids that text walks through, from the first to before the last.
        vocab: tokens.
    """

    def __init__(self, seed: int, hidden: int, words: range, vocab: int) -> None:
        topics = max(2, min(64, hidden // 32))
        draws = np.random.default_rng([seed, 0])
        basis, _ = np.linalg.qr(draws.standard_normal((hidden, topics + 1)))
        self._shared: Floats = basis[:, 0].astype(np.float32)
        self._of_topic: Floats = basis[:, 1:].T.astype(np.float32).copy()
        self._topics = np.repeat(draws.integers(0, topics, -(-vocab // _DWELL)), _DWELL)
        self._seed, self._hidden, self._words = seed, hidden, words

    def embeddings(self, first: int, count: int) -> Floats:
        """Rows of the tokens from `first` on, float32 [count, hidden], of mean square 1."""
        rows = self._own(np.arange(first, first + count)) * np.float32(_OWN**0.5)
        rows += np.float32((_SHARED * self._hidden) ** 0.5) * self._shared
        topics = self._topics[first : first + count]
        return rows + np.float32((_TOPIC * self._hidden) ** 0.5) * self._of_topic[topics]

    def output(self, draws: np.random.Generator, first: int, count: int, energy: float) -> Floats:
        """Rows of the output matrix; each word's reads what its predecessor alone carries. `energy` as for `router`."""
        tokens = np.arange(first, first + count)
        rows = draws.standard_normal((count, self._hidden), np.float32) * np.float32(self._hidden**-0.5)
        before = np.where(tokens == self._words.start, self._words.stop, tokens) - 1
        word = (tokens >= self._words.start) & (tokens < self._words.stop)
        lead = _LEAD * (energy / _OWN) ** 0.5 / self._hidden
        rows[word] += np.float32(lead) * self._own(before[word])
        rows[~word] *= np.float32(0.01)  # so that an answer does not end by itself
        rows *= np.float32(_LOGITS)
        return rows

    def router(
        self, draws: np.random.Generator, skew: LayerSkew, constant: NDArray[np.float64], energy: float
    ) -> Floats:
        """A router's matrix, float32 [experts, hidden].

        Args:
            constant: of each expert by falling popularity; which expert is how popular is drawn.
            energy: mean square of the residual stream where the router reads it; embeddings have 1.
        """
        experts = len(constant)
        stays = min(skew.correlation / (1 - 1 / _DWELL), 0.95)
        shared, topic = np.sqrt(np.array([_SHARED, _TOPIC]) * self._hidden / energy)  # of the normalised stream
        rest = np.sqrt(1 - (_SHARED + _TOPIC) / energy)
        own = draws.standard_normal((experts, self._hidden)) * self._hidden**-0.5
        for direction in (self._shared[None], self._of_topic):
            own -= (own @ direction.T) @ direction
        matrix = (1 - stays) ** 0.5 / rest * own
        matrix += stays**0.5 / topic * (draws.standard_normal((experts, len(self._of_topic))) @ self._of_topic)
        matrix += np.outer(draws.permutation(constant) / shared, self._shared)
        result: Floats = matrix.astype(np.float32)
        return result

    def _own(self, tokens: NDArray[np.int64]) -> Floats:
        """What each token alone carries, of deviation 1; drawn in blocks, so that any row can be had again."""
        rows = np.empty((len(tokens), self._hidden), np.float32)
        for block in np.unique(tokens // _BLOCK):
            draws = np.random.Generator(np.random.SFC64([self._seed, 1, int(block)]))
            drawn = draws.standard_normal((_BLOCK, self._hidden), np.float32)
            mine = tokens // _BLOCK == block
            rows[mine] = drawn[tokens[mine] % _BLOCK]
        return rows
