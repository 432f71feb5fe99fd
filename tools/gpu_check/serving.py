"""A whole model on the device: the embedded one, streamed at several budgets, beside the reference operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from expertserve.data import DEMO_NAME, model_path
from expertserve.experts.lane import ExpertLane
from expertserve.experts.opening import LaneSettings
from expertserve.experts.stats import ExpertStats
from expertserve.gguf.file import GGUFFile
from expertserve.models.batch import Batch
from expertserve.models.forward import Forward
from expertserve.models.registry import load_model
from expertserve.ops.base import Backend, KVType
from expertserve.ops.cuda.backend import CudaBackend
from expertserve.ops.cuda.device import Device
from expertserve.ops.reference import ReferenceBackend
from expertserve.values import parse_budget, parse_budget_or_off
from tools.gpu_check.report import Report

CELLS = 512


@dataclass
class Run:
    """One model run: logits of a prompt and of the tokens after it, seconds, and what the lane counted."""

    logits: NDArray[np.float32]
    prefill_s: float
    step_s: float
    stats: ExpertStats
    device_bytes: int


@contextmanager
def opened(
    backend: Backend, device: str, budget: str, host_cache: str, rows: int
) -> Iterator[tuple[Forward, ExpertStats]]:
    """The embedded model on a backend; `budget` and `host_cache` are what the options of these names take."""
    file = GGUFFile.open(model_path(DEMO_NAME))
    model = load_model(file)
    settings = LaneSettings(
        device=device, budget=parse_budget(budget), reader="buffered", host_cache=parse_budget_or_off(host_cache)
    )
    stats = ExpertStats(every=0, emit=lambda line: None)
    lane = ExpertLane.open(file, model.towers, model.hp.top_k, settings, stats)
    backend.check(model.dense_weights(), model.towers.values())
    backend.load_weights(model.dense_weights(), file.read_tensor, lambda nbytes: None)
    forward = Forward(
        model, backend, lane, max_rows=rows, kv_cells=CELLS, kv_type=KVType.F16, min_outputs=1, state_slots=4
    )
    forward.prepare()
    try:
        yield forward, stats
    finally:
        forward.close()


def batch(tokens: list[int], start: int) -> Batch:
    """One sequence's next tokens; every row's logits are asked for."""
    rows = len(tokens)
    positions = np.arange(start, start + rows, dtype=np.int32)
    visible = np.arange(CELLS)[None, :] <= positions[:, None]
    return Batch(
        tokens=np.array(tokens, np.int32),
        positions=positions,
        cells=positions.astype(np.int64),
        mask=np.where(visible, 0, -np.inf).astype(np.float16),
        outputs=np.arange(rows, dtype=np.int32),
        decode_rows=int(rows == 1),
        runs=np.array([[start or -1, start + rows, 0, rows]], np.int32),
    )


def run(device: Device | None, budget: str, host_cache: str, prompt: int, decode: int) -> Run:
    """A prompt and the tokens after it, all given; None is the reference."""
    backend: Backend = ReferenceBackend() if device is None else CudaBackend(device)
    free = device.free_bytes() if device is not None else 0
    with opened(backend, "reference" if device is None else "cuda", budget, host_cache, prompt) as (forward, stats):
        ids = np.random.default_rng(0).integers(5, 1000, prompt + decode).tolist()
        began = perf_counter()
        logits = [forward(batch(ids[:prompt], 0)).copy()]
        prefill_s, steps = perf_counter() - began, []
        for at in range(prompt, prompt + decode):
            began = perf_counter()
            logits.append(forward(batch(ids[at : at + 1], at)).copy())
            steps.append(perf_counter() - began)
        used = free - device.free_bytes() if device is not None else 0
    return Run(np.concatenate(logits), prefill_s, median(steps), stats, used)


def check_serving(device: Device, report: Report, *, prompt: int, decode: int) -> None:
    """Streamed equals resident; resident equals the reference; what is below the arena's size is served."""
    resident = run(device, "100%", "off", prompt, decode)
    exact = run(None, "100%", "off", prompt, decode)

    def agrees() -> tuple[bool, str]:
        errors = np.linalg.norm(resident.logits - exact.logits, axis=1) / np.linalg.norm(exact.logits, axis=1)
        same = float((resident.logits.argmax(axis=1) == exact.logits.argmax(axis=1)).mean())
        return bool(
            np.median(errors) < 1e-2 and same > 0.95
        ), f"median error {np.median(errors):.1e}, best token {same:.1%}"

    report.check("embedded model beside the reference", agrees)
    for budget, host_cache in (("25%", "off"), ("50%", "off"), ("25%", "auto")):

        def equal(budget: str = budget, host_cache: str = host_cache) -> tuple[bool, str]:
            got = run(device, budget, host_cache, prompt, decode)
            total = got.stats.total()
            sound = total.misses > 0 and total.exhausted == 0 and got.stats.steps == decode + 1
            sound = sound and (total.lifted > 0) == (host_cache == "auto" and not device.reads_host_memory)
            figure = f"{total.misses} misses, {total.lifted} lifted, {1 / got.step_s:.1f} tok/s"
            return bool(np.array_equal(got.logits, resident.logits)) and sound, figure

        report.check(f"streamed equals resident: {budget} in slots, host cache {host_cache}", equal)

    def small() -> tuple[bool, str]:
        few = run(device, "25%", "off", prompt, decode)
        saved = resident.device_bytes - few.device_bytes
        whole = model_path(DEMO_NAME).stat().st_size
        return (
            saved > whole // 2,
            f"{few.device_bytes >> 20} MiB on the device at 25%, {saved >> 20} MiB fewer than all",
        )

    report.check("a model larger than its share of the device", small)
    report.note(
        "embedded model, resident", f"prefill {prompt / resident.prefill_s:.0f} tok/s, decode {1 / resident.step_s:.1f}"
    )
