"""Layers without routed experts: they run between the others, stream nothing, and a layer with neither is refused."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from expertserve.errors import GGUFError, UnsupportedModelError
from expertserve.experts.stats import ExpertStats
from expertserve.gguf.file import GGUFFile
from expertserve.models.model import Model
from expertserve.models.registry import load_model
from tests.models.build import make_batch, open_forward
from tests.parity.oracle import ORACLE

PATH = ORACLE / "bailingmoe2" / "model-q4_k.gguf"
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not PATH.exists(), reason="needs the oracle fixtures beside the checkout"),
]


def test_a_dense_layer_is_part_of_the_answer_and_asks_for_no_expert() -> None:
    model = load_model(GGUFFile.open(PATH))
    assert 0 not in model.towers and 1 in model.towers
    stats = ExpertStats(every=0, emit=lambda line: None)
    with open_forward(PATH, stats=stats) as forward:
        whole = forward(make_batch([7])).copy()
        weight = forward._backend.weight("blk.0.ffn_down.weight").ptr  # type: ignore[attr-defined]
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * 64).from_address(weight.contents.data))
        raw[:] = 0
        assert not np.array_equal(forward(make_batch([7])), whole)
    asked = stats.total().hits + stats.total().misses
    assert asked == 2 * len(model.towers) * model.hp.top_k


def test_a_layer_with_neither_experts_nor_a_feed_forward_is_refused_by_name() -> None:
    file = GGUFFile.open(PATH)
    del file.tensors["blk.0.ffn_up.weight"]
    with pytest.raises(UnsupportedModelError, match="model-q4_k.gguf: layer 0 has neither routed experts nor a dense"):
        load_model(file)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("expert_group_count", 3, "do not come from 2 of 3 groups"),
        ("expert_group_used_count", 9, "do not come from 9 of"),
        ("expert_gating_func", 9, "expert_gating_func 9 is not supported"),
    ],
)
def test_routing_metadata_without_sense_is_refused_by_name(key: str, value: int, said: str) -> None:
    file = GGUFFile.open(PATH)
    file.metadata[f"bailingmoe2.{key}"] = value
    with pytest.raises((UnsupportedModelError, GGUFError), match=said):
        load_model(file)


def test_a_router_bias_that_does_not_fit_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "router_bias", lambda self, layer: "output_norm.weight")
    with pytest.raises(UnsupportedModelError, match=r"output_norm.weight is F32 \[\d+\], expected one F32 an expert"):
        with open_forward(PATH):
            pass
