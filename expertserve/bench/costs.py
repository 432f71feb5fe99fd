"""The model of time: how long a step takes, from what its parts cost and from which experts have to be read.

Owns the events of one step as the lane makes them, layer by layer:

    token = step + layers * (layer + top-k * expert) + reads * miss + waiting

Waiting is what is left of the reads once the layer's resident experts are computed: reads begin when the layer is
routed, `depth` at once; each takes the latency and then its turn on the bandwidth, and experts are computed as they
arrive. With look-ahead part of a layer's reads begin once those of the layer before have ended, and more is read than
is used. It measures nothing and knows no model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from expertserve.experts.lookahead import TRIAL


@dataclass(frozen=True, slots=True)
class DiskCosts:
    """How experts are read.

    Attributes:
        bandwidth: bytes a second, of all reads together.
        latency_s: of a read before its bytes come; those of reads under way at once overlap.
        depth: reads under way at once.
        reads: of one expert.
        expert_bytes: of one expert.
    """

    bandwidth: float
    latency_s: float
    depth: int
    reads: int
    expert_bytes: float


@dataclass(frozen=True, slots=True)
class ComputeCosts:
    """Seconds of what is computed.

    Attributes:
        step_s: of a step outside its routed layers: embedding, output matrix, sampling, engine.
        layer_s: of a routed layer without its experts.
        expert_s: of one expert for one row.
        miss_s: of the processor for one expert that is read, besides computing it.
        guess_s: of a layer for guessing the next one's experts.
    """

    step_s: float
    layer_s: float
    expert_s: float
    miss_s: float = 0.0
    guess_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LookAheadShares:
    """What look-ahead foresees: `used` of the experts that must be read; `wasted` reads for each one used."""

    used: float
    wasted: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step; `waiting` is the part in which nothing is computed, `reads` counts experts.

    Also the mean of many, so `reads` need not be whole.
    """

    seconds: float
    waiting: float
    reads: float


def mean_step(steps: Sequence[StepTime]) -> StepTime:
    """The mean of at least one step."""
    count = len(steps)
    return StepTime(
        sum(step.seconds for step in steps) / count,
        sum(step.waiting for step in steps) / count,
        sum(step.reads for step in steps) / count,
    )


class _Disk:
    """When reads end; those asked for first come first."""

    def __init__(self, costs: DiskCosts) -> None:
        self._costs = costs
        self._each_s = costs.expert_bytes / costs.reads / costs.bandwidth
        self._ends: deque[float] = deque([0.0] * costs.depth, maxlen=costs.depth)

    @property
    def next_start(self) -> float:
        return self._ends[0]

    @property
    def idle_at(self) -> float:
        return self._ends[-1]

    def read(self, at: float) -> float:
        """When an expert asked for at a time has arrived."""
        for _ in range(self._costs.reads):
            began = max(at, self._ends[0])
            self._ends.append(max(began + self._costs.latency_s, self._ends[-1]) + self._each_s)
        return self._ends[-1]


def step_time(
    misses: Sequence[int], chosen: int, compute: ComputeCosts, disk: DiskCosts, ahead: LookAheadShares | None = None
) -> StepTime:
    """One decode step.

    Args:
        misses: of each routed layer, experts that have no slot.
        chosen: experts of a layer.
        compute, disk: what things cost.
        ahead: what look-ahead foresees; None where it is off.
    """
    reader = _Disk(disk)
    now, waiting, reads = compute.step_s, 0.0, 0
    guessed_at: float | None = None
    share = waste = 0.0  # carried from layer to layer, since a layer's are whole
    for missed in misses:
        now += compute.layer_s + (compute.guess_s if ahead else 0.0)
        arrivals: list[float] = []
        if ahead and guessed_at is not None:
            share += ahead.used * missed
            used, share = int(share), share % 1
            waste += ahead.wasted * used
            wasted, waste = int(waste), waste % 1
            arrivals, begun_in_vain = _guessed(reader, guessed_at, now, used, wasted)
            reads += begun_in_vain
            now += begun_in_vain * compute.miss_s
        arrivals += [reader.read(now) for _ in range(missed - len(arrivals))]
        reads += missed
        guessed_at = max(now, reader.idle_at)
        now += compute.expert_s * (chosen - missed)
        for arrival in sorted(arrivals):
            waiting += max(0.0, arrival - now)
            now = max(now, arrival) + compute.expert_s + compute.miss_s
    return StepTime(now, waiting, reads)


def decode_step(
    steps: Sequence[Sequence[int]],
    chosen: int,
    compute: ComputeCosts,
    disk: DiskCosts,
    lookahead: str,
    foreseen: LookAheadShares,
) -> tuple[StepTime, bool]:
    """The mean of decode steps, and whether look-ahead is on in them.

    Args:
        steps: at least one; of each what `step_time` takes as `misses`.
        chosen, compute, disk: as there.
        lookahead: on, off, or auto: on where that gains what the lane's own trial asks for.
        foreseen: what look-ahead foresees where it is on.
    """

    def mean(ahead: LookAheadShares | None) -> StepTime:
        return mean_step([step_time(misses, chosen, compute, disk, ahead) for misses in steps])

    if lookahead == "on":
        return mean(foreseen), True
    without = mean(None)
    if lookahead == "off":
        return without, False
    ahead = mean(foreseen)
    gains = without.seconds / ahead.seconds >= TRIAL.least_gain
    return (ahead, True) if gains else (without, False)


def _guessed(reader: _Disk, at: float, until: float, used: int, wasted: int) -> tuple[list[float], int]:
    """Guesses begin one after the other while no layer waits: arrivals of those used, and how many others began."""
    arrivals, vain = [], 0
    for i in range(used + wasted):
        if max(at, reader.next_start) >= until:
            break
        end = reader.read(at)
        if (i + 1) * used // (used + wasted) > i * used // (used + wasted):
            arrivals.append(end)
        else:
            vain += 1
    return arrivals, vain
