"""The bounded header parser: what it reads, and how it refuses each kind of malformed file."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest

from expertserve.errors import GGUFError, UnsupportedModelError
from expertserve.gguf import cursor, header
from expertserve.gguf.tensor import COMPUTED_TYPES, PLAIN_TYPES, TensorType, row_bytes
from tests.gguf.raw import (
    ARRAY,
    BOOL,
    F16,
    FLOAT32,
    I8,
    INT32,
    Q4_0,
    STRING,
    UINT32,
    array,
    key,
    model,
    number,
    opened,
    refusal,
    string,
    tensor,
    text,
    u32,
    u64,
)

DATA = bytes(range(256)) * 4


@pytest.mark.parametrize(
    ("code", "payload", "value"),
    [
        (0, b"\xff", 255),
        (1, b"\xff", -1),
        (2, b"\xff\xff", 65535),
        (3, b"\xfe\xff", -2),
        (4, b"\xff" * 4, 2**32 - 1),
        (5, b"\xff" * 4, -1),
        (6, struct.pack("<f", 0.5), 0.5),
        (7, b"\x01", True),
        (8, string("h\u00e9\U0001f600"), "h\u00e9\U0001f600"),
        (9, array(INT32, 2, struct.pack("<2i", -1, 7)), [-1, 7]),
        (9, array(STRING, 3, string("a") + string("") + string("\u6771")), ["a", "", "\u6771"]),
        (9, array(BOOL, 2, b"\x00\x01"), [False, True]),
        (9, array(ARRAY, 2, array(INT32, 1, u32(5)) + array(FLOAT32, 0, b"")), [[5], []]),
        (10, b"\xff" * 8, 2**64 - 1),
        (11, b"\xff" * 8, -1),
        (12, struct.pack("<d", 0.1), 0.1),
    ],
)
def test_every_value_type_is_a_plain_python_value(tmp_path: Path, code: int, payload: bytes, value: object) -> None:
    with opened(tmp_path, model([key("k", code, payload), number("after", 9)])) as file:
        assert file.metadata["k"] == value
        assert type(file.metadata["k"]) is type(value)
        assert file.metadata["after"] == 9


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_are_read(tmp_path: Path, version: int) -> None:
    content = model([], [tensor("t", [4, 3, 2], F16, 0)], DATA[:48], version=u32(version))
    with opened(tmp_path, content) as file:
        info = file.tensors["t"]
        assert (info.shape, info.type, info.nbytes, info.row_bytes) == ((2, 3, 4), TensorType.F16, 48, 8)
        out = bytearray(48)
        file.read_tensor("t", memoryview(out))
        assert out == DATA[:48]


def test_offsets_are_absolute_under_another_alignment(tmp_path: Path) -> None:
    tensors = [tensor("a", [3], offset=0), tensor("b", [5], offset=64)]
    content = model([number("general.alignment", 64)], tensors, DATA[:84], alignment=64)
    with opened(tmp_path, content) as file:
        start = len(content) - 84
        assert start % 64 == 0
        assert [t.offset for t in file.tensors.values()] == [start, start + 64]


@pytest.mark.parametrize("type_", sorted(COMPUTED_TYPES | PLAIN_TYPES))
def test_every_served_type_is_accepted(tmp_path: Path, type_: TensorType) -> None:
    nbytes = row_bytes(256, type_) * 3
    with opened(tmp_path, model([], [tensor("t", [256, 3], type_.value)], bytes(nbytes))) as file:
        assert file.tensors["t"].type is type_
        assert file.tensors["t"].nbytes == nbytes


@pytest.mark.parametrize(
    ("code", "shown"), [(9, r"Q8_1 \(9\)"), (15, r"Q8_K \(15\)"), (31, "31"), (2**32 - 1, "4294967295")]
)
def test_an_unserved_type_is_refused_by_name(tmp_path: Path, code: int, shown: str) -> None:
    message = refusal(tmp_path, model([], [tensor("blk.0.x", [256], code)], DATA), UnsupportedModelError)
    assert "'blk.0.x'" in message
    assert shown.replace("\\", "") in message


MALFORMED = {
    "an empty file": (b"", "magic"),
    "another kind of file": (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
    "big-endian": (model(version=struct.pack(">I", 3)), "big-endian"),
    "version 1": (model(version=u32(1)), "version 1"),
    "version 0": (model(version=u32(0)), "version 0"),
    "a version to come": (model(version=u32(4)), "version 4"),
    "no counts": (b"GGUF" + u32(3) + u64(1), "metadata count"),
    "absurd key count": (model(num_keys=2**63), "9223372036854775808 metadata keys"),
    "more keys than bytes": (model(num_keys=60_000), "table of 60000 metadata keys"),
    "absurd tensor count": (model(num_tensors=2**64 - 1), "18446744073709551615 tensors"),
    "more tensors than bytes": (model(num_tensors=9), "table of 9 tensors"),
    "endless key": (model([u64(2**62) + b"k" * 64]), "metadata key 1"),
    "endless string": (model([key("k", STRING, u64(2**63) + b"x" * 64)]), "metadata 'k'"),
    "empty key": (model([number("", 1)]), "empty"),
    "key of broken UTF-8": (model([key(b"\xff\xfe", UINT32, u32(1))]), "not valid UTF-8"),
    "value of broken UTF-8": (model([key("k", STRING, string(b"\xc3"))]), "metadata 'k' is not valid UTF-8"),
    "token of broken UTF-8": (
        model([key("k", ARRAY, array(STRING, 2, string("a") + string(b"\xc3")))]),
        "element 1 of metadata 'k'",
    ),
    "duplicate key": (model([number("k", 1), number("k", 1)]), "'k' is a duplicate"),
    "unknown value type": (model([key("k", 13, bytes(16))]), "unknown value type 13"),
    "unknown element type": (model([key("k", ARRAY, array(13, 1, bytes(16)))]), "unknown element type 13"),
    "boolean of 2": (model([key("k", BOOL, b"\x02" + bytes(16))]), "neither 0 nor 1"),
    "array longer than the file": (
        model([key("k", ARRAY, array(INT32, 2**61, bytes(16)))]),
        "'k' with 2305843009213693952 elements",
    ),
    "strings longer than the file": (
        model([key("k", ARRAY, array(STRING, 2**40, bytes(16)))]),
        "'k' with 1099511627776 elements",
    ),
    "nested longer than the file": (
        model([key("k", ARRAY, array(ARRAY, 2**40, bytes(16)))]),
        "'k' with 1099511627776 elements",
    ),
    "an endless element": (
        model([key("k", ARRAY, array(STRING, 2, string("a") + u64(2**64 - 1) + bytes(16)))]),
        "element 1 of metadata 'k'",
    ),
    "arrays nested too deep": (
        model([key("k", ARRAY, array(ARRAY, 1, array(ARRAY, 1, array(ARRAY, 1, array(ARRAY, 1, array(0, 0, b""))))))]),
        "deeper than 4",
    ),
    "no dimensions": (model([], [tensor("t", [])], DATA), "'t' has 0 dimensions"),
    "five dimensions": (model([], [tensor("t", [1] * 5)], DATA), "'t' has 5 dimensions"),
    "billions of dimensions": (model([], [tensor("t", [1], num_dims=2**32 - 1)], DATA), "dimensions"),
    "a dimension of zero": (model([], [tensor("t", [4, 0])], DATA), "impossible shape"),
    "overflowing shape": (model([], [tensor("t", [2**32, 2**31])], DATA), "impossible shape"),
    "overflow that wraps to small": (model([], [tensor("t", [2**32, 2**32, 1, 1])], DATA), "impossible shape"),
    "half a block": (model([], [tensor("t", [48], Q4_0)], DATA), "whole blocks of 32 (Q4_0)"),
    "unaligned offset": (model([], [tensor("t", [4], offset=16)], DATA), "multiple of the alignment"),
    "offset past the end": (model([], [tensor("t", [4], offset=2**40)], DATA), "'t' lies at"),
    "offset that wraps": (model([], [tensor("t", [4], offset=2**64 - 32)], DATA), "'t' lies at"),
    "tensor past the end": (model([], [tensor("t", [257])], DATA), "'t' lies at"),
    "tensor of 8 EiB": (model([], [tensor("t", [2**62 - 1])], DATA), "'t' lies at"),
    "duplicate tensor": (model([], [tensor("t", [8]), tensor("t", [8], offset=32)], DATA), "'t' is listed twice"),
    "overlapping tensors": (model([], [tensor("b", [9], offset=32), tensor("a", [9])], DATA), "'a' and 'b' overlap"),
    "an overlap of one byte": (model([], [tensor("a", [33], I8), tensor("b", [8], offset=32)], DATA), "overlap"),
    "tensors at one place": (model([], [tensor("a", [8]), tensor("b", [8])], DATA), "overlap"),
    "empty tensor name": (model([], [tensor("", [8])], DATA), "empty name"),
    "endless tensor name": (model([], [tensor("t" * 65, [8])], DATA), "65 bytes long, more than 64"),
    "tensor name of broken UTF-8": (model([], [tensor(b"\xff", [8])], DATA), "tensor name is not valid UTF-8"),
    "alignment of zero": (model([number("general.alignment", 0)]), "general.alignment"),
    "alignment of 48": (model([number("general.alignment", 48)]), "general.alignment"),
    "alignment as text": (model([text("general.alignment", "32")]), "general.alignment"),
    "no architecture": (model(arch=None), "general.architecture"),
    "architecture as number": (model([number("general.architecture", 1)], arch=None), "general.architecture"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    content, expected = MALFORMED[case]
    assert expected in refusal(tmp_path, content)


def test_the_message_has_the_byte_offset_of_the_fault(tmp_path: Path) -> None:
    content = model([number("first", 1), key("bad", 99, b"")])
    assert f"(at byte {len(content) - 4})" in refusal(tmp_path, content)


def test_the_message_has_the_byte_offset_of_a_bad_token(tmp_path: Path) -> None:
    content = model([key("k", ARRAY, array(STRING, 2, string("abc") + string(b"\xff\xff")))])
    assert f"(at byte {len(content) - 2})" in refusal(tmp_path, content)


def test_a_file_that_shrinks_while_its_header_is_read_is_refused(tmp_path: Path) -> None:
    content = model([key("k", ARRAY, array(STRING, 3, string("a" * 10) * 3))])
    path = tmp_path / "m.gguf"
    for length in range(24, len(content)):
        path.write_bytes(content[:length])
        with path.open("rb", buffering=0) as raw, pytest.raises(GGUFError, match="the file ended inside"):
            header.read_header(raw, len(content), str(path), 0)


def test_names_from_the_file_cannot_break_the_line(tmp_path: Path) -> None:
    message = refusal(tmp_path, model([key("a\nb\x1b[31m" + "c" * 500, 99, b"")]))
    assert "a\\nb\\x1b" in message
    assert len(message) < 400


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    strings = key("tokens", ARRAY, array(STRING, 3, string("a") + string("bc") + string("")))
    numbers = key("types", ARRAY, array(INT32, 2, bytes(8)))
    content = model([strings, numbers, number("n", 3)], [tensor("a", [8]), tensor("b", [4], offset=32)], DATA[:48])
    opened(tmp_path, content).close()
    for length in range(len(content)):
        refusal(tmp_path, content[:length])


def test_a_header_over_the_ceiling_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor, "MAX_HEADER_BYTES", 1 << 20)
    content = model([key("k", ARRAY, array(STRING, 40, string("x" * (1 << 15)) * 40))])
    assert "header larger than 1 MiB" in refusal(tmp_path, content)


def test_arrays_over_the_ceiling_are_refused_before_they_are_read(tmp_path: Path) -> None:
    count = cursor.MAX_ARRAY_ELEMENTS // 2 + 1
    one = array(0, count, bytes(count))
    assert f"past {cursor.MAX_ARRAY_ELEMENTS} elements" in refusal(
        tmp_path, model([key("a", 9, one), key("b", 9, one)])
    )


def test_more_entries_than_the_ceiling_are_refused(tmp_path: Path) -> None:
    content = model(num_tensors=header.MAX_ENTRIES + 1) + bytes(40 * header.MAX_ENTRIES)
    assert f"more than {header.MAX_ENTRIES}" in refusal(tmp_path, content)


def test_a_lie_about_length_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    with path.open("wb") as out:  # the file is large enough for the lie, only the ceiling is not
        out.write(model([key("k", STRING, u64(1 << 34))]))
        out.truncate(1 << 35)
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError, match="larger than|more than"):
            header_of(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def header_of(path: Path) -> header.Header:
    with path.open("rb", buffering=0) as raw:
        return header.read_header(raw, path.stat().st_size, str(path), 0)


def test_a_large_vocabulary_survives_intact(tmp_path: Path) -> None:
    tokens = [f"token {i} \u00e9" for i in range(150_000)]
    payload = array(STRING, len(tokens), b"".join(map(string, tokens)))
    with opened(tmp_path, model([key("tokenizer.ggml.tokens", ARRAY, payload)])) as file:
        assert file.metadata["tokenizer.ggml.tokens"] == tokens


def test_parsing_leaves_the_file_open_for_reading(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(model([], [tensor("t", [4])], DATA[:16]))
    with path.open("rb", buffering=0) as raw:
        header.read_header(raw, path.stat().st_size, str(path), 0)
        assert not raw.closed
