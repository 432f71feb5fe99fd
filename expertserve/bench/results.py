"""Rows of measurements as people, spreadsheets and programs read them.

A row is a dict of figures by name; where it has a reason under `void` or `refused`, people see that in their place.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertserve.bench.table import aligned
from expertserve.config import Settings
from expertserve.errors import ConfigError

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """How the figure `name` is shown: times `factor`, in the format `form`; as a dash where a row has none."""

    head: str
    name: str
    factor: float
    form: str

    def cell(self, row: Row) -> str:
        value = row.get(self.name)
        return "-" if value is None else format(value * self.factor, self.form)


def table(columns: Sequence[Column], rows: Sequence[Row], label: Callable[[Row], str]) -> str:
    """Rows for people; one without figures says why."""

    def cells(row: Row) -> str | list[str]:
        if row["void"]:
            return f"VOID: {row['void']}"
        refused = row.get("refused")
        return f"did not fit: {refused}" if refused else [column.cell(row) for column in columns]

    return aligned([column.head for column in columns], [cells(row) for row in rows], [label(row) for row in rows])


def publish(result: Mapping[str, Any], settings: Settings) -> bool:
    """Prints `result` as the last line and writes it and its rows to the files that `settings` name.

    Returns:
        Whether a row is void.

    Raises:
        ConfigError: a file cannot be written.
    """
    void = sum(bool(row["void"]) for row in result["rows"])
    result = {**result, "void": void}
    print(json.dumps(result), flush=True)
    try:
        if settings.results_csv is not None:
            _write("--results-csv", settings.results_csv, _as_csv(result["rows"]))
    finally:
        if settings.results_json is not None:
            _write("--results-json", settings.results_json, json.dumps(result, indent=1) + "\n")
    return void > 0


def _write(flag: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, newline="")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be written: {error.strerror}") from error


def _as_csv(rows: Sequence[Row]) -> str:
    """Rows with every field that any of them has; what is no single value, in JSON."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    for row in rows:
        writer.writerow({name: json.dumps(of) if isinstance(of, dict | list) else of for name, of in row.items()})
    return text.getvalue()
