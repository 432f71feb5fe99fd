"""The routing trace: which experts each step of each layer chose, in a few bytes a selection.

Owns the file format: a magic, a JSON header, then records of 16-bit numbers. A step is a record (STEP, decode rows,
prefill rows, draft); a layer a record (layer, tokens, k, 0) followed by tokens x k ids; what look-ahead guessed for a
layer is one (layer, tokens, k, 1), before the layer's own. Invariant: a trace cut short at any byte is read up to its
last whole record.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from expertserve.errors import ConfigError
from expertserve.experts.step import StepRows
from expertserve.gguf.spans import ExpertTower

_MAGIC = b"EXPERTTRACE2\n"
_WITHOUT_GUESSES = b"EXPERTTRACE1\n"
_XZ = b"\xfd7zXZ\0"
_STEP = 0xFFFF
_MOST = 0xFFFF
_RECORD = 4
_GUESS = 1


class TraceRecorder:
    """Appends to a trace file; a failing disk ends the trace with a warning, not the forward."""

    def __init__(self, path: Path, towers: Mapping[int, ExpertTower]) -> None:
        layers = [[layer, towers[layer].num_experts] for layer in sorted(towers)]
        self.warning: str | None = None
        try:
            self._out: IO[bytes] | None = open(path, "wb", buffering=1 << 16)
            self._out.write(_MAGIC + json.dumps({"layers": layers}).encode() + b"\n")
        except OSError as error:
            raise ConfigError(f"{path}: the trace cannot be written: {error.strerror}; give --trace a file") from error

    def step(self, rows: StepRows) -> None:
        self._write([_STEP, min(rows.decode_rows, _MOST), min(rows.prefill_rows, _MOST), rows.draft])

    def layer(self, layer: int, ids: NDArray[np.int32]) -> None:
        self._write([layer, *ids.shape, 0], ids)

    def guess(self, layer: int, ids: NDArray[np.int32]) -> None:
        """What look-ahead expects `layer` to choose; ids [tokens, k]."""
        self._write([layer, *ids.shape, _GUESS], ids)

    def _write(self, record: list[int], ids: NDArray[np.int32] | None = None) -> None:
        if self._out is None:
            return
        try:
            self._out.write(np.array(record, "<u2").tobytes())
            if ids is not None:
                self._out.write(ids.astype("<u2").tobytes())
        except OSError as error:
            self.warning = f"the trace ends early: {error.strerror or error}"
            self.close()

    def close(self) -> None:
        out, self._out = self._out, None
        if out is not None:
            try:
                out.close()
            except OSError as error:
                self.warning = f"the trace ends early: {error.strerror or error}"


@dataclass(slots=True)
class TraceStep:
    """One recorded step: its rows, the ids [tokens, k] of each layer in the order they ran, and guesses by layer."""

    rows: StepRows
    layers: list[tuple[int, NDArray[np.int32]]] = field(default_factory=list)
    guesses: dict[int, NDArray[np.int32]] = field(default_factory=dict)


def read_trace(path: Path) -> tuple[dict[int, int], Iterator[TraceStep]]:
    """Experts by layer, and the steps.

    Raises:
        ConfigError: the file is no trace.
    """
    layers, numbers = read_numbers(path)
    return layers, _steps(numbers)


def read_numbers(path: Path) -> tuple[dict[int, int], NDArray[np.uint16]]:
    """Experts by layer, and all records as they stand in the file, which xz may have compressed.

    Raises:
        ConfigError: the file cannot be read or is no trace.
    """
    try:
        data = path.read_bytes()
        if data.startswith(_XZ):
            data = lzma.decompress(data)
    except (OSError, lzma.LZMAError) as error:
        raise ConfigError(f"{path}: the trace cannot be read: {getattr(error, 'strerror', None) or error}") from error
    end = data.find(b"\n", len(_MAGIC))
    try:
        if not data.startswith((_MAGIC, _WITHOUT_GUESSES)) or end < 0:
            raise ValueError
        layers = {int(layer): int(experts) for layer, experts in json.loads(data[len(_MAGIC) : end])["layers"]}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: not a routing trace; record one with --trace") from None
    rest = data[end + 1 :]
    return layers, np.frombuffer(rest[: len(rest) // 2 * 2], "<u2")


def _steps(numbers: NDArray[np.uint16]) -> Iterator[TraceStep]:
    at, step = 0, None
    while at + _RECORD <= len(numbers):
        kind, first, second, third = (int(n) for n in numbers[at : at + _RECORD])
        at += _RECORD
        if kind == _STEP:
            if step is not None:
                yield step
            step = TraceStep(StepRows(first, second, bool(third)))
            continue
        if at + first * second > len(numbers) or step is None:
            break
        ids = numbers[at : at + first * second].astype(np.int32).reshape(first, second)
        if third == _GUESS:
            step.guesses[kind] = ids
        else:
            step.layers.append((kind, ids))
        at += first * second
    if step is not None:
        yield step
