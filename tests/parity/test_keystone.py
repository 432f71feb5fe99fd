"""Streamed logits equal resident ones bit for bit, whatever the slots, reader, look-ahead, prompt and batch.

The suite runs every pair of settings at least once a family; the whole product is marked slow.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from expertserve.experts.budget import size_classes
from expertserve.experts.disk import direct_alignment
from expertserve.experts.stats import ExpertStats
from expertserve.gguf.file import GGUFFile
from expertserve.models.batch import Batch
from expertserve.models.forward import Forward
from expertserve.models.registry import load_model
from tests.models.build import open_forward
from tests.parity.oracle import ORACLE

FIXTURES = [
    "qwen3moe/model-q4_k.gguf",
    "qwen2moe/model-q4_k.gguf",
    "olmoe/model-f16.gguf",
    "mixtral/model-q4_k.gguf",
    "qwen3moe-k256/model-q4_k.gguf",
    "qwen35moe/model-q4_k.gguf",
    "qwen35moe-fused/model-q4_k.gguf",
    "qwen3next-mtp/model-q4_k.gguf",
    "minimax-m2/model-q4_k.gguf",
    "granitemoe/model-q4_k.gguf",
    "hunyuan-moe/model-q4_k.gguf",
    "ernie4_5-moe/model-q4_k.gguf",
    "bailingmoe2/model-q4_k.gguf",
    "glm4moe-nextn/model-q4_k.gguf",
    "deepseek2-v3/model-q4_k.gguf",
    "gpt-oss/model-mxfp4.gguf",
    "lfm2moe/model-q4_k.gguf",
    "phimoe/model-q4_k.gguf",
    "llama4/model-q4_k.gguf",
    "granitehybrid/model-q4_k.gguf",
    "gemma4-moe/model-q4_k.gguf",
]
DECODED = 5
SPAN = 640  # cells of a sequence


class Combination(NamedTuple):
    """One way to run: share of the experts in slots (0: the fewest), reader, look-ahead, prompt length, sequences."""

    share: float
    reader: str
    lookahead: Literal["on", "off"]
    prompt: int
    batch: int


PRODUCT = [
    Combination(*values)
    for values in itertools.product(
        (0, 0.25, 0.5, 1), ("direct", "buffered", "mmap"), ("on", "off"), (1, 24, 512), (1, 4)
    )
]


def pairwise(product: list[Combination]) -> list[Combination]:
    """Few combinations that hold every pair of values of two settings; greedy."""

    def pairs(combination: Combination) -> set[tuple[tuple[int, object], ...]]:
        return set(itertools.combinations(enumerate(combination), 2))

    chosen, missing = [], set().union(*map(pairs, product))
    while missing:
        best = max(product, key=lambda combination: len(pairs(combination) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


def cells_of(batch: int) -> int:
    """Cells of the cache for `batch` sequences."""
    return -(-SPAN * batch // 256) * 256


def joint_batch(starts: list[int], tokens: list[list[int]]) -> Batch:
    """Tokens of several sequences, each from its position `starts[i]`, in ranges of cells of their own."""
    rows = [(i, start + j, token) for i, start in enumerate(starts) for j, token in enumerate(tokens[i])]
    sequence, position, token = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    ends = [start + len(tokens[i]) - 1 for i, start in enumerate(starts)]
    ranges = [np.flatnonzero(sequence == i) for i in range(len(starts))]
    runs = [
        (2 * i + starts[i] % 2 if starts[i] else -1, 2 * i + (ends[i] + 1) % 2, own[0], own[-1] + 1)
        for i, own in enumerate(ranges)
        if own.size
    ]
    n_kv = cells_of(len(starts))
    cell = np.arange(n_kv)
    first = SPAN * sequence
    visible = (cell >= first[:, None]) & (cell <= (first + position)[:, None])
    return Batch(
        tokens=token,
        positions=position,
        cells=(first + position).astype(np.int64),
        mask=np.where(visible, 0, -np.inf).astype(np.float16),
        outputs=np.array([i for i, (seq, at, _) in enumerate(rows) if at == ends[seq]], np.int32),
        decode_rows=len(rows) if all(starts) else 0,
        runs=np.array(runs, np.int32),
    )


def logits_of(forward: Forward, prompt: int, batch: int) -> NDArray[np.float32]:
    """Prefill of `batch` prompts, one after another, then decode of all of them in the same steps."""
    rng = np.random.default_rng(prompt)
    ids = rng.integers(5, min(forward.vocab_size, 250), (batch, prompt + DECODED)).tolist()
    out = []
    for i in range(batch):
        starts, tokens = [0] * batch, [[] for _ in range(batch)]
        tokens[i] = ids[i][:prompt]
        out.append(forward(joint_batch(starts, tokens)).copy())
    for at in range(prompt, prompt + DECODED):
        out.append(forward(joint_batch([at] * batch, [row[at : at + 1] for row in ids])).copy())
    return np.concatenate(out)


def run(path: Path, c: Combination) -> tuple[NDArray[np.float32], ExpertStats]:
    """The logits of a combination, and what the lane counted."""
    file = GGUFFile.open(path)
    model = load_model(file)
    fewest = model.hp.top_k * len(size_classes(model.towers, 1))
    experts = sum(tower.num_experts for tower in model.towers.values())
    stats = ExpertStats(every=0, emit=lambda line: None)
    slots = max(fewest, int(c.share * experts))
    with open_forward(
        path,
        budget=str(slots),
        reader=c.reader,
        lookahead=c.lookahead,
        max_rows=512,
        cells=cells_of(c.batch),
        state_slots=2 * c.batch,
        threads=2,
        stats=stats,
    ) as forward:
        return logits_of(forward, c.prompt, c.batch), stats


@lru_cache
def resident(path: Path, prompt: int, batch: int) -> NDArray[np.float32]:
    """The same from the mapped file: no slot, no reader."""
    cells, states = cells_of(batch), 2 * batch
    with open_forward(path, budget="auto", reader="auto", max_rows=512, cells=cells, state_slots=states) as forward:
        return logits_of(forward, prompt, batch)


def check(path: Path, combination: Combination) -> None:
    expected = resident(path, combination.prompt, combination.batch)
    got, stats = run(path, combination)
    assert np.isfinite(expected).all()
    assert np.array_equal(got, expected), combination
    total = stats.total()
    assert stats.steps == combination.batch + DECODED and total.exhausted == 0 and total.failed == 0
    assert total.misses > 0 or combination.share == 1
    assert stats.read_mode == combination.reader


def skip_what_cannot_run(path: Path, combination: Combination | None = None) -> None:
    if not path.exists():
        pytest.skip("the oracle fixtures (shared/oracle beside the checkout) are absent")
    if (combination is None or combination.reader == "direct") and direct_alignment([path]) is None:
        pytest.skip("this file system has no direct reads")


@pytest.mark.parametrize("combination", pairwise(PRODUCT), ids=lambda c: "-".join(map(str, c)))
@pytest.mark.parametrize("fixture", FIXTURES)
@pytest.mark.shared
def test_every_pair_of_settings(fixture: str, combination: Combination) -> None:
    skip_what_cannot_run(ORACLE / fixture, combination)
    check(ORACLE / fixture, combination)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fixture", FIXTURES)
@pytest.mark.shared
def test_the_whole_product(fixture: str) -> None:
    skip_what_cannot_run(ORACLE / fixture)
    for combination in PRODUCT:
        check(ORACLE / fixture, combination)
