"""How many prompt rows a step may carry while answers are being generated.

Each row of a prompt makes the step longer for every running answer, and by how much depends on the experts it brings,
the device and the disk: nobody knows beforehand. So it is controlled by what steps take. Decides nothing about which
prompt. The invariant: a step always carries some prompt rows, so prompts make progress.
"""

from __future__ import annotations

LEAST_ROWS = 8
SMOOTHING = 0.1  # weight of the newest step in the time that a step of decodes alone takes


class PromptPacer:
    """Keeps steps with prompt rows within `slowdown` times the duration of steps without.

    Args:
        chunk: prompt rows in a step that no answer waits for.
        slowdown: 0 is no limit.
    """

    def __init__(self, chunk: int, slowdown: float) -> None:
        self._chunk = chunk
        self._slowdown = slowdown
        self._rows = float(min(chunk, LEAST_ROWS) if slowdown else chunk)
        self._decode_s: float | None = None

    @property
    def rows(self) -> int:
        """Prompt rows for the next step in which answers wait."""
        return int(self._rows)

    def observe(self, decodes: int, prompt_rows: int, seconds: float) -> None:
        """A step with rows of `decodes` answers and of prompts has taken `seconds`."""
        if not self._slowdown or not decodes:
            return
        if not prompt_rows:
            known = self._decode_s
            self._decode_s = seconds if known is None else known + SMOOTHING * (seconds - known)
        elif self._decode_s is not None:
            if seconds > self._slowdown * self._decode_s:
                self._rows = max(min(LEAST_ROWS, self._chunk), 0.7 * min(self._rows, prompt_rows))
            elif prompt_rows >= self.rows:  # it was the limit that held
                self._rows = min(self._chunk, 1.1 * self._rows + 1)
