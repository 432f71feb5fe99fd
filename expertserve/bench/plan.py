"""`expertserve plan`: what of a model fits, and how fast it could decode at most, from its header and two measurements.

Owns the bound; sizes and refusals are those of the loader and the slot planner themselves. A token takes at least

    bytes that it computes with / memory rate + experts that have no slot * bytes of one / disk rate

with rates measured here; kernels that are slower than memory, and work that is not bytes, come on top. The share of
experts that have a slot comes from a trace of the model where there is one, else from the embedded model's, whose
routing is that of text.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from expertserve.bench.replay import POLICIES, hit_rate, read_requests, slots_of
from expertserve.config import Settings
from expertserve.data import model_path
from expertserve.engine.load import MemoryNeeds, memory_needs
from expertserve.errors import CapacityError, ConfigError
from expertserve.experts.budget import SlotPlan
from expertserve.experts.memory import AvailableMemory, available_memory
from expertserve.experts.opening import LaneSettings, plan_lane
from expertserve.experts.probe import read_rate
from expertserve.experts.reader import FileReader
from expertserve.gguf.file import GGUFFile
from expertserve.models.model import Model
from expertserve.models.registry import load_model
from expertserve.values import parse_bytes

# Decode hit rate of ours by share of the experts in slots, on the embedded model's recorded routing.
_USUAL_SHARES = (0.0, 0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.65, 0.75, 0.9, 1.0)
_USUAL_HITS = (0.0, 0.188, 0.36, 0.477, 0.636, 0.742, 0.846, 0.916, 0.951, 0.988, 1.0)
_CURVE = tuple(share / 20 for share in range(1, 21))
_KNEE_SPEED = 0.9  # of the speed that all of what fits would give
_PROBE_BYTES = 256 << 20
_PROBE_S = 1.0
_MIB = 1 << 20

HitRate = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that a model needs, by its header.

    Attributes:
        token_bytes: of weights that one token computes with: the dense ones and top-k experts of each layer.
        working_bytes: of top-k experts of each layer; slots for less read the same expert again within one token.
        present_bytes: of the file or files that are here; less than `file_bytes` while they are downloaded.
    """

    file_bytes: int
    present_bytes: int
    expert_bytes: int
    experts: int
    token_experts: int
    token_bytes: int
    working_bytes: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second. The disk's is None where nothing needs to be read or too little of the file is there."""

    memory: float
    disk: float | None
    reader: str


def model_sizes(model: Model) -> Sizes:
    """Sizes of a described model."""
    towers = model.towers.values()
    expert = [(tower, sum(tower.slice_bytes(i) for i in range(len(tower.slices)))) for tower in towers]
    working = sum(min(model.hp.top_k, tower.num_experts) * nbytes for tower, nbytes in expert)
    dense = sum(info.nbytes for info in model.dense_weights())
    if model.head_weight != "token_embd.weight":  # of which a token needs a row
        dense -= model.file.tensors["token_embd.weight"].nbytes
    ends = [0] * len(model.file.paths)
    for info in model.file.tensors.values():
        ends[info.file_index] = max(ends[info.file_index], info.offset + info.nbytes)
    return Sizes(
        file_bytes=sum(ends),
        present_bytes=sum(path.stat().st_size for path in model.file.paths),
        expert_bytes=sum(tower.num_experts * nbytes for tower, nbytes in expert),
        experts=sum(tower.num_experts for tower in towers),
        token_experts=sum(min(model.hp.top_k, tower.num_experts) for tower in towers),
        token_bytes=dense + working,
        working_bytes=working,
    )


def usual_hit_rate(share: float) -> float:
    """Hit rate with a share of the experts in slots, where nothing is known of the model's routing."""
    return float(np.interp(share, _USUAL_SHARES, _USUAL_HITS))


def traced_hit_rate(path: Path, experts: int) -> HitRate:
    """Hit rates by replay of a trace of the model.

    Raises:
        ConfigError: the file is no trace, or one of another model.
    """
    requests = read_requests(path)
    if requests.num_keys != experts or not requests.counted.any():
        raise ConfigError(f"--trace {path}: no decode of a model with {experts} experts; record one of this model")
    return lambda share: hit_rate(requests, POLICIES["ours"], slots_of(requests, share))


def decode_rate(sizes: Sizes, rates: Rates, share: float, hits: HitRate) -> float | None:
    """Tokens a second that the bytes allow, with a share of the experts in slots; None where the disk is not known."""
    missed = 0.0 if share >= 1 else sizes.token_experts * (1 - hits(share)) * sizes.expert_bytes / sizes.experts
    if missed and rates.disk is None:
        return None
    return 1 / (sizes.token_bytes / rates.memory + (missed / rates.disk if rates.disk else 0.0))


def prefill_ceiling(sizes: Sizes, rates: Rates, share: float, chunk: int) -> float | None:
    """Tokens a second that the disk allows a prompt: each chunk needs every expert once. None: no limit."""
    absent = (1 - share) * sizes.expert_bytes
    return chunk * rates.disk / absent if absent > 0 and rates.disk else None


