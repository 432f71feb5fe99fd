"""`expertserve plan`: what of a model fits, and how fast it would run, from its header and some seconds of measuring.

Owns the plan and its table; sizes and refusals are those of the loader and the slot planner themselves. What computing
costs is measured with the first layers of the model and made-up weights (miniature.py), what reading costs by reads of
its experts (disk_probe.py); costs.py makes a step of them:

    token = step + layers * (layer + top-k * expert) + reads * miss + waiting

where reads and waiting are those of the lane's events with the expected share of experts in slots. That share comes
from a trace of the model where there is one, else from the embedded model's, whose routing is that of text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from expertserve.bench.costs import ComputeCosts, DiskCosts, LookAheadShares, StepTime, decode_step
from expertserve.bench.disk_probe import DiskProbe, probe_disk
from expertserve.bench.miniature import Measured, measure_costs
from expertserve.bench.recall import recall_of
from expertserve.bench.replay import POLICIES, hit_rate, read_requests, slots_of
from expertserve.config import Settings
from expertserve.data import model_path
from expertserve.engine.load import memory_needs
from expertserve.errors import CapacityError, ConfigError, ExpertServeError, KernelUnavailableError
from expertserve.experts.budget import SlotPlan
from expertserve.experts.knee import fewest_within
from expertserve.experts.memory import AvailableMemory, available_memory
from expertserve.experts.opening import LaneSettings, plan_lane
from expertserve.gguf.file import GGUFFile
from expertserve.models.model import Model
from expertserve.models.registry import load_model
from expertserve.ops.factory import device_workspace, make_backend
from expertserve.values import parse_bytes, size_text

# Decode hit rate of ours by share of the experts in slots, on the embedded model's recorded routing.
_USUAL_SHARES = (0.0, 0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.65, 0.75, 0.9, 1.0)
_USUAL_HITS = (0.0, 0.188, 0.36, 0.477, 0.636, 0.742, 0.846, 0.916, 0.951, 0.988, 1.0)
_CURVE = tuple(share / 20 for share in range(1, 21))
_STEPS = 64  # of decode, with misses drawn at the expected rate
USUAL_AHEAD = LookAheadShares(used=0.75, wasted=0.27)  # as measured with the next layer's router; see EXPERIMENTS
_LABELS = {
    "expert_bytes": "all experts",
    "token_bytes": "read by a token",
    "working_bytes": "experts of a token",
    "dense_bytes": "dense weights",
    "kv_bytes": "KV cache",
    "state_bytes": "recurrent states",
    "left_bytes": "left for slots",
    "arena_bytes": "slots take",
}

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
class Decode:
    """A predicted rate: tokens a second, the mean step, and whether look-ahead is on."""

    tok_s: float
    step: StepTime
    ahead: bool


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


def predict_decode(
    compute: ComputeCosts,
    disk: DiskCosts | None,
    layers: int,
    top_k: int,
    hits: float,
    lookahead: str,
    foreseen: LookAheadShares = USUAL_AHEAD,
) -> Decode | None:
    """Decode at a hit rate; None where experts have to be read and nothing is known of the disk.

    With look-ahead on `auto` the faster of both, as the lane's own trial chooses; it foresees what `foreseen` says.
    """
    if hits < 1 and disk is None:
        return None
    disk = disk or DiskCosts(1.0, 0.0, 1, 1, 1.0)
    misses = np.random.default_rng(0).binomial(top_k, 1 - hits, (_STEPS, layers))
    lookahead = lookahead if hits < 1 else "off"
    step, ahead = decode_step(misses.tolist(), top_k, compute, disk, lookahead, foreseen)
    return Decode(1 / step.seconds, step, ahead)


def predict_prefill(
    measured: Measured, disk: DiskCosts | None, layers: int, experts: int, share: float
) -> float | None:
    """Tokens a second of a long prompt: each chunk needs every expert once, read while others are computed.

    None where experts have to be read and nothing is known of the disk.
    """
    costs, absent = measured.prefill, (1 - share) * experts / layers
    if absent and disk is None:
        return None
    reading = absent * disk.expert_bytes / disk.bandwidth if disk else 0.0
    computing = costs.layer_s + costs.experts_s + absent * measured.compute.miss_s
    return costs.rows / (costs.rest_s + layers * max(computing, reading))


def knee_share(hits: HitRate, share: float) -> float:
    """The least share of experts in slots that answers about as many selections as `share` does."""
    shares = np.array([0.0, *_CURVE])
    gains = np.diff([0.0, *(hits(s) if s < 1 else 1.0 for s in shares[1:].tolist())])
    return float(shares[fewest_within(gains, max(1, round(share * len(_CURVE))))])


def show_plan(settings: Settings, memory: str | None, trace: Path | None, *, as_json: bool) -> int:
    """Prints the plan of the model that `settings` name; the exit status is that of the refusal, if there is one."""
    with closing(GGUFFile.open(model_path(settings.model), partial=True)) as file:
        model = load_model(file)
        sizes = model_sizes(model)
        found, reserve = _memory(settings.device, memory)
        needs = memory_needs(model, settings, found.nbytes, reserve)
        report: dict[str, object] = {
            "model": file.paths[0].name,
            "device": settings.device,
            "memory_bytes": found.nbytes,
            "memory_limited_by": found.limited_by,
            **asdict(sizes),
            **asdict(needs),
        }
        lane = LaneSettings(device=settings.device, budget=settings.expert_cache, reader=settings.reader)
        try:
            needs.require_fit()
            plan, reader = plan_lane(file.paths, model.towers, model.hp.top_k, lane, available_bytes=needs.left_bytes)
        except CapacityError as error:
            report |= {"refused": str(error)}
            _print(report, as_json)
            return error.exit_code
        reader.close()
        report |= _prediction(model, settings, sizes, plan, reader.mode, trace)
    _print(report, as_json)
    return 0


def _memory(device: str, given: str | None) -> tuple[AvailableMemory, int]:
    """The memory where a device computes, unless it is given, and how many bytes of it to leave alone.

    Raises:
        KernelUnavailableError: the device is not here.
    """
    if given is not None:
        found = AvailableMemory(_parse_memory(given), "--memory")
        workspace = device_workspace(device, found.nbytes)
        return found, found.reserve_bytes if workspace is None else workspace
    try:
        backend = make_backend(device, threads=1, flash_attention=True)
    except KernelUnavailableError as error:
        hint = "to plan for a machine that has it, say how much memory it has there, as in --memory 24GiB"
        raise KernelUnavailableError(f"{error}; {hint}") from None
    with closing(backend):
        own = backend.memory()
    if own is not None:
        return AvailableMemory(own[0], f"the {device} device"), own[1]
    found = available_memory()
    return found, found.reserve_bytes


def _prediction(
    model: Model, settings: Settings, sizes: Sizes, plan: SlotPlan, reader: str, trace: Path | None
) -> dict[str, object]:
    share = plan.total_slots / sizes.experts
    hits = usual_hit_rate if trace is None else traced_hit_rate(trace, sizes.experts)
    recall = None if trace is None else recall_of(trace)
    foreseen = USUAL_AHEAD if recall is None else recall.shares
    layers, top_k = len(model.towers), model.hp.top_k
    report: dict[str, object] = {
        "slots": plan.total_slots,
        "arena_bytes": plan.arena_bytes,
        "share": share,
        "hit_rate": 1.0 if share >= 1 else hits(share),
        "hit_rate_from": "the embedded model's routing" if trace is None else str(trace),
        "knee_share": knee_share(hits, share),
        "reader": reader,
    }
    if device_workspace(settings.device, 0) is not None:
        report["not_counted"] = "experts that --host-cache keeps, which come faster than from the file"
    with probe_disk(model, settings.io_threads) as probe:
        try:
            measured = measure_costs(model, settings, between=probe.take)
        except ExpertServeError as error:
            not_measured = {"not_measured": str(error), "decode_tok_s": None, "prefill_tok_s": None}
            return report | _about_disk(probe, reader) | not_measured
        disk = probe.costs
        report |= _about_disk(probe, reader)

    def decode(share: float) -> Decode | None:
        rate = hits(share) if share < 1 else 1.0
        return predict_decode(measured.compute, disk, layers, top_k, rate, settings.lookahead, foreseen)

    report |= _about_compute(measured)
    report |= _about_token(decode(share), measured.compute, layers, top_k)
    report["prefill_tok_s"] = predict_prefill(measured, disk, layers, sizes.experts, share)
    curve = [(s, hits(s) if s < 1 else 1.0, decode(s)) for s in _CURVE]
    rows = [{"share": s, "hit_rate": h, "decode_tok_s": d and d.tok_s} for s, h, d in curve]
    return report | {"curve": rows}


def _about_disk(probe: DiskProbe, reader: str) -> dict[str, object]:
    rate = probe.rate
    if rate is None:
        return {"disk_bytes_s": None, "disk_trial": probe.how}
    cached = "" if reader == "direct" else "; serving would read through the page cache, faster where it has the file"
    return {
        "disk_bytes_s": rate.bandwidth,
        "disk_slowest_bytes_s": rate.slowest,
        "disk_fastest_bytes_s": rate.fastest,
        "disk_first_bytes_s": rate.first,
        "disk_latency_ms": 1000 * rate.latency_s,
        "disk_trial": probe.how + cached,
    }


def _about_compute(measured: Measured) -> dict[str, object]:
    compute = measured.compute
    return {
        "measured_with": f"the model's first {measured.routed_layers} routed layers, made-up weights, "
        f"{measured.prefill.rows} rows of prefill"
        + ("" if measured.streamed else "; what a read costs the processor is not known, its experts are not here"),
        "step_ms": 1000 * compute.step_s,
        "layer_ms": 1000 * compute.layer_s,
        "expert_ms": 1000 * compute.expert_s,
        "miss_ms": 1000 * compute.miss_s,
        "guess_ms": 1000 * compute.guess_s,
    }


def _about_token(decode: Decode | None, compute: ComputeCosts, layers: int, top_k: int) -> dict[str, object]:
    if decode is None:
        return {"decode_tok_s": None}
    step = decode.step
    guesses = f" + {layers} x {1000 * compute.guess_s:.3f} of guessing" if decode.ahead else ""
    return {
        "lookahead": "on" if decode.ahead else "off",
        "token_ms": 1000 * step.seconds,
        "reads_a_token": float(step.reads),
        "waiting_ms": 1000 * step.waiting,
        "formula": f"{1000 * compute.step_s:.2f} + {layers} x ({1000 * compute.layer_s:.3f} + {top_k} x "
        f"{1000 * compute.expert_s:.3f}){guesses} + {step.reads:.1f} reads x {1000 * compute.miss_s:.3f} + "
        f"{1000 * step.waiting:.2f} of waiting = {1000 * step.seconds:.2f} ms a token",
        "decode_tok_s": decode.tok_s,
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
    print(f"{_answer(report)}\n")
    report.pop("refused", None)
    for name, value in report.items():
        label = _LABELS.get(name) or name.replace("_bytes_s", " rate").replace("_bytes", "").replace("_", " ")
        print(f"{label:24s}{_shown(name, value)}")
    if isinstance(curve, list):
        print("slots   hits   decode tok/s")
        for row in curve:
            rate = "?" if row["decode_tok_s"] is None else f"{row['decode_tok_s']:.2f}"
            print(f"{row['share']:5.0%}  {row['hit_rate']:5.1%}  {rate:>12}")


def _answer(report: Mapping[str, object]) -> str:
    """Whether it runs and how fast, in a line."""
    if "refused" in report:
        return f"It would not run: {report['refused']}."
    rates = [report.get(name) for name in ("decode_tok_s", "prefill_tok_s")]
    decode, prefill = (f"{rate:,.1f} tokens a second" if isinstance(rate, float) else "not known" for rate in rates)
    return f"It would run, {report['share']:.0%} of its experts in slots. Decode: {decode}; long prompts: {prefill}."


def _shown(name: str, value: object) -> str:
    if value is None:
        return "not known"
    if name.endswith("_bytes_s") and isinstance(value, float):
        return f"{value / 1e9:.2f} GB/s"
    if name.endswith("_bytes") and isinstance(value, int):
        return size_text(value)
    if isinstance(value, float):
        if name.endswith("_ms"):
            return f"{value:.3f}"
        return f"{value:.1%}" if name in ("share", "hit_rate", "knee_share") else f"{value:.2f}"
    return str(value)
