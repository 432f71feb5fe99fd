"""A model that says what a test tells it to, token by token: for what no grammar can force, such as its own marks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertserve.models.batch import Batch
from tests.engine.fakes import HashForward
from tests.server.hash_world import EOS, PlainTemplate, World
from tests.text.dialects import MarkTokenizer


class ScriptedForward(HashForward):
    """Says `script`, whatever it is asked; one request at a time."""

    def say(self, script: list[int]) -> None:
        self._script, self._begin = script, -1

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        logits = super().__call__(batch)
        for row, output in enumerate(batch.outputs):
            position = int(batch.positions[output])
            self._begin = position if self._begin < 0 else self._begin
            at = position - self._begin
            logits[row, self._script[at] if at < len(self._script) else EOS] = 1e4
        return logits


class Template(PlainTemplate):
    """PlainTemplate with marks in its source, and at the end of what it renders."""

    def __init__(self, source: str, opens: str = "") -> None:
        self.source, self._opens = source, opens

    def render(self, messages: Any, **kwargs: Any) -> str:
        return super().render(messages, **kwargs) + self._opens


class ScriptedWorld(World):
    def __init__(self, template: Template, marks: tuple[str, ...], ends: tuple[str, ...] = ()) -> None:
        self.marks = MarkTokenizer(marks, ends)
        super().__init__(template=template, tokenizer=self.marks, forward=ScriptedForward)

    def say(self, text: str) -> None:
        assert isinstance(self.forward, ScriptedForward)
        self.forward.say(self.marks.spelt(text))
