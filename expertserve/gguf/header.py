"""The header of one GGUF file, read without trusting a byte of it.

Owns the binary format: magic, version, metadata, tensor table. It does not know about splits or about what the metadata
means. Invariant: no count is acted upon before it was compared with what the file still holds and with a fixed ceiling,
and every tensor of the result lies inside the file and overlaps no other.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np

from expertserve.gguf.cursor import Cursor, shown
from expertserve.gguf.tensor import TYPE_BY_ID, TensorInfo, TensorType, block_elements, row_bytes

MAX_ENTRIES = 1 << 16  # metadata keys; tensors
MAX_ARRAY_DEPTH = 4
MAX_KEY_BYTES = 1 << 16
MAX_NAME_BYTES = 64
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_DTYPES = {code: np.dtype(text) for code, text in _SCALARS.items()}
_MIN_KV_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata and tensors of one file; tensor offsets are absolute and inside the file."""

    version: int
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    alignment: int
    data_offset: int


def read_header(raw: io.RawIOBase, size: int, path: str, file_index: int) -> Header:
    """Parse and validate the header of a file of `size` bytes; `path` is for messages."""
    cursor = Cursor(raw, size, path)
    try:
        return _parse(cursor, file_index)
    finally:
        cursor.release()


def _parse(cursor: Cursor, file_index: int) -> Header:
    version, num_tensors, num_keys = _read_counts(cursor)
    metadata = _read_metadata(cursor, num_keys)
    alignment = _alignment(cursor, metadata)
    entries = [_read_tensor_entry(cursor) for _ in range(num_tensors)]
    data_offset = -(-cursor.at // alignment) * alignment
    tensors = tuple(_place(cursor, entry, data_offset, alignment, file_index) for entry in entries)
    _check_names(cursor, tensors)
    _check_overlap(cursor, tensors)
    return Header(version, metadata, tensors, alignment, data_offset)


def _read_counts(cursor: Cursor) -> tuple[int, int, int]:
    magic = cursor.take(4, "the magic number")
    if magic != b"GGUF":
        cursor.fail(f"not a GGUF file: it starts with {magic!r}", "give the path of a .gguf model", at=0)
    version = cursor.uint(4, "the version")
    if version not in (2, 3):
        if version and version & 0xFFFF == 0:
            cursor.fail("a big-endian GGUF file", "only little-endian files are served: convert it", at=4)
        cursor.fail(f"GGUF version {version} is not read, only 2 and 3", "convert the model again", at=4)
    num_tensors = cursor.uint(8, "the tensor count")
    num_keys = cursor.uint(8, "the metadata count")
    for count, smallest, what in (
        (num_tensors, _MIN_TENSOR_BYTES, "tensors"),
        (num_keys, _MIN_KV_BYTES, "metadata keys"),
    ):
        if count > MAX_ENTRIES:
            cursor.fail(f"the header claims {count} {what}, more than {MAX_ENTRIES}")
        cursor.need(count * smallest, f"a table of {count} {what}")
    return version, num_tensors, num_keys


def _read_metadata(cursor: Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        start = cursor.at
        key = cursor.string(f"metadata key {index}", MAX_KEY_BYTES)
        if not key or key in metadata:
            cursor.fail(f"metadata key {index} {shown(key)} is {'a duplicate' if key else 'empty'}", at=start)
        what = f"metadata {shown(key)}"
        metadata[key] = _read_value(cursor, cursor.uint(4, f"the type of {what}"), what, 0)
    return metadata


def _read_value(cursor: Cursor, code: int, what: str, depth: int) -> Any:
    if code == _STRING:
        return cursor.string(what)
    if code == _ARRAY:
        return _read_array(cursor, what, depth + 1)
    if code not in _DTYPES:
        cursor.fail(f"{what} has unknown value type {code}", at=cursor.at - 4)
    return _read_scalars(cursor, code, 1, what)[0]


def _read_array(cursor: Cursor, what: str, depth: int) -> list[Any]:
    start = cursor.at
    if depth > MAX_ARRAY_DEPTH:
        cursor.fail(f"{what} nests arrays deeper than {MAX_ARRAY_DEPTH}", at=start)
    code = cursor.uint(4, f"the element type of {what}")
    count = cursor.uint(8, f"the length of {what}")
    if code == _STRING:
        return cursor.strings(count, what)
    if code == _ARRAY:
        cursor.count_elements(count, 4 + 8, what)
        return [_read_array(cursor, what, depth + 1) for _ in range(count)]
    if code not in _DTYPES:
        cursor.fail(f"{what} has unknown element type {code}", at=start)
    cursor.count_elements(count, _DTYPES[code].itemsize, what)
    return _read_scalars(cursor, code, count, what)


def _read_scalars(cursor: Cursor, code: int, count: int, what: str) -> list[Any]:
    start = cursor.at
    values = np.frombuffer(cursor.take(count * _DTYPES[code].itemsize, what), _DTYPES[code])
    if code != _BOOL:
        return values.tolist()  # type: ignore[no-any-return]
    if values.size and values.max() > 1:
        cursor.fail(f"{what} holds a boolean that is neither 0 nor 1", at=start)
    return values.astype(np.bool_).tolist()  # type: ignore[no-any-return]


def _alignment(cursor: Cursor, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or value < 8 or value & (value - 1):
        cursor.fail(f"metadata 'general.alignment' is {shown(repr(value))}, not a power of two of at least 8")
    return value


@dataclass(frozen=True, slots=True)
class _Entry:
    """One row of the tensor table as it is written: offset relative to the data section."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    at: int


def _read_tensor_entry(cursor: Cursor) -> _Entry:
    start = cursor.at
    name = cursor.string("a tensor name", MAX_NAME_BYTES)
    what = f"tensor {shown(name)}"
    if not name:
        cursor.fail("a tensor has an empty name", at=start)
    num_dims = cursor.uint(4, f"the dimensions of {what}")
    if not 1 <= num_dims <= 4:
        cursor.fail(f"{what} has {num_dims} dimensions, not 1 to 4", at=start)
    shape = tuple(cursor.uint(8, f"the shape of {what}") for _ in range(num_dims))[::-1]
    elements = 1
    for size in shape:
        elements *= size
    if elements <= 0 or elements >= 1 << 63:
        cursor.fail(f"{what} has the impossible shape {list(shape)}", at=start)
    code = cursor.uint(4, f"the type of {what}")
    if code not in TYPE_BY_ID:
        cursor.unsupported(
            f"{what} has tensor type {_type_name(code)}, which is not served", "use another quantisation"
        )
    type_ = TYPE_BY_ID[code]
    if shape[-1] % block_elements(type_):
        cursor.fail(
            f"{what} has rows of {shape[-1]}, not whole blocks of {block_elements(type_)} ({type_.name})", at=start
        )
    return _Entry(name, shape, type_, cursor.uint(8, f"the offset of {what}"), start)


def _type_name(code: int) -> str:
    return next((f"{t.name} ({code})" for t in TensorType if t.value == code), str(code))


def _place(cursor: Cursor, entry: _Entry, data_offset: int, alignment: int, file_index: int) -> TensorInfo:
    """Make the offset absolute and see that all bytes of the tensor are in the file."""
    what = f"tensor {shown(entry.name)}"
    if entry.offset % alignment:
        cursor.fail(f"{what} has offset {entry.offset}, not a multiple of the alignment {alignment}", at=entry.at)
    nbytes = row_bytes(entry.shape[-1], entry.type)
    for size in entry.shape[:-1]:
        nbytes *= size
    offset = data_offset + entry.offset
    if offset + nbytes > cursor.size:
        cursor.fail(
            f"{what} lies at bytes {offset} to {offset + nbytes} but the file has only {cursor.size}", at=entry.at
        )
    return TensorInfo(entry.name, entry.shape, entry.type, file_index, offset, nbytes)


def _check_names(cursor: Cursor, tensors: tuple[TensorInfo, ...]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            cursor.fail(f"tensor {shown(tensor.name)} is listed twice")
        seen.add(tensor.name)


def _check_overlap(cursor: Cursor, tensors: tuple[TensorInfo, ...]) -> None:
    ordered = sorted(tensors, key=lambda tensor: tensor.offset)
    for before, after in zip(ordered, ordered[1:], strict=False):
        if before.offset + before.nbytes > after.offset:
            cursor.fail(f"tensors {shown(before.name)} and {shown(after.name)} overlap", at=after.offset)
