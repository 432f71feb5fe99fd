"""Bytes of GGUF headers, well-formed or not: every field is written as it is given."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from expertserve.errors import ExpertServeError, GGUFError
from expertserve.gguf.file import GGUFFile

STRING, ARRAY, UINT32, INT32, FLOAT32, BOOL, UINT64 = 8, 9, 4, 5, 6, 7, 10
F32, F16, Q4_0, Q8_0, I8 = 0, 1, 2, 8, 24


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return u64(len(data)) + data


def key(name: str | bytes, code: int, payload: bytes) -> bytes:
    return string(name) + u32(code) + payload


def text(name: str, value: str) -> bytes:
    return key(name, STRING, string(value))


def number(name: str, value: int) -> bytes:
    return key(name, UINT32, u32(value))


def array(code: int, count: int, payload: bytes) -> bytes:
    return u32(code) + u64(count) + payload


def tensor(
    name: str | bytes, dims: Sequence[int], type: int = F32, offset: int = 0, num_dims: int | None = None
) -> bytes:
    """A row of the tensor table; `dims` in file order, innermost first."""
    count = len(dims) if num_dims is None else num_dims
    return string(name) + u32(count) + b"".join(u64(d) for d in dims) + u32(type) + u64(offset)


def model(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: bytes | None = None,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    arch: str | None = "qwen3moe",
    alignment: int = 32,
) -> bytes:
    """A whole file; the architecture comes first among the keys unless it is None."""
    keys = [*([text("general.architecture", arch)] if arch is not None else []), *keys]
    counts = u64(len(tensors) if num_tensors is None else num_tensors)
    counts += u64(len(keys) if num_keys is None else num_keys)
    header = magic + (u32(3) if version is None else version) + counts + b"".join(keys) + b"".join(tensors)
    return header + (bytes(-len(header) % alignment) + data if tensors else b"")


def opened(folder: Path, content: bytes, name: str = "m.gguf") -> GGUFFile:
    path = folder / name
    path.write_bytes(content)
    return GGUFFile.open(path)


def refusal(folder: Path, content: bytes, kind: type[ExpertServeError] = GGUFError, name: str = "m.gguf") -> str:
    """The message with which the file is refused, seen to be one line that names the file."""
    with pytest.raises(kind) as caught:
        opened(folder, content, name).close()
    assert type(caught.value) is kind
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message
