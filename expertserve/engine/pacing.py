"""How many prompt rows a step may carry while answers are being generated.

Each row of a prompt makes the step longer for every running answer, and by how much depends on the experts it brings,
the device and the disk: nobody knows beforehand. So it is controlled by what steps take. Decides nothing about which
prompt. The invariant: of any `REFRESH` steps in a row all but one carry prompt rows, so prompts make progress.
"""

from __future__ import annotations

from collections import deque
from statistics import median

FIRST_ROWS = 4.0  # where the control begins
RECENT = 32  # steps of decodes alone whose median is what such a step takes; a mean follows a noisy machine's outliers
REFRESH = 32  # every so many steps one carries no prompt rows, to see what decodes alone take by now


class PromptPacer:
    """Keeps steps with prompt rows within `slowdown` times the duration of steps without.

    Args:
        chunk: prompt rows in a step that no answer waits for.
        slowdown: 0 is no limit.
    """

    def __init__(self, chunk: int, slowdown: float) -> None:
        self._chunk = chunk
        self._slowdown = slowdown
        self._rows = min(float(chunk), FIRST_ROWS) if slowdown else float(chunk)
        self._alone: deque[float] = deque(maxlen=RECENT)
        self._decode_s = 0.0
        self._steps = 0  # with prompt rows since the last one without

    @property
    def rows(self) -> int:
        """Prompt rows for the next step in which answers wait."""
        due = not self._alone or self._steps >= REFRESH - 1
        return 0 if self._slowdown and due else int(self._rows)

    def observe(self, decodes: int, prompt_rows: int, seconds: float) -> None:
        """A step with rows of `decodes` answers and of prompts has taken `seconds`."""
        if not self._slowdown or not decodes:
            return
        if not prompt_rows:
            self._alone.append(seconds)
            self._decode_s = median(self._alone)
            self._steps = 0
            return
        self._steps += 1
        if seconds > self._slowdown * self._decode_s:
            self._rows = max(1.0, 0.8 * min(self._rows, prompt_rows))
        elif prompt_rows >= int(self._rows):  # it was the limit that held
            self._rows = min(self._chunk, 1.05 * self._rows + 0.05)
