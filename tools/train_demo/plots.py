"""The picture of the loss."""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def plot_loss(source: Path, picture: Path) -> None:
    """Draws the training loss and the held-out bits per byte of `source` (loss.csv) over the tokens seen."""
    with source.open() as file:
        rows = list(csv.DictReader(file))
    seen = [int(r["tokens"]) / 1e6 for r in rows]
    figure, left = plt.subplots(figsize=(8, 4.5), dpi=110)
    left.plot(seen, [float(r["loss"]) for r in rows], color="tab:blue", linewidth=1)
    left.set_xlabel("tokens seen, millions")
    left.set_ylabel("training loss, nats a token", color="tab:blue")
    right = left.twinx()
    scored = [
        (x, float(r["held_out_bits_per_byte"])) for x, r in zip(seen, rows, strict=True) if r["held_out_bits_per_byte"]
    ]
    right.plot(*zip(*scored, strict=True), "o-", color="tab:red", markersize=4)
    right.set_ylabel("held-out text, bits a byte", color="tab:red")
    left.grid(alpha=0.3)
    left.set_title("Training of the demo model")
    figure.tight_layout()
    figure.savefig(picture)
    plt.close(figure)
