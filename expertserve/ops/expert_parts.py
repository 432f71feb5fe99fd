"""The matrices of one kind of expert, whether gate and up lie apart, in one slice, or the up is its own gate.

Owns the rule that a fused slice holds the gate's rows and then the up's. Knows shapes and formats, no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from expertserve.errors import UnsupportedModelError
from expertserve.gguf.file import TensorInfo
from expertserve.gguf.spans import ExpertTower
from expertserve.ops.base import ExpertShape
from expertserve.ops.checks import require

if TYPE_CHECKING:
    from expertserve.experts.batch import SlotBatch

Addresses = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """Tensors that hold gate, up and down of every expert.

    Attributes:
        fused_offset: bytes from the gate to the up in their one slice, 0 where that is both; None where they lie apart.
    """

    gate: TensorInfo
    up: TensorInfo
    down: TensorInfo
    fused_offset: int | None

    @classmethod
    def of(cls, tower: ExpertTower, shape: ExpertShape) -> ExpertParts:
        """The parts of a tower.

        Raises:
            UnsupportedModelError: their shapes are not those of `shape`.
        """
        parts = dict(zip(tower.roles, tower.slices, strict=True))
        fused = parts.get("gate_up")
        up, down = fused or parts["up"], parts["down"]
        gate = fused or parts.get("gate", up)
        outer = (shape.ffn * (2 if fused else 1), shape.hidden)
        for info, expected in ((gate, outer), (up, outer), (down, (shape.hidden, shape.ffn))):
            if info.shape[1:] != expected:
                wanted = [tower.num_experts, *expected]
                raise UnsupportedModelError(f"{info.name} has shape {list(info.shape)}, expected {wanted}")
        require(gate is not up or fused is not None or "up" not in shape.biases, f"{up.name} has a bias and no gate")
        return cls(gate, up, down, shape.ffn * gate.row_bytes if fused else 0 if gate is up else None)

    def addresses(self, batch: SlotBatch) -> tuple[Addresses, Addresses, Addresses]:
        """Where gate, up and down of each group begin; the same array twice where an up is its own gate."""
        if self.fused_offset is None:
            gate, up, down = batch.slices
            return gate, up, down
        gate, down = batch.slices
        return gate, gate + self.fused_offset if self.fused_offset else gate, down
