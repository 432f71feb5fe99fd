"""Training: a fixed number of steps from a seed, resumed from its last checkpoint."""

from __future__ import annotations

import csv
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from .corpus import Scored, Windows, bits_per_byte, windows_of
from .model import Model, Shape
from .optimiser import Muon


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long and how fast to learn; the defaults are the shipped model's."""

    steps: int = 900
    batch: int = 8
    """Windows of the full context in a step; they are cut in two until the last `long_share` of the steps."""
    long_share: float = 0.15
    warm_up: int = 50
    decay_share: float = 0.5
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    balance: float = 0.01
    checkpoint_every: int = 100
    score_every: int = 100
    scored_windows: int = 12
    """Windows of each source that are scored during training; the card's figures are of all of them."""

    def rate(self, step: int) -> float:
        """Share of the peak learning rate: linear warm-up, constant, linear decay to zero."""
        return min(1.0, (step + 1) / self.warm_up, (self.steps - step) / (self.decay_share * self.steps))


def optimisers(model: Model, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for embedding, routers and norms."""
    inner = {n: p for n, p in model.named_parameters() if p.ndim >= 2 and "embedding" not in n and "router" not in n}
    outer = [p for n, p in model.named_parameters() if n not in inner]
    return [
        Muon(inner.values(), lr=plan.muon_lr),
        torch.optim.AdamW(outer, lr=plan.adam_lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True),
    ]


@torch.no_grad()
def score(model: Model, streams: Sequence[Scored], limit: int | None = None) -> dict[str, float]:
    """Bits per byte of each stream in bfloat16 (its first `limit` windows, if given) and of `all` together."""
    nats, size = {}, {}
    for stream in streams:
        total, count = 0.0, 0
        for window in list(windows_of(stream.tokens, model.shape.context))[:limit]:
            tokens = torch.from_numpy(window)[None]
            with torch.autocast("cpu", torch.bfloat16):
                logits, _, _ = model(tokens[:, :-1])
            total += F.cross_entropy(logits[0].float(), tokens[0, 1:], reduction="sum").item()
            count += len(window) - 1
        nats[stream.source], size[stream.source] = total, stream.bytes * count / (len(stream.tokens) - 1)
    found = {s: bits_per_byte(nats[s], size[s]) for s in nats}
    return {**found, "all": bits_per_byte(sum(nats.values()), sum(size.values()))}


def train(shape: Shape, plan: Plan, windows: Windows, streams: Sequence[Scored], folder: Path, seed: int) -> Model:
    """The trained model; `folder` gets `checkpoint.pt` and `loss.csv`, and a second call goes on from them."""
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    model = Model(shape)
    updates = optimisers(model, plan)
    checkpoint, start, rows = (
        folder / "checkpoint.pt",
        0,
        [["step", "tokens", "seconds", "loss", "held_out_bits_per_byte"]],
    )
    spent = 0.0
    if checkpoint.exists():
        kept = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(kept["model"])
        for update, state in zip(updates, kept["updates"], strict=True):
            update.load_state_dict(state)
        start, rows, spent = kept["step"], kept["rows"], kept["seconds"]
    began = time.monotonic() - spent
    losses: list[float] = []
    for step in range(start, plan.steps):
        losses.append(_step(model, updates, plan, step, windows))
        done = step + 1
        if done % 10 == 0 or done == plan.steps:
            scored = done % plan.score_every == 0 or done == plan.steps
            bits = score(model, streams, plan.scored_windows) if scored else {}
            tokens, seconds = done * plan.batch * shape.context, time.monotonic() - began
            rows.append([done, tokens, round(seconds), f"{np.mean(losses):.4f}", f"{bits['all']:.4f}" if bits else ""])
            losses.clear()
            print(*rows[-1], {k: round(v, 3) for k, v in bits.items()} or "", flush=True)
        if done % plan.checkpoint_every == 0 or done == plan.steps:
            state = {
                "model": model.state_dict(),
                "updates": [u.state_dict() for u in updates],
                "step": done,
                "rows": rows,
            }
            torch.save({**state, "seconds": time.monotonic() - began}, checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").replace(checkpoint)
            with (folder / "loss.csv").open("w", newline="") as file:
                csv.writer(file).writerows(rows)
    return model


def _step(model: Model, updates: Sequence[torch.optim.Optimizer], plan: Plan, step: int, windows: Windows) -> float:
    """One update; the mean loss in nats a token."""
    batch = torch.from_numpy(windows.step(step))
    inputs, targets = batch[:, :-1], batch[:, 1:]
    if step < plan.steps * (1 - plan.long_share):
        inputs, targets = (t.reshape(2 * len(t), -1) for t in (inputs, targets))
    for update, peak in zip(updates, (plan.muon_lr, plan.adam_lr), strict=True):
        for group in update.param_groups:
            group["lr"] = peak * plan.rate(step)
    with torch.autocast("cpu", torch.bfloat16):
        logits, router_loss, _ = model(inputs)
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    (loss + plan.balance * router_loss).backward()
    for update in updates:
        update.step()
        update.zero_grad()
    return loss.item()
