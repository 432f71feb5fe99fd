"""The one teardown hook: prints the final statistics line exactly once per process.

Owns when that line is written, not what it says. `install_final_line` is called as soon as a command's arguments are
valid, before any model exists; from then on a normal exit, an exception, SIGINT, SIGTERM, SIGHUP, a refused load and
an abort inside the kernel library (through its callback) all end in `flush_final_line`, of which only the first call
in the process acts. A forked child prints nothing.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import threading
from pathlib import Path
from types import FrameType

from expertserve.experts.stats import ExpertStats, format_totals, merged, write_line


class _FinalLine:
    """State of the hook: who reports, and the single permission to print."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.reports: list[tuple[ExpertStats, Path | None]] = []
        self.permission = [None]

    def flush(self) -> None:
        if os.getpid() != self.pid:
            return
        try:
            self.permission.pop()  # atomic: whoever comes second, from whatever thread or signal, finds it gone
        except IndexError:
            return
        for stats, json_path in self.reports:
            stats.silenced = True
            if json_path is not None:
                write_stats_json(stats, json_path)
        write_line(format_totals(*merged(stats for stats, _ in self.reports)))


_installed: _FinalLine | None = None


def install_final_line(stats: ExpertStats, *, json_path: str | Path | None = None) -> None:
    """Makes this process end with the final line; further calls only add statistics to it.

    Args:
        stats: counters to report; they may still be empty, and stay so.
        json_path: file that gets the same numbers as JSON at the end.
    """
    global _installed
    if _installed is None or _installed.pid != os.getpid():
        _installed = _FinalLine()
        atexit.register(_installed.flush)
        if threading.current_thread() is threading.main_thread():
            _install_signals()
    if all(known is not stats for known, _ in _installed.reports):
        _installed.reports.append((stats, Path(json_path) if json_path else None))


def flush_final_line() -> None:
    """Prints the final line now unless it was printed; for abort callbacks and for `os._exit` paths."""
    if _installed is not None:
        _installed.flush()


def write_stats_json(stats: ExpertStats, path: Path) -> None:
    """Writes the snapshot as JSON; a full disk costs the file, not the process.

    A file is replaced whole; a terminal, pipe or device takes the text as it comes, since replacing it would remove it.
    """
    path = path.resolve()
    text = json.dumps(stats.snapshot(), indent=1) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.exists() and not path.is_file():
            path.write_text(text)
            return
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        write_line(f"warning: statistics were not written to {path}: {error.strerror or error}")


def _install_signals() -> None:
    """Takes over the signals whose default is to die without a word; handlers set later replace these."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _on_signal)


def _on_signal(number: int, frame: FrameType | None) -> None:
    # The line comes first: unwinding may hang on a thread that waits for a dead disk.
    flush_final_line()
    raise SystemExit(128 + number)
