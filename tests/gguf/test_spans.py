"""Where experts lie: the bytes at every span are the expert's own, and towers that do not fit together are refused."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as TensorType

from expertserve.errors import GGUFError, UnsupportedModelError
from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower, Span, find_towers
from tests.gguf.raw import Q8_0, model, number, opened, tensor
from tests.gguf_writer import make_tiny_moe, normal, quantize


def read(file: GGUFFile, span: Span) -> bytes:
    out = bytearray(span.nbytes)
    file.read_into(span.file_index, span.offset, memoryview(out))
    return bytes(out)


@pytest.mark.parametrize(
    ("fused", "split", "alignment", "experts"),
    [(False, 0, 32, 8), (True, 0, 32, 5), (False, 9, 32, 7), (False, 0, 8, 3), (True, 5, 4096, 3), (False, 0, 64, 1)],
)
def test_every_span_holds_the_bytes_of_its_expert(
    tmp_path: Path, fused: bool, split: int, alignment: int, experts: int
) -> None:
    types = {"expert": "Q5_1", "down": "Q8_0"}
    path = make_tiny_moe(
        tmp_path / "m.gguf", experts=experts, top_k=1, fused=fused, split=split, alignment=alignment, types=types
    )
    with GGUFFile.open(path) as file:
        towers = find_towers(file)
        assert list(towers) == [0, 1]
        for layer, tower in towers.items():
            assert tower.layer == layer
            assert tower.num_experts == experts
            assert tower.roles == (("gate_up", "down") if fused else ("gate", "up", "down"))
            for i, role in enumerate(tower.roles):
                name, type_ = f"blk.{layer}.ffn_{role}_exps.weight", TensorType[types.get(role, "Q5_1")]
                scale = 2.0 * 32**-0.5 if role == "down" else 64**-0.5
                weights = quantize(normal(0, name, tower.slices[i].shape, scale), type_)
                assert tower.slices[i].name == name
                for expert in range(experts):
                    span = tower.span(expert, i)
                    assert span.nbytes == tower.slice_bytes(i) == weights[expert].nbytes
                    assert read(file, span) == weights[expert].tobytes()


def tower_model(*slices: tuple[str, tuple[int, ...]], layer: int = 3, type: int = Q8_0, pad: int = 0) -> bytes:
    """A file with one tower of `slices` (role, dims innermost first), shifted by a tensor of `pad` floats."""
    rows, at = ([tensor("pad", [pad])], -(-pad * 4 // 32) * 32) if pad else ([], 0)
    for role, dims in slices:
        rows.append(tensor(f"blk.{layer}.ffn_{role}_exps.weight", list(dims), type, at))
        at += -(-int(np.prod(dims)) // 32 * 34 // 32) * 32
    content = model([number("qwen3moe.block_count", layer + 1)], rows)
    return content + np.random.default_rng(at).bytes(at)


FITTING = (("gate", (64, 96, 5)), ("up", (64, 96, 5)), ("down", (96, 64, 5)))


@pytest.mark.parametrize("pad", [0, 1, 9, 1000, 1023, 1024])
def test_span_offset_is_file_plus_tensor_plus_expert(tmp_path: Path, pad: int) -> None:
    content = tower_model(*FITTING, pad=pad)
    with opened(tmp_path, content) as file:
        tower = find_towers(file)[3]
        assert [t.name.split("_")[1] for t in tower.slices] == ["gate", "up", "down"]
        starts = [t.offset for t in tower.slices]
        for expert, i in itertools.product(range(5), range(3)):
            span = tower.span(expert, i)
            assert span == Span(0, starts[i] + expert * 96 * 64 // 32 * 34, 96 * 64 // 32 * 34)
            assert read(file, span) == content[span.offset : span.offset + span.nbytes]
        covered = sorted(
            (s.offset, s.offset + s.nbytes) for s in (tower.span(e, i) for e in range(5) for i in range(3))
        )
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(covered))


def test_an_expert_that_is_not_there_has_no_span(tmp_path: Path) -> None:
    with opened(tmp_path, tower_model(*FITTING)) as file:
        tower = find_towers(file)[3]
        for expert in (-1, 5):
            with pytest.raises(IndexError, match="layer 3, which has 5"):
                tower.span(expert, 0)


def test_uids_never_repeat_nor_go_back(tmp_path: Path) -> None:
    path = make_tiny_moe(tmp_path / "m.gguf", layers=3)
    seen: list[int] = []
    for _ in range(3):
        with GGUFFile.open(path) as file:
            seen += [tower.uid for tower in find_towers(file).values()]
            seen += [tower.uid for tower in find_towers(file).values()]
    assert seen == sorted(set(seen))
    assert len(seen) == 18


def test_uids_differ_between_threads(tmp_path: Path) -> None:
    with opened(tmp_path, tower_model(*FITTING)) as file:
        found: list[ExpertTower] = []
        workers = [
            threading.Thread(target=lambda: found.extend(find_towers(file)[3] for _ in range(50))) for _ in range(4)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert len({tower.uid for tower in found}) == len(found) == 200


def test_a_model_without_experts_has_no_towers(tmp_path: Path) -> None:
    with opened(tmp_path, model([], [tensor("blk.0.ffn_gate.weight", [8])], bytes(32))) as file:
        assert find_towers(file) == {}


def test_biases_and_shared_experts_are_no_slices(tmp_path: Path) -> None:
    content = model(
        [],
        [
            tensor(f"blk.0.ffn_{n}", [8], offset=32 * i)
            for i, n in enumerate(("gate_exps.bias", "gate_shexp.weight", "gate_inp.weight", "gate_exps.weight.x"))
        ],
        bytes(128),
    )
    with opened(tmp_path, content) as file:
        assert find_towers(file) == {}


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        ((("gate", (64, 96, 5)), ("up", (64, 96, 4)), ("down", (96, 64, 5))), "disagree on their number"),
        ((("gate_up", (64, 192, 5)), ("down", (96, 64, 6))), "disagree on their number"),
        ((("gate", (64, 96)), ("up", (64, 96)), ("down", (96, 64))), "disagree on their number"),
        ((("gate", (64, 96, 5)), ("up", (64, 32, 5)), ("down", (96, 64, 5))), "do not fit together"),
        ((("gate", (64, 96, 5)), ("up", (64, 96, 5)), ("down", (64, 96, 5))), "do not fit together"),
        ((("gate_up", (64, 96, 5)), ("down", (96, 64, 5))), "do not fit together"),
        ((("gate", (64, 96, 5)), ("down", (96, 64, 5))), "have down, gate, not"),
        ((("down", (96, 64, 5)),), "have down, not"),
        ((*FITTING, ("gate_up", (64, 192, 5))), "have down, gate, gate_up, up, not"),
    ],
)
def test_slices_that_are_no_tower_are_refused(
    tmp_path: Path, slices: tuple[tuple[str, tuple[int, ...]], ...], expected: str
) -> None:
    with opened(tmp_path, tower_model(*slices)) as file, pytest.raises(GGUFError) as caught:
        find_towers(file)
    assert expected in str(caught.value)
    assert f"{tmp_path / 'm.gguf'}: the experts of layer 3" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_tensor_an_expert_is_refused_by_name(tmp_path: Path) -> None:
    content = model([], [tensor("blk.0.ffn_gate.7.weight", [8])], bytes(32), arch="llama")
    with opened(tmp_path, content) as file, pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_gate\.7\.weight"):
        find_towers(file)
