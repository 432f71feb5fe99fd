"""A model that fits in memory is served from its mapping: same logits, no reads, and truthful statistics."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from expertserve.errors import ExpertReadError
from expertserve.experts.stats import ExpertStats
from tests.models.build import make_batch, open_forward

TOKENS = list(range(40, 64))


def test_mapped_logits_equal_those_of_slots_bit_for_bit(tiny_moe: Path) -> None:
    with open_forward(tiny_moe, budget="100%") as forward:
        slots = forward(make_batch(TOKENS)).copy()
    with open_forward(tiny_moe, budget="auto", reader="auto") as forward:
        mapped = forward(make_batch(TOKENS)).copy()
    assert np.array_equal(slots, mapped)


def test_mapped_experts_are_hits_that_move_no_bytes(tiny_moe: Path) -> None:
    stats = ExpertStats(every=0, emit=lambda line: None)
    with open_forward(tiny_moe, budget="auto", reader="auto", stats=stats) as forward:
        forward(make_batch(TOKENS))
    total = stats.total()
    assert stats.read_mode == "mapped" and stats.steps == 1
    assert total.hits > 0 and (total.misses, total.fills, total.bytes, total.forced) == (0, 0, 0, 0)


@pytest.mark.parametrize(("budget", "reader"), [("100%", "auto"), ("auto", "buffered")])
def test_a_budget_or_reader_that_was_asked_for_gets_slots(tiny_moe: Path, budget: str, reader: str) -> None:
    stats = ExpertStats(every=0, emit=lambda line: None)
    with open_forward(tiny_moe, budget=budget, reader=reader, stats=stats) as forward:
        forward(make_batch(TOKENS))
    assert stats.read_mode != "mapped" and stats.total().fills > 0


def test_a_mapped_file_cut_short_fails_the_step_by_name(tiny_moe: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(tiny_moe, tmp_path / "cut.gguf"))
    with open_forward(path, budget="auto", reader="auto") as forward:
        forward(make_batch(TOKENS))
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(ExpertReadError, match="changed on disk"):
            forward(make_batch(TOKENS))
