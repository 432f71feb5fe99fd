"""Draft logits are as close to the exact answer as llama.cpp's, for every fixture that has a draft layer."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from expertserve.errors import UnsupportedModelError
from expertserve.gguf.file import GGUFFile
from expertserve.models.registry import load_model
from tests.models.build import make_batch, open_forward
from tests.parity.oracle import ORACLE, assert_parity, reference

FIXTURES = sorted(
    str(path.relative_to(ORACLE))
    for family in ("qwen35moe", "qwen35moe-fused", "qwen3next-mtp", "glm4moe-nextn")
    for path in (ORACLE / family).glob("model-*.gguf")
)
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not FIXTURES, reason="needs the oracle fixtures beside the checkout"),
]


def draft_logits(fixture: str, tokens: list[int], *, device: str, chunks: int = 1) -> NDArray[np.float32]:
    """Row p: the draft layer fed token p + 1 and the trunk's hidden state of position p, at position p + 1."""
    with open_forward(ORACLE / fixture, device=device, kv_type="f32", flash=False, draft=True) as forward:
        forward(make_batch(tokens))
        hidden, out = forward.hidden[: len(tokens) - 1].copy(), []
        for part in np.array_split(np.arange(len(tokens) - 1), chunks):
            following = [tokens[p + 1] for p in part]
            out.append(forward.draft(make_batch(following, int(part[0]), ahead=1), hidden[part]).copy())
        return np.concatenate(out)


@pytest.mark.parametrize("fixture", FIXTURES)
def test_exact_mode_is_as_close_as_llama_cpp(fixture: str) -> None:
    ref = reference(fixture, draft=True)
    for chunks in (1, 5):
        assert_parity(draft_logits(fixture, ref.tokens.tolist(), device="cpu", chunks=chunks), ref, 1.1)


@pytest.mark.parametrize("fixture", FIXTURES)
def test_reference_operators_give_the_exact_answer(fixture: str) -> None:
    ref = reference(fixture, draft=True)
    assert np.abs(draft_logits(fixture, ref.tokens.tolist(), device="reference") - ref.exact).max() <= 1e-3


def test_the_trunk_is_the_same_with_the_draft_layer_loaded_and_without() -> None:
    tokens = reference(FIXTURES[0], draft=True).tokens.tolist()
    found = []
    for draft in (False, True):
        with open_forward(ORACLE / FIXTURES[0], draft=draft) as forward:
            found.append(forward(make_batch(tokens)).copy())
    assert np.array_equal(*found)


def test_a_file_without_a_draft_layer_is_refused_by_name() -> None:
    file = GGUFFile.open(ORACLE / "qwen3moe" / "model-q4_k.gguf")
    with pytest.raises(
        UnsupportedModelError, match=r"model-q4_k.gguf: no layer that predicts further ahead.*--draft off"
    ):
        load_model(file, draft=True)
