"""The oracle models read as the `gguf` package reads them: every tensor and every key."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import find_towers

pytestmark = pytest.mark.shared


@pytest.fixture(scope="module")
def references(oracle_dir: Path) -> dict[Path, gguf.GGUFReader]:
    paths = sorted(oracle_dir.glob("*/model-*.gguf"))
    assert len(paths) > 20
    return {path: gguf.GGUFReader(path) for path in paths}


def test_every_tensor_is_as_the_reference_reads_it(references: dict[Path, gguf.GGUFReader]) -> None:
    for path, reference in references.items():
        with GGUFFile.open(path) as file:
            assert list(file.tensors) == [t.name for t in reference.tensors], path
            for wanted in reference.tensors:
                ours = file.tensors[wanted.name]
                assert (ours.offset, ours.nbytes) == (wanted.data_offset, wanted.n_bytes), (path, wanted.name)
                assert ours.shape == tuple(int(n) for n in reversed(wanted.shape)), (path, wanted.name)
                assert ours.type == wanted.tensor_type, (path, wanted.name)
                assert ours.row_bytes == wanted.data.reshape(-1, wanted.data.shape[-1])[:1].nbytes, (path, wanted.name)
                out = bytearray(ours.nbytes)
                file.read_tensor(wanted.name, memoryview(out))
                assert out == wanted.data.tobytes(), (path, wanted.name)


def test_every_key_has_the_value_the_reference_reads(references: dict[Path, gguf.GGUFReader]) -> None:
    for path, reference in references.items():
        fields = {k: f for k, f in reference.fields.items() if not k.startswith("GGUF.")}
        with GGUFFile.open(path) as file:
            assert list(file.metadata) == list(fields), path
            if path.parent.name == "qwen3moe-k256" and path.stem != "model-q4_k":
                continue  # the same keys in twenty formats
            for name, field in fields.items():
                assert file.metadata[name] == field.contents(), (path, name)


def test_every_expert_lies_where_the_reference_has_it(references: dict[Path, gguf.GGUFReader]) -> None:
    for path, reference in references.items():
        tensors = {t.name: t for t in reference.tensors}
        with GGUFFile.open(path) as file:
            towers = find_towers(file)
            assert towers, path
            for layer, tower in towers.items():
                for i, role in enumerate(tower.roles):
                    stack = tensors[f"blk.{layer}.ffn_{role}_exps.weight"].data
                    assert len(stack) == tower.num_experts
                    for expert in (0, 1, tower.num_experts - 1):
                        span = tower.span(expert, i)
                        out = bytearray(span.nbytes)
                        file.read_into(span.file_index, span.offset, memoryview(out))
                        assert out == stack[expert].tobytes(), (path, layer, role, expert)
