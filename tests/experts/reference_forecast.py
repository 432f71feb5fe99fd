"""The forecast of forecast.c, written for clarity: float64, a formula a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def logit(p: Floats) -> Floats:
    p = np.clip(p, 1e-4, 0.999)
    return np.log(p / (1 - p))


class Layer:
    """What is known of one layer's choices."""

    def __init__(self, experts: int) -> None:
        self.slow, self.recent, self.trail, self.seen = np.zeros((4, experts))
        self.slow_runs = self.recent_runs = 0.0
        self.weights = np.zeros((experts, experts))
        self.normal, self.influence = np.zeros((2, 2)), np.zeros(2)
        self.base = self.parts = None

    def note(self, chosen: Floats, runs: float, *, decode: bool) -> None:
        for name, kept in (("slow", 0.9998), ("recent", 0.985)):
            faded = kept**runs
            gained = (1 - faded) / (1 - kept)
            setattr(self, name, getattr(self, name) * faded + chosen * gained)
            setattr(self, f"{name}_runs", getattr(self, f"{name}_runs") * faded + gained)
        base, parts, trail = self.base, self.parts, self.trail
        self.trail = np.where(chosen > 0, 1.0, trail / 2) if decode else np.zeros(len(trail))
        self.trail[self.trail < 0.1] = 0.0
        before = None if base is None else self.likely()
        self.look()
        if before is not None and decode:
            self.learn(chosen, base, parts, before, trail)

    def look(self) -> None:
        usual = self.slow.mean() / self.slow_runs
        slow = np.clip((self.slow + 2 * usual) / (self.slow_runs + 2), 1e-4, 0.999)
        recent = (self.recent + 4 * slow) / (self.recent_runs + 4)
        self.base = logit(slow)
        self.parts = np.array([logit(recent) - self.base, self.trail @ self.weights])
        self.forecast = sigmoid(self.base + self.influence @ self.parts)

    def likely(self) -> Floats:
        return self.forecast

    def learn(self, chosen: Floats, base: Floats, parts: Floats, before: Floats, trail: Floats) -> None:
        target = 0.2 * chosen + 0.8 * self.forecast
        spread = before * (1 - before)
        full = sigmoid(base + self.influence[0] * parts[0] + parts[1])
        self.normal = 0.998 * self.normal + (parts * spread) @ parts.T
        slope = parts @ (target - before) - 4 * (1 - 0.998) * self.influence
        self.influence = np.clip(self.influence + np.linalg.solve(self.normal + 4 * np.eye(2), slope), 0, 1.5)
        pace = np.maximum(0.04, 1 / (1 + self.seen * spread.mean()))
        self.weights += np.outer(pace * trail, target - full)
        self.seen = self.seen + trail**2


class ReferenceForecast:
    """Layers in the order in which they run."""

    def __init__(self, experts: Sequence[int]) -> None:
        self.layers = [Layer(count) for count in experts]
        self.position = 0

    def note(self, place: int, chosen: Mapping[int, float], runs: float | None = None) -> None:
        """A layer's run: which experts it chose; with `runs` a prefill's, and how much of its tokens chose each."""
        layer = self.layers[place]
        vector = np.array([chosen.get(expert, 0.0) for expert in range(len(layer.slow))])
        layer.note(vector, 1 if runs is None else runs, decode=runs is None)
        self.position = place

    def until(self) -> Floats:
        """Runs until each key is next needed."""
        count = len(self.layers)
        ahead = [((place - self.position - 1) % count + 1) / count for place in range(count)]
        waits = [
            np.full(len(layer.slow), len(layer.slow)) if layer.base is None else 1 / layer.forecast
            for layer in self.layers
        ]
        return np.concatenate([wait + step for wait, step in zip(waits, ahead, strict=True)])
