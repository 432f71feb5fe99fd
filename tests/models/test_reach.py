"""Windows and chunks: what a layer may see is counted in positions, whatever the cells and the batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from expertserve.gguf.file import GGUFFile
from expertserve.models import llama4
from expertserve.models.batch import Reach
from expertserve.models.gemma4 import Gemma4
from expertserve.models.gptoss import GptOss
from expertserve.models.gqa import GqaModel
from expertserve.models.registry import load_model
from tests.engine.test_batching import prompt
from tests.models.build import make_batch, open_forward
from tests.parity.oracle import ORACLE

PATH = ORACLE / "gpt-oss" / "model-q4_k.gguf"
GEMMA = ORACLE / "gemma4-moe" / "model-q4_k.gguf"
CHUNKED = ORACLE / "llama4" / "model-q4_k.gguf"
WINDOW, LAYERS = 32, 3
needs_fixtures = pytest.mark.skipif(not PATH.exists(), reason="needs the oracle fixtures beside the checkout")


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, and steps of the temperature, of WINDOW tokens instead of 8192."""
    monkeypatch.setattr(llama4, "CHUNK", WINDOW)
    monkeypatch.setattr(llama4, "TEMPERATURE_STEP", WINDOW)


def test_a_window_counts_the_token_itself_and_a_chunk_begins_at_its_multiple() -> None:
    at = np.arange(20, dtype=np.int32)
    position = np.array([[9], [16]], np.int32)
    assert [np.flatnonzero(row[:17]).min() for row in Reach(4).includes(position, at)] == [6, 13]
    assert [np.flatnonzero(row[:17]).min() for row in Reach(8, chunked=True).includes(position, at)] == [8, 16]


@needs_fixtures
@pytest.mark.shared
@pytest.mark.parametrize(("path", "family"), [(PATH, GptOss), (GEMMA, Gemma4)], ids=["gpt-oss", "gemma4"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_token_out_of_every_window_counts_only_by_way_of_layers_without(
    monkeypatch: pytest.MonkeyPatch, path: Path, family: type[GqaModel], everywhere: bool
) -> None:
    if everywhere:
        monkeypatch.setattr(family, "mask", lambda self, layer: "mask.window")
    tokens = prompt(1, 130)
    reached = len(tokens) - LAYERS * (WINDOW - 1) - 1  # the first token that the last one's logits know of
    with open_forward(path, device="reference", kv_type="f32", max_rows=130) as forward:
        whole = forward(make_batch(tokens))[-1].copy()
        for changed, seen in ((reached - 1, not everywhere), (reached, True)):
            other = [*tokens[:changed], (tokens[changed] + 1) % 256, *tokens[changed + 1 :]]
            assert np.array_equal(forward(make_batch(other))[-1], whole) != seen


@needs_fixtures
@pytest.mark.shared
@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_token_of_an_earlier_chunk_counts_only_by_way_of_layers_that_see_all(
    monkeypatch: pytest.MonkeyPatch, everywhere: bool
) -> None:
    if everywhere:
        monkeypatch.setattr(llama4.Llama4, "mask", lambda self, layer: "mask.chunk")
    tokens, start = prompt(1, 130), 128  # the last token's chunk begins there
    with open_forward(CHUNKED, device="reference", kv_type="f32", max_rows=130) as forward:
        whole = forward(make_batch(tokens))[-1].copy()
        for changed, seen in ((start - 1, not everywhere), (start, True)):
            other = [*tokens[:changed], (tokens[changed] + 1) % 256, *tokens[changed + 1 :]]
            assert np.array_equal(forward(make_batch(other))[-1], whole) != seen


@needs_fixtures
@pytest.mark.shared
@pytest.mark.parametrize(
    ("path", "seen"),
    [
        (PATH, ["mask.window", "mask"] * 2),
        (GEMMA, ["mask.window"] * 2 + ["mask"]),
        (CHUNKED, ["mask.chunk"] * 3 + ["mask"]),
    ],
)
def test_each_layer_attends_as_far_as_its_kind_does(path: Path, seen: list[str]) -> None:
    model = load_model(GGUFFile.open(path))
    assert isinstance(model, GqaModel)
    masks = [model.mask(layer) for layer in range(model.hp.num_layers)]
    assert masks == seen[: len(masks)] and set(masks) - {"mask"} == set(model.reaches())


def test_the_temperature_rises_by_whole_steps_of_the_position() -> None:
    found = llama4.temperature(np.array([0, 8190, 8191, 16382, 16383], np.int32))
    assert np.allclose(found, [1, 1, 1 + 0.1 * np.log(2), 1 + 0.1 * np.log(2), 1 + 0.1 * np.log(3)])


@needs_fixtures
@pytest.mark.shared
@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("path", [PATH, GEMMA, CHUNKED], ids=["windows", "windows and wide heads", "chunks"])
def test_reaches_hold_over_steps_and_in_scattered_cells(path: Path) -> None:
    tokens = prompt(2, 100)
    with open_forward(path, device="reference", kv_type="f32", max_rows=100) as forward:
        whole = forward(make_batch(tokens)).copy()
        for start in range(0, 100, 7):
            part = forward(make_batch(tokens[start : start + 7], start))
            assert np.abs(part - whole[start : start + 7]).max() < 1e-4
        cells = np.random.default_rng(0).permutation(256)
        for start in range(0, 100, 50):
            batch = make_batch(tokens[start : start + 50], start)
            mask = np.full_like(batch.mask, -np.inf)
            mask[:, cells] = batch.mask
            part = forward(replace(batch, cells=cells[batch.cells], mask=mask))
            assert np.abs(part - whole[start : start + 50]).max() < 1e-4
