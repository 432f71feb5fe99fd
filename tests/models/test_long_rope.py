"""LongRoPE: which list of frequency factors a model rotates by is settled by how long a sequence may become."""

from __future__ import annotations

import pytest

from expertserve.gguf.file import GGUFFile
from expertserve.models.phimoe import PhiMoe
from expertserve.models.registry import load_model
from tests.parity.oracle import ORACLE

PATH = ORACLE / "phimoe" / "model-f16.gguf"


@pytest.mark.shared
@pytest.mark.skipif(not PATH.exists(), reason="needs the oracle fixtures beside the checkout")
def test_the_long_factors_are_for_contexts_beyond_the_original_one() -> None:
    model = load_model(GGUFFile.open(PATH))
    assert isinstance(model, PhiMoe)
    names = [model.rope.freq_factors]
    for tokens in (4096, 4097, 512):
        model.fit_context(tokens)
        names.append(model.rope.freq_factors)
    assert names == [f"rope_factors_{length}.weight" for length in ("short", "short", "long", "short")]
