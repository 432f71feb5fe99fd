"""What was checked and measured, as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Report:
    """Rows of (what, figure, verdict); a check that raised is a failed row, and the rest still runs."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def failed(self) -> int:
        return sum(verdict == "FAILED" for _, _, verdict in self.rows)

    def check(self, what: str, measure: Callable[..., tuple[bool, str]], *args: object) -> None:
        """Adds a row that passes or fails, by what `measure(*args)` says."""
        try:
            good, figure = measure(*args)
        except Exception as error:
            good, figure = False, f"{type(error).__name__}: {error}"
        self.rows.append((what, figure, "ok" if good else "FAILED"))
        print(f"{self.rows[-1][2]:6}  {what}: {figure}", flush=True)

    def figure(self, what: str, measure: Callable[..., T], *args: object, shown: Callable[[T], str]) -> T | None:
        """Adds a row of what `measure(*args)` finds, as `shown`, and returns it; where it raises, a failed row."""
        found: list[T] = []

        def measured() -> tuple[bool, str]:
            found.append(measure(*args))
            return True, shown(found[0])

        self.check(what, measured)
        return found[0] if found else None

    def note(self, what: str, figure: str) -> None:
        """Adds a row that is a figure only."""
        self.rows.append((what, figure, ""))
        print(f"        {what}: {figure}", flush=True)

    def table(self) -> str:
        """Markdown."""
        lines = ["| what | figure | |", "|---|---|---|"]
        return "\n".join(lines + [f"| {' | '.join(row)} |" for row in self.rows])
