"""K-EXAONE (EXAONE MoE): layers in a window that rotate, every fourth one sees all and does not; V3's routing."""

from __future__ import annotations

from collections.abc import Mapping

from expertserve.gguf.file import GGUFFile
from expertserve.gguf.spans import ExpertTower
from expertserve.models.batch import Reach
from expertserve.models.gqa import GqaModel, QKNorm
from expertserve.models.hparams import read_count, read_windowed
from expertserve.models.registry import register
from expertserve.ops.base import Rope

WINDOW, PERIOD = 128, 4


@register("exaone-moe")
class ExaoneMoe(GqaModel):
    """Order of operations of K-EXAONE-236B-A23B."""

    qk_norm = QKNorm.HEAD

    def __init__(self, file: GGUFFile, towers: Mapping[int, ExpertTower], *, draft: bool = False) -> None:
        super().__init__(file, towers, draft=draft)
        self.windowed = read_windowed(file, self.hp.num_layers, PERIOD)

    def reaches(self) -> Mapping[str, Reach]:
        return {"mask.window": Reach(read_count(self.file, "attention.sliding_window", WINDOW))}

    def mask(self, layer: int) -> str:
        return "mask.window" if self.windowed[layer] else "mask"

    def rope_of(self, layer: int) -> Rope | None:
        return self.rope if self.windowed[layer] else None
