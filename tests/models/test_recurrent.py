"""Recurrent state: however a prompt is cut the state is the same, and the engine's streams equal themselves alone."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from expertserve.models.forward import Forward
from tests.engine.fakes import assert_nothing_leaks
from tests.engine.test_batching import prompt
from tests.engine.test_real_model import equal_up_to_near_ties, serve
from tests.models.build import make_batch, open_forward
from tests.parity.oracle import ORACLE

FIXTURES = [
    "qwen35moe/model-f16.gguf",
    "qwen35moe-fused/model-q4_k.gguf",
    "qwen3next-mtp/model-q4_k.gguf",
    "lfm2moe/model-q4_k.gguf",
    "granitehybrid/model-q4_k.gguf",
]
LENGTH = 130
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not (ORACLE / FIXTURES[0]).exists(), reason="needs the oracle fixtures beside the checkout"),
]


def states_after(forward: Forward, tokens: int) -> NDArray[np.float32]:
    """Every recurrent layer's state after that many tokens, which lies in the slot of that number."""
    parts = []
    for layout in forward.model.recurrent_layouts():
        stores = forward._backend.states(layout.layer)  # type: ignore[attr-defined]
        for store, shape in zip(stores, (layout.conv_shape, layout.matrix_shape), strict=True):
            if math.prod(shape) == 0:
                continue
            if isinstance(store, int):  # an address
                store = np.ctypeslib.as_array((ctypes.c_float * (513 * math.prod(shape))).from_address(store))
            parts.append(store.reshape(-1, math.prod(shape))[tokens].copy())
    return np.concatenate(parts)


def prefill(path: Path, chunk: int, device: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The state after LENGTH tokens in chunks, and the last token's logits; float32 KV cache and plain attention."""
    tokens = prompt(3, LENGTH)
    with open_forward(path, device=device, kv_type="f32", flash=False, max_rows=LENGTH) as forward:
        for start in range(0, LENGTH, chunk):
            logits = forward(make_batch(tokens[start : start + chunk], start))
        return states_after(forward, LENGTH), logits[-1].copy()


# In float32 only the order of sums differs. On the CPU products round their input to half precision or 8 bits; a sum
# that ends on the other side of a step (1/254 of a block's largest value) shows whole: hence one in a hundred.
@pytest.mark.parametrize(("device", "tolerance"), [("reference", 1e-4), ("cpu", 1e-2)])
@pytest.mark.parametrize("fixture", FIXTURES)
def test_the_state_does_not_depend_on_how_a_prompt_is_cut(fixture: str, device: str, tolerance: float) -> None:
    whole, logits = prefill(ORACLE / fixture, LENGTH, device)
    assert np.abs(whole).max() > 0.1
    for chunk in (1, 7, 64):
        state, last = prefill(ORACLE / fixture, chunk, device)
        assert np.abs(state - whole).max() < tolerance * np.abs(whole).max(), chunk
        assert np.abs(last - logits).max() < 4 * tolerance * np.abs(logits).max(), chunk
    again, same = prefill(ORACLE / fixture, LENGTH, device)
    assert np.array_equal(again, whole) and np.array_equal(same, logits)


@pytest.mark.parametrize("fixture", FIXTURES)
def test_streams_of_a_recurrent_model_equal_themselves_alone(fixture: str) -> None:
    shared = prompt(1, 30)
    prompts = [shared[: 10 + 3 * i] + prompt(i, 4 * i) for i in range(7)] + [shared[:10]]
    with open_forward(ORACLE / fixture, kv_type="f32", flash=False, cells=256) as forward:
        alone = [serve(forward, [tokens], 1)[0][0] for tokens in prompts]
        together, engine = serve(forward, prompts, 8)
    assert engine.snapshot()["preemptions"] > 0, "memory was not short"
    for one, other in zip(alone, together, strict=True):
        assert equal_up_to_near_ties(one, other), f"{other.tokens} instead of {one.tokens}"
    assert sum(one.tokens == other.tokens for one, other in zip(alone, together, strict=True)) >= 6
    assert_nothing_leaks(engine)


def test_a_run_writes_its_target_and_leaves_its_source_as_it_was() -> None:
    tokens = prompt(5, 12)
    with open_forward(ORACLE / FIXTURES[0]) as forward:
        forward(make_batch(tokens[:8]))
        before = states_after(forward, 8)
        forward(make_batch(tokens[8:], 8))
        first = states_after(forward, 12)
        forward(make_batch(tokens[8:], 8))
        assert np.array_equal(states_after(forward, 8), before) and not np.array_equal(first, before)
        assert np.array_equal(states_after(forward, 12), first)
