"""Decoders most of whose layers see a window and rotate, while the last of every few sees all and does not rotate."""

from __future__ import annotations

from collections.abc import Mapping
from types import EllipsisType
from typing import ClassVar

from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower
from expertserve.models.batch import Reach
from expertserve.models.gqa import GqaModel
from expertserve.models.hparams import read_count, read_windowed
from expertserve.ops.base import Rope


class WindowedModel(GqaModel):
    """A family states the window, where a file may leave it out, and how many layers make a period."""

    window: ClassVar[int | EllipsisType] = ...
    period: ClassVar[int] = 4

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        self.windowed = read_windowed(file, self.hp.num_layers, self.period)

    def reaches(self) -> Mapping[str, Reach]:
        return {"mask.window": Reach(read_count(self.file, "attention.sliding_window", self.window))}

    def mask(self, layer: int) -> str:
        return "mask.window" if self.windowed[layer] else "mask"

    def rope_of(self, layer: int) -> Rope | None:
        return self.rope if self.windowed[layer] else None
