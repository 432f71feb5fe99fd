"""Pictures of measurements. Owns how they look; imports matplotlib, which only those who draw need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from expertserve.errors import ConfigError

if TYPE_CHECKING:
    from expertserve.bench.lab import ReplayRow

_COLOURS = {"LRU": "#d95f02", "LFU": "#7570b3", "ours": "#1b9e77", "Belady": "#333333"}


def plot_trace(
    out: Path,
    title: str,
    rows: Sequence[ReplayRow],
    distances: NDArray[np.int32],
    uses: Mapping[int, NDArray[np.int64]],
) -> None:
    """Hit rate over slots, reuse distance, and use of experts by layer.

    Args:
        out: the picture; its suffix says which format.
        title: what was measured.
        rows: of the replay.
        distances: of every selection but first ones.
        uses: by layer, decode steps that selected each expert.

    Raises:
        ConfigError: there is no matplotlib, or the picture cannot be written.
    """
    figure, (rates, reuse, heat) = _figure(3)
    figure.suptitle(f"Routing of {title}")
    _plot_rates(rates, rows)
    _plot_reuse(reuse, distances, sum(map(len, uses.values())))
    _plot_heat(heat, uses)
    figure.colorbar(heat.images[0], ax=heat, label="share of the layer's decode selections (%)")
    try:
        figure.savefig(out, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--out {out}: the picture cannot be written: {error}") from error


def _figure(parts: int) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("pictures need matplotlib: pip install 'expertserve[plot]'") from error
    figure = Figure(figsize=(6 * parts, 5), layout="constrained")
    return figure, figure.subplots(1, parts)


def _plot_rates(axes: Any, rows: Sequence[ReplayRow]) -> None:
    shares = [100 * row.share for row in rows]
    for name, colour in _COLOURS.items():
        axes.plot(shares, [100 * row.hit_rate[name] for row in rows], "o-", color=colour, label=name, markersize=4)
    for name in ("LRU", "ours"):
        control = [100 * row.shuffled[name] for row in rows]
        axes.plot(shares, control, ":", color=_COLOURS[name], label=f"{name}, shuffled order")
    axes.set(
        title="Hit rate of decode over slots", xlabel="slots (% of all experts)", ylabel="hit rate (%)", ylim=(0, 100)
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def _plot_reuse(axes: Any, distances: NDArray[np.int32], experts: int) -> None:
    axes.ecdf(distances, color=_COLOURS["LRU"], label="selections reused within (= LRU's hit rate)")
    axes.set(
        title="Reuse distance", xlabel="distinct experts since the last use (all layers)",
        ylabel="share of selections (%)", xlim=(0, experts), ylim=(0, 1),
    )  # fmt: skip
    axes.set_yticks(np.linspace(0, 1, 6), [f"{tick:.0f}" for tick in np.linspace(0, 100, 6)])
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def _plot_heat(axes: Any, uses: Mapping[int, NDArray[np.int64]]) -> None:
    shown = np.full((len(uses), max(map(len, uses.values()))), np.nan)
    for row, counts in zip(shown, uses.values(), strict=True):
        row[: len(counts)] = 100 * np.sort(counts)[::-1] / max(1, counts.sum())
    axes.imshow(shown, aspect="auto", cmap="viridis", interpolation="nearest")
    axes.set(title="Use of experts by layer", xlabel="expert (rank by use in its layer)", ylabel="layer")
    every = -(-len(uses) // 16)
    axes.set_yticks(range(0, len(uses), every), [str(layer) for layer in list(uses)[::every]])
