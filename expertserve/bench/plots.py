"""Pictures of measurements. Owns how they look; imports matplotlib, which only those who draw need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from expertserve.errors import ConfigError

if TYPE_CHECKING:
    from expertserve.bench.lab import ReplayRow

_KINDS = ("#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d")
_COLOURS = {"LRU": "#d95f02", "LFU": "#7570b3", "ours": "#1b9e77", "Belady": "#333333"}


def require_drawable(out: Path, flag: str) -> None:
    """For a look before what takes long.

    Raises:
        ConfigError: there is no matplotlib, or none of its formats has this suffix.
    """
    figure, _ = _figure(1)
    if out.suffix.removeprefix(".").lower() not in figure.canvas.get_supported_filetypes():
        raise ConfigError(f"{flag} {out}: the name of a picture should end with .png, .svg or .pdf")


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
    _save(figure, out, "--out")


def plot_sweep(
    out: Path, title: str, rows: Sequence[Mapping[str, Any]], experts: int, uses: Mapping[int, NDArray[np.int64]]
) -> None:
    """Decode speed and hit rate over slots, where a token's time goes, and use of experts by layer.

    Args:
        out: the picture; its suffix says which format.
        title: what was measured.
        rows: of the table, those that count.
        experts: of all layers.
        uses: by layer, decode steps that selected each expert.

    Raises:
        ConfigError: there is no matplotlib, or the picture cannot be written.
    """
    figure, (speeds, times, heat) = _figure(3)
    figure.suptitle(f"expertserve bench of {title}")
    _plot_speeds(speeds, rows, experts)
    _plot_times(times, rows, experts)
    _plot_heat(heat, uses)
    figure.colorbar(heat.images[0], ax=heat, label="share of the layer's decode selections (%)")
    _save(figure, out, "--plot")


def _plot_speeds(axes: Any, rows: Sequence[Mapping[str, Any]], experts: int) -> None:
    hits = axes.twinx()
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in (row for row in rows if row["part"] == "row"):
        kinds.setdefault(_kind(row, rows), []).append(row)
    for (kind, alike), colour in zip(sorted(kinds.items()), cycle(_KINDS), strict=False):
        slots = sorted(alike, key=lambda row: row["slots"])
        shares = [100 * row["slots"] / experts for row in slots]
        rates = [None if row["decode_hit_rate"] is None else 100 * row["decode_hit_rate"] for row in slots]
        axes.plot(shares, [row["decode_tok_s"] for row in slots], "o-", color=colour, label=f"decode {kind}".strip())
        axes.plot(
            shares, [row["roofline_tok_s"] for row in slots], "--", color=colour, label=f"roofline {kind}".strip()
        )
        hits.plot(
            shares, rates, "s-", color=colour, label=f"hits {kind}".strip() + " (right)", markersize=4, lw=1, alpha=0.4
        )
    for row in (row for row in rows if row["part"] != "row"):
        colour = _COLOURS["Belady" if row["part"] == "resident" else "LRU"]
        axes.axhline(
            row["decode_tok_s"], linestyle=":", color=colour, label=f"{row['part']} {_kind(row, rows)}".strip()
        )
    axes.set(
        title="Decode speed and hit rate", xlabel="slots (% of all experts)", ylabel="tokens/s (log)", xlim=(0, 103)
    )
    axes.set_yscale("log")
    _plain_ticks(axes)
    axes.grid(alpha=0.3, which="both")
    hits.set(ylabel="hit rate of decode (%)", ylim=(0, 105))
    lines, names = axes.get_legend_handles_labels()
    more, others = hits.get_legend_handles_labels()
    hits.legend(lines + more, names + others, loc="lower right", framealpha=0.9, ncols=-(-len(names + others) // 6))


def _kind(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """What sets a row apart besides its budget: the settings in which these rows differ."""
    fields = {"reader": "", "lookahead": "ahead ", "batch": "batch ", "prompt_tokens": "prompt ", "draft": "draft "}
    asked = [other for other in rows if other["part"] == "row"] or rows
    own = ("batch", "prompt_tokens", "draft") if row["part"] != "row" else tuple(fields)
    return ", ".join(f"{fields[name]}{row[name]}" for name in own if len({other[name] for other in asked}) > 1)


def _plain_ticks(axes: Any) -> None:
    """Numbers as they are written, not as powers of ten, with room below for a legend."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    least, most = axes.get_ylim()
    axes.set_ylim(least / (most / least) ** 0.5, most)


def _plot_times(axes: Any, rows: Sequence[Mapping[str, Any]], experts: int) -> None:
    budgets = [f"{100 * row['slots'] / experts:.0f}%" if row["part"] == "row" else row["part"] for row in rows]
    names = [f"{part} {_kind(row, rows)}".strip() for part, row in zip(budgets, rows, strict=True)]
    rest = [row["compute_ms_token"] - row["expert_ms_token"] for row in rows]
    other = [max(0.0, 1000 / row["decode_tok_s"] - row["stall_ms_token"] - row["compute_ms_token"]) for row in rows]
    parts = {
        "experts' kernel": [row["expert_ms_token"] for row in rows],
        "rest of the forward": rest,
        "stalled on reads": [row["stall_ms_token"] for row in rows],
        "slots, sampling, Python": other,
    }
    bottom = np.zeros(len(rows))
    for (name, heights), colour in zip(parts.items(), ("#1b9e77", "#66c2a5", "#d95f02", "#999999"), strict=True):
        axes.bar(range(len(rows)), heights, bottom=bottom, label=name, color=colour)
        bottom += np.array(heights)
    axes.set_xticks(range(len(rows)), names, rotation=30, ha="right")
    axes.set(title="Time of a token", ylabel="ms a token", xlabel="slots, or control", ylim=(0, 1.4 * max(bottom)))
    axes.set_axisbelow(True)
    axes.grid(alpha=0.3, axis="y")
    axes.legend()


def _save(figure: Any, out: Path, flag: str) -> None:
    try:
        figure.savefig(out, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {out}: the picture cannot be written: {error}") from error


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
