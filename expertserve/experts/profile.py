"""The hotness profile: which experts of a model were hot, kept from one run to the next.

Owns the file format: a magic, a JSON header, float32 hotness by layer, a checksum. A profile belongs to a model by
the names, types, sizes and places of its experts, not by its path. Invariant: a file that is corrupt, foreign or
unreadable yields a warning and a cold start, and a failed save leaves the old file as it was.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expertserve.gguf.spans import ExpertTower

_MAGIC = b"EXPERTHOT1\n"
_HEADER_LIMIT = 1 << 20
_MOST_BYTES = 64 << 20  # 4 bytes an expert: far more than any model has
Hotness = Mapping[int, NDArray[np.float64]]


class _Unusable(ValueError):
    """Why a profile is ignored."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What makes two files the same model to a profile."""

    digest: str
    experts: Mapping[int, int]  # by layer

    @classmethod
    def of(cls, towers: Mapping[int, ExpertTower], file_sizes: Sequence[int]) -> ModelIdentity:
        described = [
            [t.name, list(t.shape), t.type.name, t.file_index, t.offset, t.nbytes]
            for layer in sorted(towers)
            for t in towers[layer].slices
        ]
        text = json.dumps([list(file_sizes), described])
        experts = {layer: towers[layer].num_experts for layer in sorted(towers)}
        return cls(hashlib.sha256(text.encode()).hexdigest(), experts)


def save_profile(path: Path, identity: ModelIdentity, hotness: Hotness) -> str | None:
    """Writes a profile in place of the old one; returns a warning where that failed."""
    header = json.dumps({"model": identity.digest, "layers": sorted(identity.experts.items())}).encode()
    values = [np.asarray(hotness[layer], "<f4").tobytes() for layer in sorted(identity.experts)]
    body = struct.pack("<I", len(header)) + header + b"".join(values)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as out:
            out.write(_MAGIC + body + struct.pack("<I", zlib.crc32(body)))
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except OSError as error:
        try:
            temporary.unlink(missing_ok=True)
        except OSError:
            pass
        return f"the profile was not saved to {path}: {error.strerror or error}; free space there or give --profile off"
    return None


def load_profile(path: Path, identity: ModelIdentity) -> tuple[Hotness, tuple[str, ...]]:
    """Hotness by layer, empty with a warning where the file cannot be used; a file that is not there is no fault."""
    try:
        return _parse(_read_whole(path), identity), ()
    except FileNotFoundError:
        return {}, ()
    except OSError as error:
        return {}, (f"the profile {path} cannot be read ({error.strerror or error}); starting cold",)
    except _Unusable as reason:
        return {}, (f"the profile {path} is ignored ({reason}); starting cold",)


def _read_whole(path: Path) -> bytes:
    """A profile's bytes; a device would never end, and a profile is small."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise _Unusable("it is too large for a profile")
    return data


def _parse(data: bytes, identity: ModelIdentity) -> Hotness:
    body, checksum = data[len(_MAGIC) : -4], data[-4:]
    if not data.startswith(_MAGIC) or len(body) < 4:
        raise _Unusable("it is no profile")
    if struct.pack("<I", zlib.crc32(body)) != checksum:
        raise _Unusable("it is damaged")
    (length,) = struct.unpack_from("<I", body)
    if length > min(_HEADER_LIMIT, len(body) - 4):
        raise _Unusable("it is damaged")
    try:
        header = json.loads(body[4 : 4 + length])
        mine = header["model"] == identity.digest and dict(header["layers"]) == dict(identity.experts)
    except (ValueError, KeyError, TypeError):
        raise _Unusable("it is damaged") from None
    if not mine:
        raise _Unusable("it is another model's")
    values = np.frombuffer(body[4 + length :], np.uint8)
    if values.size != 4 * sum(identity.experts.values()):
        raise _Unusable("it is damaged")
    flat = values.view("<f4").astype(np.float64)
    if not np.isfinite(flat).all() or (flat < 0).any():
        raise _Unusable("it holds impossible values")
    ends = np.cumsum(list(identity.experts.values()))[:-1]
    return dict(zip(identity.experts, np.split(flat, ends), strict=True))
