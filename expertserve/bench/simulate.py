"""`expertserve trace simulate`: how fast a recorded run would decode with another memory or another disk.

Owns the joining of what the others measure and replay: which experts of each step would have had no slot (replay.py),
what computing costs on this machine (miniature.py), and a disk, this one or one that is only described; costs.py makes
seconds of them. Steps of one decode row in the second half of the trace count; slots fill in the first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expertserve.bench.costs import ComputeCosts, DiskCosts, LookAheadShares, StepTime, decode_step
from expertserve.bench.disk_probe import probe_disk
from expertserve.bench.memory_probe import memory_rate
from expertserve.bench.miniature import measure_costs
from expertserve.bench.plan import USUAL_AHEAD, model_sizes
from expertserve.bench.recall import recall_of
from expertserve.bench.replay import POLICIES, Policy, Requests, hits, read_requests, slots_of
from expertserve.bench.table import aligned
from expertserve.config import Settings
from expertserve.data import model_path
from expertserve.errors import ConfigError
from expertserve.gguf.file import GGUFFile
from expertserve.models.model import Model
from expertserve.models.registry import load_model

_MOST_STEPS = 512  # whose time is simulated, spread over those that count


@dataclass(frozen=True, slots=True)
class OtherDisk:
    """What is said of a disk; None is as this machine's.

    Attributes:
        bandwidth: bytes a second.
        latency_s: of a read.
        depth: reads under way at once.
    """

    bandwidth: int | None = None
    latency_s: float | None = None
    depth: int | None = None

    def applied(self, here: DiskCosts) -> DiskCosts:
        """Costs of this machine's disk with what is said in their place."""
        said = {name: value for name, value in asdict(self).items() if value is not None}
        return replace(here, **said)


@dataclass(frozen=True, slots=True)
class Simulated:
    """Decode with a number of slots: tokens a second, the mean step, whether look-ahead is on, and the hit rate."""

    slots: int
    hit_rate: float
    tok_s: float
    step: StepTime
    ahead: bool


def simulate(
    requests: Requests,
    policy: Policy,
    slots: int,
    compute: ComputeCosts,
    disk: DiskCosts,
    lookahead: str = "off",
    foreseen: LookAheadShares = USUAL_AHEAD,
) -> Simulated:
    """Decode of a trace by a policy. Look-ahead on `auto` is on where it gains what its trial asks for.

    Raises:
        ConfigError: nothing of the trace counts.
    """
    groups = _counted(requests)
    missed = requests.sizes - hits(requests, policy, slots)
    asked = int(requests.sizes[groups].sum())
    steps = np.split(groups, np.flatnonzero(np.diff(requests.step_of[groups])) + 1)
    chosen = int(requests.sizes[groups].max())
    looked_at = np.linspace(0, len(steps) - 1, min(_MOST_STEPS, len(steps))).astype(int).tolist()
    misses = [missed[steps[i]].tolist() for i in looked_at]
    step, ahead = decode_step(misses, chosen, compute, disk, lookahead, foreseen)
    return Simulated(slots, 1 - int(missed[groups].sum()) / asked, 1 / step.seconds, step, ahead)


def _counted(requests: Requests) -> NDArray[np.int64]:
    """Groups of steps of one decode row, of the second half."""
    single = (requests.step_rows[:, 0] == 1) & (requests.step_rows[:, 1] == 0)
    single[: len(single) // 2] = False
    groups = np.flatnonzero(single[requests.step_of])
    if not len(groups):
        raise ConfigError(
            "the trace has no step of one decode row in its second half; record a longer run with --trace"
        )
    return groups


def show_simulation(
    settings: Settings,
    trace: Path,
    shares: Sequence[float],
    disk: OtherDisk,
    memory_bandwidth: int | None,
    *,
    as_json: bool,
) -> int:
    """Prints what the model that `settings` name would do."""
    requests, recall = read_requests(trace), recall_of(trace)
    with closing(GGUFFile.open(model_path(settings.model), partial=True)) as file:
        model = load_model(file)
        _require_same(trace, requests, model)
        with probe_disk(model, settings.io_threads) as probe:
            if probe.costs is None and disk.bandwidth is None:
                raise ConfigError("too little of the model is here to try the disk; give --disk-bandwidth")
            compute = measure_costs(model, settings, between=probe.take).compute
            costs = disk.applied(probe.costs or _unknown_disk(model, settings))
    if memory_bandwidth is not None:
        compute = _scaled(compute, memory_rate(settings.threads) / memory_bandwidth)
    foreseen = USUAL_AHEAD if recall is None else recall.shares
    rows = []
    for share in shares:
        slots = slots_of(requests, share)
        each = {
            name: simulate(requests, policy, slots, compute, costs, settings.lookahead, foreseen)
            for name, policy in POLICIES.items()
        }
        rows.append({"share": share, **asdict(each["ours"]), "tok_s_of": {n: row.tok_s for n, row in each.items()}})
    report = {
        "trace": str(trace),
        "model": settings.model,
        "disk": asdict(costs),
        "compute": asdict(compute),
        "foreseen": asdict(foreseen),
        "rows": rows,
    }
    if as_json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0


def _require_same(trace: Path, requests: Requests, model: Model) -> None:
    experts = {layer: tower.num_experts for layer, tower in model.towers.items()}
    if dict(requests.experts) != experts:
        raise ConfigError(f"{trace}: not a trace of this model; its layers or experts are others")


def _unknown_disk(model: Model, settings: Settings) -> DiskCosts:
    """A disk of which nothing is known but what is read of it."""
    sizes = model_sizes(model)
    reads = max(len(tower.slices) for tower in model.towers.values())
    return DiskCosts(1.0, 0.0, settings.io_threads, reads, sizes.expert_bytes / sizes.experts)


def _scaled(compute: ComputeCosts, factor: float) -> ComputeCosts:
    """Kernels that take `factor` times as long, with what Python and reads cost left as it is."""
    return replace(
        compute,
        step_s=compute.step_s * factor,
        layer_s=compute.layer_s * factor,
        expert_s=compute.expert_s * factor,
    )


def _print(report: Mapping[str, object]) -> None:
    disk, compute, rows = report["disk"], report["compute"], report["rows"]
    assert isinstance(disk, dict) and isinstance(compute, dict) and isinstance(rows, list)
    print(
        f"disk: {disk['bandwidth'] / 1e9:.2f} GB/s, {1000 * disk['latency_s']:.3f} ms a read, {disk['depth']} at once, "
        f"{disk['reads']} reads of {disk['expert_bytes']:.0f} bytes an expert"
    )
    print("compute, ms: " + ", ".join(f"{name.removesuffix('_s')} {1000 * s:.3f}" for name, s in compute.items()))
    others = tuple(name for name in POLICIES if name != "ours")
    heads = ("slots", "share", "hits", "reads a token", "waiting ms", "ahead", "tok/s", *(f"with {n}" for n in others))
    print(
        aligned(
            heads,
            [
                (
                    str(row["slots"]),
                    f"{row['share']:.0%}",
                    f"{row['hit_rate']:.1%}",
                    f"{row['step']['reads']:.1f}",
                    f"{1000 * row['step']['waiting']:.2f}",
                    "on" if row["ahead"] else "off",
                    f"{row['tok_s']:.2f}",
                    *(f"{row['tok_s_of'][name]:.2f}" for name in others),
                )
                for row in rows
            ],
        )
    )
