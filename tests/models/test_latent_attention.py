"""Latent attention: a file from before its matrices were split gives the same logits, with whole keys and values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from expertserve.engine.load import kv_bytes
from expertserve.gguf.file import GGUFFile
from expertserve.models.registry import load_model
from expertserve.ops.base import KVType
from tests.models.build import make_batch, open_forward
from tests.parity.oracle import ORACLE, reference

SPLIT = ORACLE / "deepseek2-v3" / "model-f16.gguf"
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not SPLIT.exists(), reason="needs the oracle fixtures beside the checkout"),
]
LATENT_KEYS = ("attention.key_length_mla", "attention.value_length_mla")


@pytest.fixture(scope="module")
def unsplit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as converters wrote it before: keys and values of all heads in one matrix, a KV head each."""
    reader = gguf.GGUFReader(SPLIT)
    key, value = (reader.fields[f"deepseek2.{name}"].contents() for name in LATENT_KEYS)
    changed = {
        "attention.key_length": key,
        "attention.value_length": value,
        "attention.head_count_kv": reader.fields["deepseek2.attention.head_count"].contents(),
    }
    path = tmp_path_factory.mktemp("unsplit") / "model.gguf"
    writer = gguf.GGUFWriter(path, "deepseek2")
    for name, field in reader.fields.items():
        short = name.removeprefix("deepseek2.")
        if not name.startswith("GGUF.") and name != "general.architecture" and short not in LATENT_KEYS:
            kind = field.types[0]
            part = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, changed.get(short, field.contents()), kind, part)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name, tensor in tensors.items():
        if name.endswith("attn_k_b.weight"):
            keys = tensor.data.transpose(0, 2, 1)  # [heads, nope, latent]
            both = np.concatenate([keys, tensors[name.replace("_k_b", "_v_b")].data], axis=1)
            writer.add_tensor(name.replace("_k_b", "_kv_b"), np.ascontiguousarray(both.reshape(-1, both.shape[2])))
        elif not name.endswith("attn_v_b.weight"):
            writer.add_tensor(name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_an_unsplit_file_gives_the_exact_answer(unsplit: Path) -> None:
    ref = reference("deepseek2-v3/model-f16.gguf")
    with open_forward(unsplit, device="reference", kv_type="f32") as forward:
        assert np.abs(forward(make_batch(ref.tokens.tolist())) - ref.exact).max() <= 1e-3
    with open_forward(unsplit, kv_type="f32", flash=False) as forward:
        logits = forward(make_batch(ref.tokens.tolist()))
    with open_forward(SPLIT, kv_type="f32", flash=False) as forward:
        assert np.abs(forward(make_batch(ref.tokens.tolist())) - logits).max() < 0.02 * np.abs(logits).max()


def test_the_cache_keeps_one_short_vector_a_token(unsplit: Path) -> None:
    short, whole = (kv_bytes(load_model(GGUFFile.open(path)), KVType.F16, 1) for path in (SPLIT, unsplit))
    model = load_model(GGUFFile.open(SPLIT))
    latent, rotated = (model.file.get(key) for key in ("attention.kv_lora_rank", "rope.dimension_count"))
    assert short == model.hp.num_layers * 2 * (latent + rotated)
    assert whole == model.hp.num_layers * 2 * model.hp.num_heads * (64 + 32)


def test_a_context_ends_where_tokens_would_be_chosen(made: Callable[[str, str], Path]) -> None:
    file = GGUFFile.open(made("glm-dsa", "q8_0"))
    assert load_model(file).hp.context_length == file.metadata["glm-dsa.context_length"]
    file.metadata["glm-dsa.attention.indexer.top_k"] = 100
    assert load_model(file).hp.context_length == 100
