"""A table for people."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(heads: Sequence[str], rows: Sequence[Sequence[str] | str], labels: Sequence[str] = ()) -> str:
    """Right-aligned columns, two spaces apart; a row that is one text goes across them.

    Args:
        heads: of the columns.
        rows: a cell for each column, or one text.
        labels: what each row is called, left-aligned before it; without any there is no such column.
    """
    whole = [row for row in (heads, *rows) if not isinstance(row, str)]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    first = max(map(len, labels), default=0)
    lines = []
    for name, row in zip(("", *labels) if labels else [""] * (len(rows) + 1), (heads, *rows), strict=True):
        cells = row if isinstance(row, str) else "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True))
        lines.append((f"{name:{first}}  {cells}" if labels else cells).rstrip())
    return "\n".join(lines)
