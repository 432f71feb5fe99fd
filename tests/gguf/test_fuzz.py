"""Damaged files of every kind: they open, or they are refused by name, in bounded memory and time."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expertserve.errors import GGUFError, UnsupportedModelError
from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import find_towers
from tests.gguf.raw import ARRAY, BOOL, F16, INT32, STRING, array, key, model, number, string, tensor, text

# A buffer of 256 KiB, and Python objects of up to about 60 bytes for each byte of the smallest element.
PEAK_FIXED, PEAK_PER_BYTE = 1 << 20, 64

pytestmark = pytest.mark.timeout(60)
fuzz = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

TOKENS = array(STRING, 40, b"".join(string(f"t{i}") for i in range(40)))
SEED = model(
    [
        number("qwen3moe.block_count", 1),
        number("general.alignment", 32),
        text("tokenizer.ggml.model", "gpt2"),
        key("tokenizer.ggml.tokens", ARRAY, TOKENS),
        key("tokenizer.ggml.token_type", ARRAY, array(INT32, 40, bytes(160))),
        key("flag", BOOL, b"\x01"),
        key("nested", ARRAY, array(ARRAY, 2, array(STRING, 1, string("x")) + array(BOOL, 2, b"\x00\x01"))),
    ],
    [
        tensor("blk.0.ffn_gate_exps.weight", [8, 4, 2], F16, 0),
        tensor("blk.0.ffn_up_exps.weight", [8, 4, 2], F16, 128),
        tensor("blk.0.ffn_down_exps.weight", [4, 8, 2], F16, 256),
        tensor("output_norm.weight", [8], offset=384),
    ],
    bytes(416),
)
HEADER_BYTES = len(SEED) - 416
EXTREMES = [0, 1, 2, 7, 31, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


@contextmanager
def bounded_memory(nbytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= PEAK_FIXED + PEAK_PER_BYTE * nbytes
    finally:
        tracemalloc.stop()


def open_damaged(path: Path) -> None:
    """Open the model and look at all of it; only the two named errors may come out, each one line long."""
    try:
        with GGUFFile.open(path) as file:
            sizes = [p.stat().st_size for p in file.paths]
            for info in file.tensors.values():
                assert 0 < info.offset and info.offset + info.nbytes <= sizes[info.file_index]
                file.read_tensor(info.name, memoryview(bytearray(info.nbytes)))
            for tower in find_towers(file).values():
                for i in range(len(tower.roles)):
                    span = tower.span(tower.num_experts - 1, i)
                    assert span.offset + span.nbytes == tower.slices[i].offset + tower.slices[i].nbytes
    except (GGUFError, UnsupportedModelError) as error:
        assert type(error) in (GGUFError, UnsupportedModelError)
        assert "\n" not in str(error) and len(str(error)) < 1000
        assert str(path.parent) in str(error)


def check(folder: Path, content: bytes) -> None:
    path = folder / "m.gguf"
    path.write_bytes(content)
    with bounded_memory(len(content)):
        open_damaged(path)


def test_the_undamaged_seed_opens(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(SEED)
    with GGUFFile.open(tmp_path / "m.gguf") as file:
        assert len(file.tensors) == 4
        assert len(find_towers(file)) == 1


@fuzz
@given(st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_mutated_bytes(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    content = bytearray(SEED)
    for at, byte in changes:
        content[at] = byte
    check(tmp_path, bytes(content))


@fuzz
@given(st.integers(0, HEADER_BYTES - 8), st.sampled_from(EXTREMES), st.sampled_from("<I <Q >I >Q".split()))
def test_extreme_integers_anywhere(tmp_path: Path, at: int, value: int, code: str) -> None:
    field = struct.pack(code, value & (2**32 - 1) if code[1] == "I" else value)
    check(tmp_path, SEED[:at] + field + SEED[at + len(field) :])


@fuzz
@given(st.integers(0, HEADER_BYTES), st.integers(0, 64), st.binary(max_size=64))
def test_cut_and_pasted_bytes(tmp_path: Path, at: int, removed: int, inserted: bytes) -> None:
    check(tmp_path, SEED[:at] + inserted + SEED[at + removed :])


@fuzz
@given(st.integers(0, len(SEED) - 1))
def test_truncation_anywhere(tmp_path: Path, length: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(SEED[:length])
    with bounded_memory(length), pytest.raises(GGUFError):
        GGUFFile.open(path)


@fuzz
@given(st.binary(max_size=2000), st.booleans())
def test_random_garbage(tmp_path: Path, garbage: bytes, headed: bool) -> None:
    check(tmp_path, (SEED[: 4 + 4 + 8 + 8] if headed else b"") + garbage)


def _values() -> st.SearchStrategy[tuple[int, bytes]]:
    """(type, payload) pairs: well-formed, but with lengths and codes that may lie."""
    lying = st.one_of(st.integers(0, 5), st.sampled_from(EXTREMES))
    scalar = st.tuples(st.integers(0, 13), st.binary(min_size=0, max_size=9))
    lists = st.builds(
        lambda code, count, body: (ARRAY, struct.pack("<IQ", code, count) + body),
        st.integers(0, 14),
        lying,
        st.binary(max_size=80),
    )
    strings = st.builds(lambda count, body: (STRING, struct.pack("<Q", count) + body), lying, st.binary(max_size=20))
    return st.one_of(scalar, lists, strings)


def _tensors() -> st.SearchStrategy[bytes]:
    dims = st.lists(st.one_of(st.sampled_from([1, 2, 8, 32, 256]), st.sampled_from(EXTREMES)), max_size=5)
    names = st.sampled_from(
        ["a", "b", "blk.0.ffn_gate_exps.weight", "blk.0.ffn_down_exps.weight", "blk.0.ffn_up_exps.weight"]
    )
    offsets = st.one_of(st.sampled_from([0, 32, 64, 4096]), st.sampled_from(EXTREMES))
    build: Callable[..., bytes] = tensor
    return st.builds(build, names, dims, st.integers(0, 45), offsets)


@fuzz
@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "general.alignment", "split.count"]), _values()), max_size=4),
    st.lists(_tensors(), max_size=4),
    st.integers(0, 4096),
)
def test_structures_that_lie(
    tmp_path: Path, keys: list[tuple[str, tuple[int, bytes]]], rows: list[bytes], data: int
) -> None:
    check(tmp_path, model([key(name, code, payload) for name, (code, payload) in keys], rows, bytes(data)))


@fuzz
@given(st.integers(0, 1), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_splits(tmp_path: Path, which: int, changes: list[tuple[int, int]]) -> None:
    contents = [
        bytearray(
            model(
                [number("split.no", i), number("split.count", 2), number("split.tensors.count", 2)],
                [tensor(f"t{i}", [8])],
                bytes(32),
            )
        )
        for i in range(2)
    ]
    for at, byte in changes:
        contents[which][at % len(contents[which])] = byte
    for i, content in enumerate(contents):
        (tmp_path / f"m-{i + 1:05d}-of-00002.gguf").write_bytes(content)
    with bounded_memory(sum(map(len, contents))):
        open_damaged(tmp_path / "m-00001-of-00002.gguf")
