"""Made-up models through the CUDA backend, on emulated kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from expertserve.experts.budget import size_classes
from expertserve.experts.stats import ExpertStats
from expertserve.gguf.file import GGUFFile
from expertserve.models.registry import load_model
from tests.cuda.emulator import available
from tests.cuda.fake_device import FakeDevice, installed
from tests.made import MADE
from tests.made.model import prompt
from tests.models.build import make_batch, open_forward
from tests.parity.test_keystone import cells_of, logits_of

pytestmark = pytest.mark.skipif(not available, reason="needs g++")


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("architecture", MADE)
def test_logits_are_those_of_the_reference(architecture: str, kind: str, made: Callable[[str, str], Path]) -> None:
    found = []
    for device in ("cuda", "reference"):
        with (
            installed(FakeDevice()),
            open_forward(made(architecture, kind), device=device, kv_type="f32", cells=256) as forward,
        ):
            found.append(forward(make_batch(prompt(40))).copy())
    assert np.abs(found[0] - found[1]).max() <= 1e-3


@pytest.mark.parametrize("architecture", MADE)
def test_streamed_equals_resident_bit_for_bit(architecture: str, made: Callable[[str, str], Path]) -> None:
    path, outputs = made(architecture, "q8_0"), []
    model = load_model(GGUFFile.open(path))
    fewest = model.hp.top_k * len(size_classes(model.towers, 1))
    stats = ExpertStats(every=0, emit=lambda line: None)
    for budget in (str(fewest), "100%"):
        with (
            installed(FakeDevice()),
            open_forward(path, device="cuda", budget=budget, max_rows=12, cells=cells_of(2), stats=stats) as forward,
        ):
            outputs.append(logits_of(forward, 12, 2))
    assert np.isfinite(outputs[0]).all() and np.array_equal(*outputs)
    assert stats.total().misses > 0 and stats.total().exhausted == 0