def memory_rate(threads: int) -> float:
    """Bytes a second at which threads read memory that no cache holds."""
    blocks = np.array_split(np.ones(_PROBE_BYTES // 8, np.int64), threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            began = time.perf_counter()
            list(pool.map(np.add.reduce, blocks))
            best = max(best, _PROBE_BYTES / (time.perf_counter() - began))
    return best


def disk_rate(reader: FileReader, sizes: Sequence[int], slice_bytes: int, threads: int) -> float | None:
    """Bytes a second of reads like those of experts, at places drawn from the first of the files that are there.

    None where too little is there.
    """
    index = int(np.argmax(sizes))
    align = max(reader.align, 4096)
    nbytes = -(-slice_bytes // align) * align
    if sizes[index] < nbytes + align or not hasattr(os, "preadv"):
        return None
    return read_rate(
        reader.disk.descriptors[index],
        sizes[index],
        read_bytes=nbytes,
        align=align,
        threads=threads,
        seconds=_PROBE_S,
        most_bytes=_PROBE_BYTES,
    )


def show_plan(settings: Settings, memory: str | None, trace: Path | None, *, as_json: bool) -> int:
    """Prints the plan of the model that `settings` name; the exit status is that of the refusal, if there is one."""
    with closing(GGUFFile.open(model_path(settings.model), partial=True)) as file:
        model = load_model(file)
        sizes = model_sizes(model)
        found = available_memory() if memory is None else AvailableMemory(_parse_memory(memory), "--memory")
        needs = memory_needs(model, settings, found.nbytes - found.reserve_bytes)
        report: dict[str, object] = {
            "model": file.paths[0].name,
            "memory_bytes": found.nbytes,
            "memory_limited_by": found.limited_by,
            "reserve_bytes": found.reserve_bytes,
            **asdict(sizes),
            **asdict(needs),
        }
        lane = LaneSettings(budget=settings.expert_cache, reader=settings.reader)
        try:
            needs.require_fit()
            plan, reader = plan_lane(file.paths, model.towers, model.hp.top_k, lane, available_bytes=needs.left_bytes)
        except CapacityError as error:
            report |= {"refused": str(error)}
            _print(report, as_json)
            return error.exit_code
        with closing(reader):
            report |= _bounds(settings, sizes, needs, plan, reader, trace)
    _print(report, as_json)
    return 0


def _bounds(
    settings: Settings, sizes: Sizes, needs: MemoryNeeds, plan: SlotPlan, reader: FileReader, trace: Path | None
) -> dict[str, object]:
    share = plan.total_slots / sizes.experts
    hits = usual_hit_rate if trace is None else traced_hit_rate(trace, sizes.experts)
    present = [os.fstat(fd).st_size for fd in reader.disk.descriptors]
    slice_bytes = max(max(group.layout.region_bytes) for group in plan.classes)
    disk = disk_rate(reader, present, slice_bytes, settings.io_threads)
    rates = Rates(memory_rate(settings.threads), disk, reader.mode)
    curve = [(s, hits(s) if s < 1 else 1.0, decode_rate(sizes, rates, s, hits)) for s in _CURVE]
    decode, ceiling = decode_rate(sizes, rates, share, hits), prefill_ceiling(sizes, rates, share, settings.chunk)
    fit = [s for s, _, rate in curve if rate is not None and decode is not None and rate >= _KNEE_SPEED * decode]
    return {
        "slots": plan.total_slots,
        "arena_bytes": plan.arena_bytes,
        "share": share,
        "hit_rate": 1.0 if share >= 1 else hits(share),
        "hit_rate_from": "the embedded model's routing" if trace is None else str(trace),
        "reader": rates.reader,
        "disk_bytes_s": rates.disk,
        "memory_bytes_s": rates.memory,
        "decode_tok_s_at_most": decode,
        "prefill_tok_s_at_most": ceiling,
        "knee_share": min(fit[0], share) if fit else None,
        "curve": [{"share": s, "hit_rate": h, "decode_tok_s_at_most": rate} for s, h, rate in curve],
    }


def _parse_memory(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--memory {text}: {error}") from None


def _print(report: dict[str, object], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report))
        return
    curve = report.pop("curve", None)
    for name, value in report.items():
        print(f"{name.replace('_bytes_s', ' rate').replace('_bytes', '').replace('_', ' '):24s}{_shown(name, value)}")
    if isinstance(curve, list):
        print("slots   hits   decode tok/s at most")
        for row in curve:
            rate = "?" if row["decode_tok_s_at_most"] is None else f"{row['decode_tok_s_at_most']:.2f}"
            print(f"{row['share']:5.0%}  {row['hit_rate']:5.1%}  {rate:>12}")


def _shown(name: str, value: object) -> str:
    if value is None:
        return "not known" if name != "prefill_tok_s_at_most" else "no limit by the disk"
    if name.endswith("_bytes_s") and isinstance(value, float):
        return f"{value / 1e9:.2f} GB/s"
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / _MIB:,.1f} MiB"
    if isinstance(value, float):
        return f"{value:.1%}" if name in ("share", "hit_rate", "knee_share") else f"{value:.2f}"
    return str(value)
