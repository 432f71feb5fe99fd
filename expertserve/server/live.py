"""What the live panel shows: one reading of engine, streamer, slots and memory.

Owns the form of `/stats`. Reads numbers that others own, from the event loop; a reading may be a step old.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from expertserve.experts.memory import resident_memory
from expertserve.server.state import ServedModel


def live_object(model: ServedModel) -> dict[str, Any]:
    """The body of `/stats`."""
    return {
        "model": model.names[0],
        "context_length": model.context_length,
        "engine": dict(model.engine.snapshot()),
        "stream": dict(model.stream_snapshot()),
        "memory": {"resident_bytes": resident_memory(), "plan": dict(model.memory_plan)},
        "heat": {"layers": [_layer(layer, *of) for layer, of in sorted(model.heat().items())]},
    }


def _layer(layer: int, hotness: Any, resident: Any) -> dict[str, Any]:
    """Hotness as 0 to 100 of the layer's hottest expert, by rank of magnitude so that the tail shows."""
    top = float(hotness.max(initial=0.0))
    scaled = np.sqrt(hotness / top) * 100 if top > 0 else np.zeros(len(hotness))
    return {"layer": layer, "hotness": scaled.astype(int).tolist(), "resident": resident.astype(int).tolist()}
