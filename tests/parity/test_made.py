"""Families without an oracle fixture: made-up models give llama.cpp's log-probabilities, streamed or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.made import MADE
from tests.made.model import CONTEXT, TYPES, prompt
from tests.models.build import make_batch, open_forward
from tests.parity.peer import llama_cpp, log_softmax, needs_peer
from tests.parity.test_keystone import Combination, check

LENGTHS = (1, 2, 3, 5, 8, 24, 200)  # the last is longer than any window
CHUNK = 64
MadeFile = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def peers(made: MadeFile) -> Callable[[str], dict[str, NDArray[np.float64]]]:
    """llama.cpp's log-probabilities after prompts of LENGTHS, [lengths, vocab], by architecture and type."""

    @cache
    def ask(architecture: str) -> dict[str, NDArray[np.float64]]:
        paths = [made(architecture, kind) for kind in TYPES]
        return dict(zip(TYPES, llama_cpp(paths, CONTEXT, [prompt(n) for n in LENGTHS]), strict=True))

    return ask


def ours(path: Path, device: str) -> NDArray[np.float64]:
    """Ours: the prompt in chunks, the last token by itself."""
    tokens, rows = prompt(LENGTHS[-1]), []
    with open_forward(path, device=device, kv_type="f32", flash=False, max_rows=CHUNK, cells=CONTEXT) as forward:
        starts = [*range(0, len(tokens) - 1, CHUNK), len(tokens) - 1]
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            rows.append(forward(make_batch(tokens[start:end], start)).copy())
    return log_softmax(np.concatenate(rows)[np.array(LENGTHS) - 1])


@needs_peer
@pytest.mark.parametrize("architecture", MADE)
def test_reference_operators_give_llama_cpp_s_answer(
    architecture: str, made: MadeFile, peers: Callable[[str], dict[str, NDArray[np.float64]]]
) -> None:
    exact = peers(architecture)["f32"]
    assert (exact.std(axis=1) > 1).all(), "logits that hardly differ would prove nothing"
    difference = np.abs(ours(made(architecture, "f32"), "reference") - exact).max()
    assert difference <= MADE[architecture].tolerance


@needs_peer
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("architecture", MADE)
def test_the_cpu_gives_llama_cpp_s_answer(
    architecture: str, kind: str, made: MadeFile, peers: Callable[[str], dict[str, NDArray[np.float64]]]
) -> None:
    differences = np.abs(ours(made(architecture, kind), "cpu") - peers(architecture)[kind]).max(axis=1)
    # With 8 bits, an input that was rounded the other way shows in all that comes after it.
    allowed = MADE[architecture].narrow_tolerance
    assert np.quantile(differences, 0.25 if kind == "q8_0" else 1) <= allowed, differences


@pytest.mark.parametrize(
    "combination",
    [
        Combination(0, "buffered", "on", 24, 4),
        Combination(0, "mmap", "off", 200, 1),
        Combination(0.5, "buffered", "off", 1, 4),
    ],
    ids=lambda c: "-".join(map(str, c)),
)
@pytest.mark.parametrize("architecture", MADE)
def test_streamed_equals_resident_bit_for_bit(architecture: str, combination: Combination, made: MadeFile) -> None:
    check(made(architecture, "q8_0"), combination)
