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
from expertserve.ops.base import Backend, ExpertKernel, ExpertShape, Graph, HostAccess, KVType, Mask, Tensor

READS, WRITES, NONE = HostAccess.READS, HostAccess.WRITES, HostAccess.NONE
LOGIT_BYTES = 64 << 20
"""Most bytes of logits one forward returns, unless a single row a sequence is more."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """A stretch of the forward that runs without the host.

    Attributes:
        layer: the layer whose experts follow it; None for the head.
        guess: the layer whose experts it also guesses.
        outputs: it is of use only where logits are asked for.
    """

    name: str
    build: Callable[[Graph], None]
    layer: int | None
    guess: int | None = None
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
        self._reaches = model.reaches()
        self._position_factors = model.position_factors()
        self._cell_positions = np.zeros(kv_cells, np.int32)
        backend.allocate_kv(model.kv_layouts(), kv_cells, kv_type)
        self.state_slots = state_slots if model.recurrent_layouts() else 0
        backend.allocate_states(model.recurrent_layouts(), self.state_slots)
        self._allocate_buffers()
        self._kernels = self._make_kernels()
        self._biases = self._read_by_expert(model.router_bias)
        self._scales = self._read_by_expert(model.expert_scale)
        self._segments = self._make_segments(guessing=False)
        self._guessing = self._make_segments(guessing=True)
        self._drafting = self._draft_segments()
        if self._drafting:
            logits = _Segment("logits", self._build_logits, None, outputs=True)
            self._segments.append(logits)
            self._guessing.append(logits)

    def _allocate_buffers(self) -> None:
        hp, rows = self.model.hp, self.max_rows
        buffers: dict[str, tuple[tuple[int, ...], type, HostAccess]] = {
            "tokens": ((rows,), np.int32, WRITES),
            "positions": ((rows,), np.int32, WRITES),
            "cells": ((rows,), np.int64, WRITES),
            "outputs": ((rows,), np.int32, WRITES),
            "runs": ((rows, 4), np.int32, WRITES),
            "num_runs": ((1,), np.int32, WRITES),
            "mask": ((rows * self.kv_cells,), np.float16, WRITES),
            "residual": ((rows, hp.hidden), np.float32, NONE),
            "ffn_input": ((rows, self.model.expert_hidden), np.float32, NONE),
            "router": ((rows, hp.num_experts), np.float32, READS),
            "guess": ((rows, hp.num_experts), np.float32, READS),
            "expert_weights": ((rows, hp.top_k), np.float32, WRITES),
            "expert_out": ((rows * hp.top_k, self.model.expert_hidden), np.float32, NONE),
            "logits": ((self.max_outputs, self.vocab_size), np.float32, READS),
        }
        if self.model.draft_layer is not None:
            buffers["hidden"] = ((rows, hp.hidden), np.float32, READS)
            buffers["draft_hidden"] = ((rows, hp.hidden), np.float32, WRITES)
        if self.model.has_shared_expert:
            buffers["shared"] = ((rows, hp.hidden), np.float32, NONE)
        for name in self._reaches:
            buffers[name] = buffers["mask"]
        for name in self._position_factors:
            buffers[name] = ((rows, 1), np.float32, WRITES)
        for name, (shape, dtype, access) in buffers.items():
            self._backend.allocate_buffer(name, shape, dtype, access)

    def _make_kernels(self) -> dict[int, ExpertKernel]:
        """One kernel for each kind of expert; layers whose experts are alike share it."""
        by_kind: dict[tuple[object, ...], ExpertKernel] = {}
        kernels = {}
        for layer, tower in self.model.towers.items():
            if tower.num_experts != self.model.hp.num_experts:
                raise UnsupportedModelError(
                    f"layer {layer} has {tower.num_experts} experts, metadata says {self.model.hp.num_experts}"
                )
            shape = self.model.expert_shape(tower)
            kind = _kind(tower, shape)
            if kind not in by_kind:
                by_kind[kind] = self._backend.expert_kernel(tower, shape)
            kernels[layer] = by_kind[kind]
        return kernels

    def _make_segments(self, *, guessing: bool) -> list[_Segment]:
        """One segment up to each layer's routed experts, one for each layer without any, then the rest."""
        model = self.model
        routed = [layer for layer in model.towers if layer < model.hp.num_layers]
        following = dict(zip(routed, routed[1:], strict=False)) if guessing else {}
        segments = []
        for layer in range(model.hp.num_layers):
            guess = following.get(layer)
            if layer in model.towers:
                name = f"layer.{layer}{'' if guess is None else '.guess'}"
                segments.append(_Segment(name, partial(self._build_front, layer=layer, guess=guess), layer, guess))
            else:
                segments.append(_Segment(f"layer.{layer}", partial(self._build_dense, layer=layer), None))
        return [*segments, _Segment("last", self._build_last, None, outputs=model.draft_layer is None)]

    def _enter(self, g: Graph, layer: int) -> Tensor:
        """The residual stream that a layer gets: the embeddings, or what the layer before it left."""
        if layer == 0:
            return self.model.embed(g)
        return self.model.join(g, layer - 1) if layer - 1 in self.model.towers else g.load("residual")

    def _build_front(self, g: Graph, layer: int, guess: int | None) -> None:
        self.model.front(g, layer, self._enter(g, layer), guess=guess)

    def _build_dense(self, g: Graph, layer: int) -> None:
        g.store("residual", self.model.dense_layer(g, layer, self._enter(g, layer)))

    def _build_last(self, g: Graph) -> None:
        model, x = self.model, self._enter(g, self.model.hp.num_layers)
        if model.draft_layer is None:
            g.store("logits", model.logits(g, model.final_norm(g, g.select_outputs(x))))
        else:
            g.store("hidden", model.final_norm(g, x))

    def _build_logits(self, g: Graph) -> None:
        g.store("logits", self.model.logits(g, g.select_outputs(g.load("hidden"))))

    def _read_by_expert(self, named: Callable[[int], str | None]) -> dict[int, NDArray[np.float32]]:
        """By layer the weight of that name, one value an expert, which the host computes with."""
        found = {}
        for layer in self.model.towers:
            if (name := named(layer)) is not None:
                info = self.model.file.tensors[name]
                if info.type.name != "F32" or info.shape != (self.model.hp.num_experts,):
                    raise UnsupportedModelError(
                        f"{name} is {info.type.name} {list(info.shape)}, expected one F32 an expert"
                    )
                found[layer] = np.empty(info.shape, np.float32)
                self.model.file.read_tensor(name, found[layer].data.cast("B"))
        return found

    def _draft_segments(self) -> list[_Segment]:
        """The draft layer's own chain."""
        model, layer = self.model, self.model.draft_layer
        if layer is None:
            return []

        def last(g: Graph) -> Tensor:
            return g.select_outputs(g.load("hidden"))

        return [
            _Segment("draft.layer", lambda g: model.front(g, layer, model.draft_input(g)), layer),
            _Segment("draft.hidden", lambda g: g.store("hidden", model.draft_norm(g, model.join(g, layer))), None),
            _Segment("draft.logits", lambda g: g.store("logits", model.draft_logits(g, last(g))), None, outputs=True),
        ]

    def prepare(self) -> None:
        """Compiles every segment for the widest batch and for one token: a model that cannot run says so here."""
        cells = self.kv_cells
        narrower = [(rows, cells) for rows in self._backend.other_widths if rows < self.max_rows]
        for rows, n_kv in ((self.max_rows, cells), *narrower, (1, min(cells, 256))):
            mask = np.zeros((rows, n_kv), np.float16)
            self._backend.begin_batch(rows, mask, 1, dict.fromkeys(self._reaches, mask))
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
            for name, factor in self._position_factors.items():
                backend.host(name)[:rows, 0] = factor(batch.positions)
            backend.host("outputs")[:n] = batch.outputs
            backend.host("runs")[: len(batch.runs)] = batch.runs
            backend.host("num_runs")[0] = len(batch.runs)
            if not draft:
                self._cell_positions[batch.cells] = batch.positions
            backend.begin_batch(rows, batch.mask, n, self._masks_in_reach(batch))
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

    def _masks_in_reach(self, batch: Batch) -> dict[str, Mask]:
        """The batch's mask, less the cells that are out of a reach; a draft's are those of its target."""
        at = self._cell_positions[: batch.mask.shape[1]]
        hidden = np.float16(-np.inf)
        return {
            name: np.where(reach.includes(batch.positions[:, None], at[None, :]), batch.mask, hidden)
            for name, reach in self._reaches.items()
        }

    def _run_experts(self, segment: _Segment, rows: int) -> None:
        layer, backend, lane = segment.layer, self._backend, self._lane
        assert layer is not None
        rule, biases = self.model.router, self._biases
        logits = backend.host("router")[:rows]
        ids, weights = route(logits, rule, biases.get(layer))
        if layer in self._scales:
            weights = weights * self._scales[layer][ids]
        backend.host("expert_weights")[:rows] = weights
        kernel = self._kernels[layer]
        kernel.begin(rows)
        if segment.guess is not None:
            guess = route(backend.host("guess")[:rows], rule, biases.get(segment.guess))[0]
            lane.look_ahead(segment.guess, guess)
        lane.run_layer(layer, ids, kernel)

    def close(self) -> None:
        """Frees the device's memory and closes the lane; idempotent."""
        self._lane.close()
        self._backend.close()


def _kind(tower: ExpertTower, shape: ExpertShape) -> tuple[object, ...]:
    parts = tuple((role, part.type, part.shape) for role, part in zip(tower.roles, tower.slices, strict=True))
    return (*parts, *shape.biases.values(), shape.limit)
