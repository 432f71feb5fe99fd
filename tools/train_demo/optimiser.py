"""Muon for the matrices, AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def orthogonalised(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices to `matrices`, (..., rows, columns), by five quintic Newton-Schulz steps.

    The coefficients are those of Muon (Jordan et al., 2024), which trade exactness for speed: singular values end
    between 0.7 and 1.2.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum whose every update is orthogonalised; parameters may be stacks of matrices."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalised(p.grad.lerp(state["momentum"], group["momentum"]))
                scale = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                p.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-group["lr"] * scale)
