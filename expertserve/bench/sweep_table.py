"""Rows of a comparison as people and spreadsheets read them. Owns the columns and what a row is called."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

_COLUMNS: tuple[tuple[str, str, float, str], ...] = (
    ("tok/s", "decode_tok_s", 1, ".2f"),
    ("least", "decode_tok_s_least", 1, ".2f"),
    ("most", "decode_tok_s_most", 1, ".2f"),
    ("prefill", "prefill_tok_s", 1, ".1f"),
    ("TTFT ms", "first_token_ms", 1, ".0f"),
    ("p50 ms", "interval_p50_ms", 1, ".1f"),
    ("p99 ms", "interval_p99_ms", 1, ".1f"),
    ("hits pre", "prefill_hit_rate", 100, ".0f"),
    ("dec %", "decode_hit_rate", 100, ".1f"),
    ("file MB/tok", "file_bytes_token", 1e-6, ".1f"),
    ("disk", "disk_bytes_token", 1e-6, ".1f"),
    ("stall ms", "stall_ms_token", 1, ".1f"),
    ("comp ms", "compute_ms_token", 1, ".1f"),
    ("roof", "roofline_tok_s", 1, ".1f"),
    ("ratio", "of_roofline", 1, ".2f"),
    ("peak MiB", "peak_bytes", 1 / (1 << 20), ".0f"),
)


def label(row: Mapping[str, Any]) -> str:
    """What a row is called: its part, or what was asked for, and what its group computes."""
    parts = [row["part"]] if row["part"] != "row" else [row["expert_cache"], row["reader"], f"ahead {row['lookahead']}"]
    return " ".join([*parts, f"batch {row['batch']}", f"prompt {row['prompt_tokens']}", f"draft {row['draft']}"])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows for people; one without figures says why."""
    labels = [label(row) for row in rows]
    cells = [[_cell(row, *column[1:]) for column in _COLUMNS] for row in rows]
    widths = [max(len(column[0]), *(len(each[i]) for each in cells)) for i, column in enumerate(_COLUMNS)]
    first = max(map(len, labels))
    heads = "  ".join(column[0].rjust(width) for column, width in zip(_COLUMNS, widths, strict=True))
    lines = [f"{'':{first}}  {heads}"]
    for row, name, each in zip(rows, labels, cells, strict=True):
        says = f"VOID: {row['void']}" if row["void"] else f"did not fit: {row['refused']}" if row["refused"] else None
        shown = says or "  ".join(cell.rjust(width) for cell, width in zip(each, widths, strict=True))
        lines.append(f"{name:{first}}  {shown}")
    return "\n".join(lines)


def _cell(row: Mapping[str, Any], name: str, factor: float, form: str) -> str:
    value = row.get(name)
    return "-" if value is None else format(value * factor, form)


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with every field that any of them has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
