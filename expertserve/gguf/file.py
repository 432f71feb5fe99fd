"""A GGUF model on disk: one file or all its splits, their metadata, tensors and bytes.

Opening reads headers only and validates all of them; weights are read when asked for. The files stay open, so a file
replaced by renaming keeps serving its old bytes; `check_unchanged` notices that and in-place changes. Knows nothing of
architectures. Invariant: every tensor in `tensors` lies wholly inside its file and overlaps no other.
"""

from __future__ import annotations

import io
import os
import stat
import weakref
from pathlib import Path
from types import EllipsisType
from typing import Any

from expertserve.errors import GGUFError
from expertserve.gguf.cursor import shown
from expertserve.gguf.header import Header, read_header
from expertserve.gguf.positional import read_at
from expertserve.gguf.splits import check_splits, split_count, split_paths
from expertserve.gguf.tensor import TensorInfo, TensorType

_BEYOND_ANY_FILE = 1 << 62

__all__ = ["GGUFFile", "TensorInfo", "TensorType"]


class GGUFFile:
    """An opened model. Reading is thread-safe; closing is not, and happens at the latest when it is collected."""

    def __init__(self, parts: list[_Part]) -> None:
        """Take over the opened parts, in split order; use `open`."""
        self.paths: tuple[Path, ...] = tuple(part.path for part in parts)
        self.metadata: dict[str, Any] = parts[0].header.metadata
        self.tensors: dict[str, TensorInfo] = {t.name: t for part in parts for t in part.header.tensors}
        self.architecture: str = _architecture(parts[0])
        self._parts = parts
        self._close = weakref.finalize(self, _close_parts, parts)

    @classmethod
    def open(cls, path: str | Path, *, partial: bool = False) -> GGUFFile:
        """Read the headers of the model `path` belongs to (any of its splits will do).

        With `partial` tensors may lie beyond the end of a file that is still growing.

        Raises:
            GGUFError: a file is malformed, truncated, missing or unreadable.
            UnsupportedModelError: a tensor has a type that is not served.
        """
        path = Path(path)
        parts = [_Part(path, 0, partial)]
        try:
            count = split_count(parts[0].header.metadata, path)
            if count > 1:
                paths = split_paths(path, count)
                parts.pop().close()
                for index, split in enumerate(paths):
                    parts.append(_Part(split, index, partial))
                check_splits(paths, [part.header for part in parts])
            return cls(parts)
        except BaseException:
            _close_parts(parts)
            raise

    def get(self, key: str, default: Any = ..., *, kind: type | None = None) -> Any:
        """Metadata of `{architecture}.{key}`; refused by name if missing without a default or not of type `kind`."""
        full = f"{self.architecture}.{key}"
        value = self.metadata.get(full, default)
        if isinstance(value, EllipsisType):
            raise GGUFError(f"{self.paths[0]}: metadata {shown(full)} is missing; convert the model again")
        if full not in self.metadata or kind is None or type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        raise GGUFError(
            f"{self.paths[0]}: metadata {shown(full)} is not of type {kind.__name__}; convert the model again"
        )

    def read_tensor(self, name: str, out: memoryview) -> None:
        """Read the raw bytes of a tensor into `out`, which has exactly their length."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise GGUFError(f"{self.paths[0]}: tensor {shown(name)} is missing; convert the model again")
        if out.nbytes != tensor.nbytes:
            raise ValueError(f"tensor {name!r} has {tensor.nbytes} bytes, the buffer {out.nbytes}")
        self.read_into(tensor.file_index, tensor.offset, out)

    def read_into(self, file_index: int, offset: int, out: memoryview) -> None:
        """Fill `out` from a file at `offset`; GGUFError if the disk fails or the file ends before it is full."""
        part = self._parts[file_index]
        out = out.cast("B")
        try:
            done = read_at(part.file, out, offset)
        except OSError as error:
            raise GGUFError(
                f"{part.path}: cannot read {out.nbytes} bytes (at byte {offset}): {error.strerror}; check the disk"
            ) from error
        if done != out.nbytes:
            raise GGUFError(
                f"{part.path}: the file ended after {done} of {out.nbytes} bytes (at byte {offset}); "
                "it was cut while loaded: restore it and restart"
            )

    def fingerprint(self) -> tuple[tuple[str, int, int, int], ...]:
        """(path, size, mtime_ns, inode) of each file as it was when opened."""
        return tuple(part.fingerprint for part in self._parts)

    def check_unchanged(self) -> None:
        """GGUFError if a file on disk is no longer the one that was opened."""
        for part in self._parts:
            try:
                now = _fingerprint(part.path, os.stat(part.path))
            except OSError as error:
                raise GGUFError(f"{part.path}: the file went away while loaded: {error.strerror}; restart") from error
            if now != part.fingerprint:
                raise GGUFError(f"{part.path}: the file changed on disk while loaded; restart to load the new one")

    def close(self) -> None:
        """Close the files; reading afterwards is an error."""
        self._close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Part:
    """One opened file with its header."""

    def __init__(self, path: Path, index: int, partial: bool) -> None:
        self.path = path
        try:
            # Looked at before opening: opening a pipe would wait for a writer.
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise GGUFError(f"{path}: not a regular file; give the path of a .gguf model")
            self.file = io.FileIO(path)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise GGUFError(f"{path}: cannot be opened: {reason}; check the path") from error
        try:
            status = os.fstat(self.file.fileno())
            self.fingerprint = _fingerprint(path, status)
            self.header: Header = read_header(
                self.file, _BEYOND_ANY_FILE if partial else status.st_size, str(path), index
            )
        except BaseException:
            self.file.close()
            raise

    def close(self) -> None:
        self.file.close()


def _fingerprint(path: Path, status: os.stat_result) -> tuple[str, int, int, int]:
    return str(path), status.st_size, status.st_mtime_ns, status.st_ino


def _architecture(part: _Part) -> str:
    value = part.header.metadata.get("general.architecture")
    if not isinstance(value, str) or not value:
        raise GGUFError(f"{part.path}: metadata 'general.architecture' is missing or not a string; give a model file")
    return value


def _close_parts(parts: list[_Part]) -> None:
    for part in parts:
        part.close()
