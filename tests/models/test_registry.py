"""What is served, and what is refused by name before a weight is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from expertserve.errors import GGUFError, UnsupportedModelError
from expertserve.gguf.file import GGUFFile
from expertserve.models.registry import architectures, load_model
from tests.made import MADE
from tests.parity.oracle import FAMILIES, FIXTURES, ORACLE

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not ORACLE.is_dir(), reason="needs the oracle fixtures beside the checkout"),
]


def test_every_family_that_is_served_is_compared_with_llama_cpp() -> None:
    compared = {GGUFFile.open(ORACLE / fixture).architecture for fixture in FIXTURES}
    assert {fixture.partition("/")[0] for fixture in FIXTURES} == set(FAMILIES)
    assert compared | set(MADE) == set(architectures())
    assert not compared & set(MADE)


def test_another_architecture_is_refused_with_the_list_of_those_that_are_served() -> None:
    file = GGUFFile.open(ORACLE / "mixtral" / "model-q4_k.gguf")
    file.architecture = "unheard-of"
    with pytest.raises(UnsupportedModelError) as refused:
        load_model(file)
    said = str(refused.value)
    assert "model-q4_k.gguf: architecture 'unheard-of' is not served; served: " in said and "\n" not in said
    assert said.partition("served: ")[2].split(", ") == list(architectures())


def test_a_draft_layer_of_a_family_that_does_not_draft_is_left_out_and_refused_when_asked_for() -> None:
    file = GGUFFile.open(ORACLE / "glm4moe-nextn" / "model-q4_k.gguf")
    assert load_model(file).drafts and load_model(file, draft=True).draft_layer == 3
    metadata = {name.replace("glm4moe.", "bailingmoe2."): value for name, value in file.metadata.items()}
    file.architecture, file.metadata = "bailingmoe2", metadata
    model = load_model(file)
    assert not model.drafts and max(model.towers) == 2
    assert not any(info.name.startswith("blk.3.") for info in model.dense_weights())
    with pytest.raises(UnsupportedModelError, match="no layer that predicts further ahead.*--draft off"):
        load_model(file, draft=True)


def test_gemma_models_of_another_kind_are_refused_by_name() -> None:
    for key, value in (("attention.shared_kv_layers", 1), ("embedding_length_per_layer_input", 256)):
        file = GGUFFile.open(ORACLE / "gemma4-moe" / "model-q4_k.gguf")
        file.metadata = {**file.metadata, f"gemma4.{key}": value}
        with pytest.raises(UnsupportedModelError, match=r"model-q4_k.gguf: a gemma4 model with .*26B-A4B are served"):
            load_model(file)


def test_states_that_do_not_divide_among_heads_are_refused() -> None:
    file = GGUFFile.open(ORACLE / "granitehybrid" / "model-q4_k.gguf")
    file.metadata = {**file.metadata, "granitehybrid.ssm.time_step_rank": 7}
    with pytest.raises(GGUFError, match="512 elements do not make 7 state-space heads in 1 groups"):
        load_model(file)


def test_experts_without_the_gate_that_their_family_has_are_refused() -> None:
    file = GGUFFile.open(ORACLE / "mixtral" / "model-q4_k.gguf")
    file.tensors = {name: info for name, info in file.tensors.items() if "ffn_gate_exps" not in name}
    with pytest.raises(UnsupportedModelError, match="experts of layer 0 have up, down, expected a gate"):
        load_model(file)


def test_limits_that_are_not_one_a_layer_are_refused(made: Callable[[str, str], Path]) -> None:
    file = GGUFFile.open(made("step35", "q8_0"))
    file.metadata = {**file.metadata, "step35.swiglu_clamp_exp": [7.0]}
    with pytest.raises(GGUFError, match="step35.swiglu_clamp_exp is not one number a layer"):
        load_model(file)
