"""One forward of one model over one batch: segments on the device, routing on the host, experts through the lane.

Owns the buffers between segments and the order in which things run; one call is one step of the lane. It knows no
device and no family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from expertserve.errors import UnsupportedModelError
from expertserve.experts.lane import ExpertLane
from expertserve.experts.router import route
from expertserve.gguf.spans import ExpertTower
from expertserve.models.batch import Batch
from expertserve.models.model import Model
from expertserve.ops.base import Backend, ExpertKernel, Graph, KVType

LOGIT_BYTES = 64 << 20
"""Most bytes of logits one forward returns, unless a single row a sequence is more."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """A stretch of the forward that runs without the host.

    Attributes:
        layer: the layer whose experts follow it; None for the head.
        guess: it also guesses the next layer's experts.
        outputs: it is of use only where logits are asked for.
    """

    name: str
    build: Callable[[Graph], None]
    layer: int | None
    guess: bool = False
    outputs: bool = False


class Forward:
    """A model on a device. Weights are loaded and the lane is open when it is constructed.

    Args:
        model: what to compute.
        backend: where to compute it; its weights are loaded.
        lane: the experts.
        max_rows: most rows of one batch.
        kv_cells: cells of the KV cache, a multiple of 256.
        kv_type: element type of the KV cache.
        min_outputs: logit rows every batch may ask for, however large the vocabulary.
        state_slots: slots of recurrent state, for a model that has one.
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        lane: ExpertLane,
        *,
        max_rows: int,
        kv_cells: int,
        kv_type: KVType,
        min_outputs: int,
        state_slots: int = 0,
    ) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.context_length = model.hp.context_length
        self.max_rows = max_rows
        self.kv_cells = kv_cells
        self.max_outputs = min(max_rows, max(min_outputs, LOGIT_BYTES // (4 * self.vocab_size)))
        self._backend = backend
        self._lane = lane
        backend.allocate_kv(model.kv_layouts(), kv_cells, kv_type)
        self.state_slots = state_slots if model.recurrent_layouts() else 0
        backend.allocate_states(model.recurrent_layouts(), self.state_slots)
        self._allocate_buffers()
        self._kernels = self._make_kernels()
        self._segments = self._make_segments()
        last = model.hp.num_layers - 1
        self._guessing = [self._segment(i, guess=i < last) for i in range(len(self._segments))]
        self._drafting = self._draft_segments()
        for chain in (self._segments, self._guessing):
            chain.extend(self._drafting[-1:])

    def _allocate_buffers(self) -> None:
        hp, rows = self.model.hp, self.max_rows
        buffers: dict[str, tuple[tuple[int, ...], type]] = {
            "tokens": ((rows,), np.int32),
            "positions": ((rows,), np.int32),
            "cells": ((rows,), np.int64),
            "outputs": ((rows,), np.int32),
            "runs": ((rows, 4), np.int32),
            "num_runs": ((1,), np.int32),
            "mask": ((rows * self.kv_cells,), np.float16),
            "residual": ((rows, hp.hidden), np.float32),
            "ffn_input": ((rows, hp.hidden), np.float32),
            "router": ((rows, hp.num_experts), np.float32),
            "guess": ((rows, hp.num_experts), np.float32),
            "expert_weights": ((rows, hp.top_k), np.float32),
            "expert_out": ((rows * hp.top_k, hp.hidden), np.float32),
            "logits": ((self.max_outputs, self.vocab_size), np.float32),
        }
        if self.model.draft_layer is not None:
            buffers["hidden"] = ((rows, hp.hidden), np.float32)
            buffers["draft_hidden"] = ((rows, hp.hidden), np.float32)
        if self.model.has_shared_expert:
            buffers["shared"] = ((rows, hp.hidden), np.float32)
        for name, (shape, dtype) in buffers.items():
            self._backend.allocate_buffer(name, shape, dtype)

    def _make_kernels(self) -> dict[int, ExpertKernel]:
        """One kernel for each kind of expert; layers whose experts are alike share it."""
        by_kind: dict[tuple[object, ...], ExpertKernel] = {}
        kernels = {}
        for layer, tower in self.model.towers.items():
            if tower.num_experts != self.model.hp.num_experts:
                raise UnsupportedModelError(
                    f"layer {layer} has {tower.num_experts} experts, metadata says {self.model.hp.num_experts}"
                )
            kind = _kind(tower)
            if kind not in by_kind:
                by_kind[kind] = self._backend.expert_kernel(tower, self.model.expert_shape(tower))
            kernels[layer] = by_kind[kind]
        return kernels

    def _make_segments(self) -> list[_Segment]:
        last = self.model.hp.num_layers
        missing = [layer for layer in range(last) if layer not in self.model.towers]
        if missing:
            raise UnsupportedModelError(f"layer {missing[0]} has no routed experts")
        return [self._segment(i, guess=False) for i in range(last + 1)]

    def _segment(self, index: int, *, guess: bool) -> _Segment:
        last = self.model.hp.num_layers
        return _Segment(
            f"segment.{index}{'.guess' if guess else ''}",
            partial(self._build_segment, index=index, guess=guess),
            index if index < last else None,
            guess,
            outputs=index == last and self.model.draft_layer is None,
        )

    def _draft_segments(self) -> list[_Segment]:
        """The draft layer's own chain; its last segment is the trunk's too."""
        model, layer = self.model, self.model.draft_layer
        if layer is None:
            return []
        return [
            _Segment("draft.layer", lambda g: model.front(g, layer, model.draft_input(g)), layer),
            _Segment("draft.hidden", lambda g: g.store("hidden", model.draft_norm(g, model.join(g))), None),
            _Segment("logits", self._build_logits, None, outputs=True),
        ]

    def _build_logits(self, g: Graph) -> None:
        g.store("logits", g.linear(g.select_outputs(g.load("hidden")), self.model.head_weight))

    def _build_segment(self, g: Graph, index: int, guess: bool) -> None:
        x = self.model.embed(g) if index == 0 else self.model.join(g)
        if index < self.model.hp.num_layers:
            self.model.front(g, index, x, guess=guess)
        elif self.model.draft_layer is None:
            g.store("logits", self.model.head(g, x))
        else:
            g.store("hidden", self.model.final_norm(g, x))

    def prepare(self) -> None:
        """Compiles every segment for the widest batch and for one token: a model that cannot run says so here."""
        cells = self.kv_cells
        for rows, n_kv in ((self.max_rows, cells), (1, min(cells, 256))):
            self._backend.begin_batch(rows, np.zeros((rows, n_kv), np.float16), 1)
            for segment in (*self._segments, *self._drafting):
                self._backend.compile(segment.name, segment.build)

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        """Runs one step.

        Returns:
            Logits, float32 [len(batch.outputs), vocab], valid until the next call.

        Raises:
            ExpertReadError: an expert could not be read; the KV cells of the batch hold nothing useful.
        """
        return self._run(batch, draft=False)

    @property
    def hidden(self) -> NDArray[np.float32]:
        """What the last step left for a draft to start from: [rows, hidden], valid until the next call."""
        found: NDArray[np.float32] = self._backend.host("hidden")
        return found

    def draft(self, batch: Batch, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """Runs the draft layer as one step: logits of the token after next.

        Args:
            batch: each row's token, at its own position; K and V of the draft layer go to the batch's cells.
            hidden: what `hidden` held for the token before, [rows, hidden].
        """
        self._backend.host("draft_hidden")[: len(hidden)] = hidden
        return self._run(batch, draft=True)

    def _run(self, batch: Batch, *, draft: bool) -> NDArray[np.float32]:
        rows, n = batch.tokens.size, batch.outputs.size
        backend, lane = self._backend, self._lane
        with lane.step(decode_rows=batch.decode_rows, prefill_rows=rows - batch.decode_rows, draft=draft):
            backend.host("tokens")[:rows] = batch.tokens
            backend.host("positions")[:rows] = batch.positions
            backend.host("cells")[:rows] = batch.cells
            backend.host("outputs")[:n] = batch.outputs
            backend.host("runs")[: len(batch.runs)] = batch.runs
            backend.host("num_runs")[0] = len(batch.runs)
            backend.begin_batch(rows, batch.mask, n)
            if draft:
                segments = self._drafting
            else:
                segments = self._guessing if lane.wants_guesses else self._segments
            for segment in segments:
                if segment.outputs and n == 0:
                    break
                backend.compile(segment.name, segment.build).run()
                if segment.layer is not None:
                    self._run_experts(segment, rows)
        logits: NDArray[np.float32] = backend.host("logits")[:n]
        return logits

    def _run_experts(self, segment: _Segment, rows: int) -> None:
        layer, backend, lane = segment.layer, self._backend, self._lane
        assert layer is not None
        ids, backend.host("expert_weights")[:rows] = route(backend.host("router")[:rows], self.model.router)
        kernel = self._kernels[layer]
        kernel.begin(rows)
        if segment.guess:
            lane.look_ahead(layer + 1, route(backend.host("guess")[:rows], self.model.router)[0])
        lane.run_layer(layer, ids, kernel)

    def close(self) -> None:
        """Frees the device's memory and closes the lane; idempotent."""
        self._lane.close()
        self._backend.close()


def _kind(tower: ExpertTower) -> tuple[object, ...]:
    return tuple((role, part.type, part.shape) for role, part in zip(tower.roles, tower.slices, strict=True))
