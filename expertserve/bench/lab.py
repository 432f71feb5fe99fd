"""The trace lab: what a routing trace says of reuse, skew and what slots would gain.

Owns the figures and their tables; the replay itself is in replay.py and pictures are drawn by plots.py. A share or a
hit rate is in [0, 1] in JSON and in percent for people.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expertserve.bench.recall import recall_of
from expertserve.bench.replay import POLICIES, Requests, compare, read_requests, reuse_distances, slots_of
from expertserve.bench.table import aligned
from expertserve.errors import ConfigError

_PERCENTILES = (50, 90, 99)
Uses = dict[int, NDArray[np.int64]]  # by layer, how many decode steps selected each of its experts


@dataclass(frozen=True, slots=True)
class LayerStats:
    """How one layer routes, by its decode steps.

    Attributes:
        selections: distinct experts of each step, summed.
        entropy_bits: of how often each expert is selected; log2(experts) where all are alike.
        hottest_quarter: share of the selections that go to the most used quarter of its experts.
        never_used: experts that no step selected.
        repeated: share of the selections that the layer's step before also made.
    """

    layer: int
    experts: int
    selections: int
    entropy_bits: float
    hottest_quarter: float
    never_used: int
    repeated: float


@dataclass(frozen=True, slots=True)
class TraceStats:
    """A trace in figures.

    Attributes:
        steps, decode_rows, prefill_rows: how long it is.
        experts: of all layers.
        selections: distinct experts of each step and layer, summed, prefill among them.
        first_uses: selections of an expert that none before had selected.
        reuse_distance: by percentile, how many distinct experts of all layers are selected from one selection of an
            expert to the next, first uses left out: with that many slots LRU answers so many percent of them.
    """

    steps: int
    decode_rows: int
    prefill_rows: int
    experts: int
    selections: int
    first_uses: int
    reuse_distance: dict[str, int]
    layers: list[LayerStats]


def read_decode(path: Path) -> Requests:
    """A trace that has something to count.

    Raises:
        ConfigError: it is no trace, or has no decode step.
    """
    requests = read_requests(path)
    if not requests.counted.any():
        raise ConfigError(f"{path}: the trace has no decode step; record one of a longer run with --trace")
    return requests


def trace_stats(requests: Requests) -> TraceStats:
    """Figures of a trace."""
    distances = reuse_distances(requests)
    again = distances[distances > 0]
    decode, prefill = requests.step_rows.sum(axis=0).tolist()
    return TraceStats(
        steps=len(requests.step_rows),
        decode_rows=decode,
        prefill_rows=prefill,
        experts=requests.num_keys,
        selections=len(distances),
        first_uses=int((distances == 0).sum()),
        reuse_distance={f"p{p}": int(np.percentile(again, p)) if len(again) else 0 for p in _PERCENTILES},
        layers=list(_layer_stats(requests)),
    )


def uses(requests: Requests) -> Uses:
    """By layer, how many decode steps selected each of its experts."""
    counted = np.repeat(requests.counted, requests.sizes)
    counts = np.bincount(requests.keys[counted], minlength=requests.num_keys)
    ends = np.cumsum(list(requests.experts.values()))
    return dict(zip(requests.experts, np.split(counts, ends[:-1]), strict=True))


def _layer_stats(requests: Requests) -> Iterable[LayerStats]:
    used = uses(requests)
    repeated = _repeated(requests)
    for layer, counts in used.items():
        total = int(counts.sum())
        shares = np.sort(counts / max(total, 1))[::-1]
        some = shares[shares > 0]
        yield LayerStats(
            layer=layer,
            experts=len(counts),
            selections=total,
            entropy_bits=round(float(-(some * np.log2(some)).sum()) + 0.0, 4),
            hottest_quarter=round(float(shares[: max(1, len(shares) // 4)].sum()), 4),
            never_used=int((counts == 0).sum()),
            repeated=round(repeated[layer] / max(total, 1), 4),
        )


def _repeated(requests: Requests) -> dict[int, int]:
    """By layer, selections of decode steps that the group before, of the same layer, also made."""
    order = np.argsort(requests.layers, kind="stable")
    turn = np.empty(len(order), np.int64)  # of each group, its place when layers follow one another
    turn[order] = np.arange(len(order))
    turns = np.repeat(turn, requests.sizes)
    by_key = np.lexsort((turns, requests.keys))
    keys, turns = requests.keys[by_key], turns[by_key]
    counted = np.repeat(requests.counted, requests.sizes)[by_key]
    layers = np.repeat(requests.layers, requests.sizes)[by_key]
    same = np.append(False, (keys[1:] == keys[:-1]) & (turns[1:] == turns[:-1] + 1)) & counted
    return {layer: int((same & (layers == layer)).sum()) for layer in requests.experts}


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """Decode hit rates at one number of slots; `shuffled` has the same selections in an order without memory."""

    slots: int
    share: float
    hit_rate: dict[str, float]
    shuffled: dict[str, float]
    gap_closed: float | None


def replay_rows(requests: Requests, shares: Sequence[float]) -> list[ReplayRow]:
    """Replays every policy at each share of all experts in slots."""
    rates, control = compare(requests, shares, POLICIES), compare(requests.shuffled(), shares, POLICIES)
    rows = []
    for at, share in enumerate(shares):
        row = {name: round(rates[name][at], 4) for name in POLICIES}
        rows.append(
            ReplayRow(
                slots_of(requests, share),
                round(share, 4),
                row,
                {name: round(control[name][at], 4) for name in POLICIES},
                _gap_closed(row),
            )
        )
    return rows


def _gap_closed(rates: Mapping[str, float]) -> float | None:
    """Share of the way from LRU to the optimum that ours comes; None where there is no way to go."""
    gap = rates["Belady"] - rates["LRU"]
    return round((rates["ours"] - rates["LRU"]) / gap, 4) if gap > 0 else None


def parse_shares(text: str) -> list[float]:
    """Percentages, as in "25,50", as shares.

    Raises:
        ConfigError: it is something else.
    """
    try:
        shares = [float(part.strip().removesuffix("%")) / 100 for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 1 for share in shares):
        raise ConfigError(f"--slots {text}: should be percentages of the experts above 0 and up to 100, as in 25,50")
    return shares


def show_stats(path: Path, *, as_json: bool) -> int:
    """`expertserve trace stats`."""
    stats, recall = trace_stats(read_decode(path)), recall_of(path)
    if as_json:
        print(json.dumps({**asdict(stats), "lookahead": recall and asdict(recall)}))
        return 0
    distance = ", ".join(f"{name} {value}" for name, value in stats.reuse_distance.items())
    print(f"steps {stats.steps}: {stats.decode_rows} decode rows, {stats.prefill_rows} prefill rows")
    print(f"selections {stats.selections} of {stats.experts} experts, {stats.first_uses} of them an expert's first")
    print(f"reuse distance in experts, all layers: {distance}")
    if recall is None:
        print("look-ahead: no guesses recorded; --lookahead on records them")
    else:
        print(
            f"look-ahead foresaw {recall.recall:.1%} of the selections of {recall.layer_runs} runs of a layer, "
            f"{recall.recall_of_new:.1%} of those that the step before did not make; "
            f"{recall.precision:.1%} and {recall.precision_of_new:.1%} of its guesses were right"
        )
    heads = ("layer", "experts", "selections", "entropy bits", "hottest quarter", "never used", "repeated")
    print(
        aligned(
            heads,
            [
                (
                    str(layer.layer),
                    str(layer.experts),
                    str(layer.selections),
                    f"{layer.entropy_bits:.2f} of {np.log2(layer.experts):.2f}",
                    f"{layer.hottest_quarter:.1%}",
                    str(layer.never_used),
                    f"{layer.repeated:.1%}",
                )
                for layer in stats.layers
            ],
        )
    )
    return 0


def show_replay(path: Path, shares: Sequence[float], *, as_json: bool) -> int:
    """`expertserve trace replay`."""
    rows = replay_rows(read_decode(path), shares)
    if as_json:
        print(json.dumps({"trace": str(path), "rows": [asdict(row) for row in rows]}))
        return 0
    heads = ("slots", "share", *POLICIES, "gap closed", *(f"{name} shuffled" for name in POLICIES))
    print(
        aligned(
            heads,
            [
                (
                    str(row.slots),
                    f"{row.share:.0%}",
                    *(f"{rate:.1%}" for rate in row.hit_rate.values()),
                    "-" if row.gap_closed is None else f"{row.gap_closed:.0%}",
                    *(f"{rate:.1%}" for rate in row.shuffled.values()),
                )
                for row in rows
            ],
        )
    )
    return 0


def draw(path: Path, out: Path, shares: Sequence[float]) -> int:
    """`expertserve trace plot`: writes one picture of three parts."""
    from expertserve.bench.plots import plot_trace, require_drawable

    require_drawable(out, "--out")
    requests = read_decode(path)
    distances = reuse_distances(requests)
    plot_trace(out, path.name, replay_rows(requests, shares), distances[distances > 0], uses(requests))
    print(out)
    return 0
