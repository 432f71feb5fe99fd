"""A forward on any device with a lane of any size, for tests below the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np

from expertserve.experts.lane import ExpertLane
from expertserve.experts.opening import LaneSettings
from expertserve.experts.stats import ExpertStats
from expertserve.gguf.file import GGUFFile
from expertserve.models.batch import Batch
from expertserve.models.forward import Forward
from expertserve.models.registry import load_model
from expertserve.ops.base import KVType
from expertserve.ops.factory import make_backend
from expertserve.values import parse_budget, parse_budget_or_off


@contextmanager
def open_forward(
    path: Path,
    *,
    device: str = "cpu",
    kv_type: str = "f16",
    flash: bool = True,
    budget: str = "100%",
    reader: str = "buffered",
    lookahead: Literal["on", "off", "auto"] = "auto",
    max_rows: int = 64,
    cells: int = 512,
    stats: ExpertStats | None = None,
    draft: bool = False,
    state_slots: int | None = None,
    host_cache: str = "auto",
    trace: Path | None = None,
    threads: int = 1,
) -> Iterator[Forward]:
    """A loaded model; `budget` is what `--expert-cache` takes."""
    file = GGUFFile.open(path)
    model = load_model(file, draft=draft)
    model.fit_context(cells)
    backend = make_backend(device, threads=threads, flash_attention=flash)
    backend.check(model.dense_weights(), model.towers.values())
    settings = LaneSettings(
        device=device,
        budget=parse_budget(budget),
        reader=reader,
        lookahead=lookahead,
        host_cache=parse_budget_or_off(host_cache),
        trace=trace,
    )
    stats = stats or ExpertStats(every=0, emit=lambda line: None)
    lane = ExpertLane.open(file, model.towers, model.hp.top_k, settings, stats)
    backend.load_weights(model.dense_weights(), file.read_tensor, lambda nbytes: None)
    forward = Forward(
        model,
        backend,
        lane,
        max_rows=max_rows,
        kv_cells=cells,
        kv_type=KVType(kv_type),
        min_outputs=1,
        state_slots=cells + 1 if state_slots is None else state_slots,
    )
    forward.prepare()
    try:
        yield forward
    finally:
        forward.close()


def make_batch(
    tokens: list[int], start: int = 0, *, n_kv: int = 256, all_outputs: bool = True, ahead: int = 0
) -> Batch:
    """One sequence's tokens from position `start`, in cells equal to their positions.

    The slot of a recurrent state is the number of tokens it has seen. A draft's tokens are `ahead` of their cells.
    """
    rows = len(tokens)
    positions = np.arange(start, start + rows, dtype=np.int32)
    visible = np.arange(n_kv)[None, :] <= positions[:, None]
    return Batch(
        tokens=np.array(tokens, np.int32),
        positions=positions + np.int32(ahead),
        cells=positions.astype(np.int64),
        mask=np.where(visible, 0, -np.inf).astype(np.float16),
        outputs=np.arange(0 if all_outputs else rows - 1, rows, dtype=np.int32),
        decode_rows=int(rows == 1 and start > 0),
        runs=np.array([[start or -1, start + rows, 0, rows]], np.int32),
    )


def greedy(forward: Forward, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """`count` greedy tokens after `prompt`, each with the gap between the two best logits."""
    logits, tokens, gaps = forward(make_batch(prompt))[-1], [], []
    for i in range(count):
        order = np.argsort(-logits, kind="stable")
        tokens.append(int(order[0]))
        gaps.append(float(logits[order[0]] - logits[order[1]]))
        logits = forward(make_batch([tokens[-1]], len(prompt) + i))[0]
    return tokens, gaps
