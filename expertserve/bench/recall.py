"""How well look-ahead guesses, from a trace that has its guesses.

Owns the counts: a guess is held against what the layer then chose. Experts that the layer's step before chose are most
likely in a slot already; what guessing is worth shows in the others, the new ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from expertserve.bench.costs import LookAheadShares
from expertserve.experts.trace import read_trace


@dataclass(frozen=True, slots=True)
class Recall:
    """Guesses of decode steps against choices.

    Attributes:
        layer_runs: runs of a layer that had been guessed.
        recall: share of the chosen experts that were guessed.
        precision: share of the guessed experts that were chosen.
        recall_of_new: as `recall`, of experts that the layer's step before did not choose.
        precision_of_new: as `precision`, of such.
    """

    layer_runs: int
    recall: float
    precision: float
    recall_of_new: float
    precision_of_new: float

    @property
    def shares(self) -> LookAheadShares:
        """What the model of time takes: new experts are those that have to be read."""
        precision = self.precision_of_new
        return LookAheadShares(self.recall_of_new, (1 - precision) / precision if precision else 0.0)


def recall_of(path: Path) -> Recall | None:
    """Recall of a trace's guesses; None where it has none.

    Raises:
        ConfigError: the file is no trace.
    """
    runs = 0
    chosen = guessed = right = new = guessed_new = right_new = 0
    before: dict[int, set[int]] = {}
    for step in read_trace(path)[1]:
        for layer, ids in step.layers:
            choice, last = set(ids.ravel().tolist()), before.get(layer, set())
            before[layer] = choice
            if layer not in step.guesses or step.rows.prefill_rows:
                continue
            guess = set(step.guesses[layer].ravel().tolist())
            runs += 1
            chosen += len(choice)
            guessed += len(guess)
            right += len(guess & choice)
            new += len(choice - last)
            guessed_new += len(guess - last)
            right_new += len((guess & choice) - last)
    if not runs:
        return None
    return Recall(runs, right / chosen, right / guessed, _share(right_new, new), _share(right_new, guessed_new))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
