"""The forecast: which experts each layer will choose, learned from what it chose.

Owns the memory and the entry to `forecast.c`, which says how. Keys are those of the slot cache: expert e of the n-th
layer is first[n] + e. Invariant: one run of a layer is one observation, whatever the number of its tokens; a prompt's
counts as up to PREFILL_RUNS. One thread, the forward's, writes; `hotness` may be read by others. What is learned takes
4 bytes for each pair of a layer's experts (50 MiB for 48 layers of 512), out of the reserve that no slot takes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertserve.errors import KernelUnavailableError

PREFILL_RUNS = 64
"""What a prompt chose says what its answer will choose, but a long one must not flush what other answers use."""
MOST_VICTIMS = 32  # FORECAST_MOST of forecast.h


def prefill_runs(rows: int | NDArray[np.int32]) -> Any:
    """Runs that one of a prompt's `rows` tokens counts as."""
    return np.minimum(rows, PREFILL_RUNS).astype(np.float64)


class RoutingForecast:
    """Forecasts of the layers of one size class, in the order in which they run.

    Attributes:
        hotness: float32 [keys], how often each was chosen, fading by half in some 3,500 runs.
    """

    def __init__(self, experts: Sequence[int], *, learns: bool) -> None:
        """Args:
        experts: of each layer.
        learns: victims will be asked for; without, only hotness is kept, which takes no memory to speak of.
        """
        self._first = np.concatenate([[0], np.cumsum(experts)]).astype(np.int64)
        shape = len(experts), self._first.ctypes.data, int(learns)
        nbytes = _library.forecast_bytes(*shape)
        self._memory = np.zeros(-(-nbytes // 8), np.int64)
        self._at = self._memory.ctypes.data
        _library.forecast_init(self._at, *shape)
        start = _library.forecast_hotness(self._at) - self._at
        keys = int(self._first[-1])
        self.hotness: NDArray[np.float32] = self._memory.view(np.uint8)[start : start + 4 * keys].view(np.float32)
        self._victims = np.empty(MOST_VICTIMS, np.int64)

    def note(
        self, layer: int, keys: NDArray[np.int64], share: NDArray[np.float64] | None = None, runs: float = 1
    ) -> None:
        """Learns that a layer, by its place, chose distinct `keys`; see `forecast_note`.

        Raises:
            ValueError: a key is not of the layer.
        """
        at = None if share is None else np.ascontiguousarray(share, np.float64).ctypes.data
        keys = np.ascontiguousarray(keys, np.int64)
        if _library.forecast_note(self._at, layer, len(keys), keys.ctypes.data, at, runs):
            raise ValueError(f"keys {keys.tolist()} are not all of layer {layer}")

    def seed(self, layer: int, hotness: NDArray[np.float64], runs: float) -> None:
        """Starts a layer from known hotness, that of `runs` runs, above 0."""
        self.hotness[self._first[layer] : self._first[layer + 1]] = hotness
        _library.forecast_seed(self._at, layer, runs)

    def victims(
        self,
        slot_of: NDArray[np.int32],
        pins: NDArray[np.int32],
        loading: NDArray[np.uint8],
        *,
        most: int = MOST_VICTIMS,
        newcomer: int = -1,
    ) -> list[int]:
        """Keys to evict, the one that is needed last first; see `forecast_victims`."""
        tables = slot_of.ctypes.data, pins.ctypes.data, loading.ctypes.data
        found = _library.forecast_victims(self._at, *tables, newcomer, most, self._victims.ctypes.data)
        return self._victims[:found].tolist()  # type: ignore[no-any-return]


def _load() -> ctypes.CDLL:
    spec = find_spec("expertserve.experts._forecast")
    if spec is None or spec.origin is None:
        raise KernelUnavailableError("the forecast is not compiled: build it (pip install -e .)")
    library = ctypes.CDLL(spec.origin)
    number, real, at = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
    signatures: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
        ("bytes", number, (number, at, number)),
        ("init", None, (at, number, at, number)),
        ("hotness", at, (at,)),
        ("note", number, (at, number, number, at, at, real)),
        ("seed", None, (at, number, real)),
        ("victims", number, (at, at, at, at, number, number, at)),
    )
    for name, result, arguments in signatures:
        function = getattr(library, f"forecast_{name}")
        function.restype, function.argtypes = result, arguments
    return library


_library = _load()
