"""The first layers of a model with made-up weights, run by the real engine: what computing costs on this machine.

Owns the description of the shortened model, its weights and what is measured with it. Every expert's address is that of
one of a few made-up ones, so that little memory stands for many experts; kernels, lane, engine and threads are those
of serving. Then the same lane forgets its addresses and streams the real experts of these layers from the file, which
shows what a read costs the processor. Invariant: no weight of the file is computed with before that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from expertserve.bench.costs import ComputeCosts
from expertserve.bench.rates import Run, measure
from expertserve.config import Settings
from expertserve.engine.engine import Engine
from expertserve.engine.states import slots_for
from expertserve.errors import ConfigError
from expertserve.experts.batch import ComputeFn
from expertserve.experts.budget import SlotPlan, least_slots, size_classes
from expertserve.experts.lane import ExpertLane
from expertserve.experts.opening import LaneSettings
from expertserve.experts.reader import FileReader, open_reader
from expertserve.experts.stats import ExpertStats
from expertserve.gguf.file import GGUFFile, TensorType
from expertserve.models.forward import Forward
from expertserve.models.model import Model
from expertserve.models.registry import load_model
from expertserve.ops.base import KVType
from expertserve.ops.factory import make_backend
from expertserve.ops.ggml.made_up import fill_made_up
from expertserve.text.tokenizer import Tokenizer

ROUTED_LAYERS = 4
_EXPERT_BYTES = 512 << 20  # of made-up experts: many times what a processor's caches hold
_TOKENS = 24
_STREAMED_TOKENS = 48
_WARM_TOKENS = 3
_CONTEXT = 1024
_PREFILL_S = 4.0
_SMALL = -0.0625  # a vector that is no norm's factor: a bias, or a decay, which must not grow


class MiniatureFile(GGUFFile):
    """The first layers of a file, with weights that nobody read."""

    def __init__(self, file: GGUFFile, layers: int) -> None:
        self.paths = file.paths
        self.architecture = file.architecture
        self.metadata = {
            **file.metadata,
            f"{file.architecture}.block_count": layers,
            f"{file.architecture}.nextn_predict_layers": 0,
        }
        self.tensors = {name: info for name, info in file.tensors.items() if _layer(name) < layers}

    def read_tensor(self, name: str, out: memoryview) -> None:
        info = self.tensors[name]
        if len(info.shape) == 1 and info.type == TensorType.F32:
            np.frombuffer(out, np.float32)[:] = 1.0 if "norm" in name else _SMALL
        else:
            fill_made_up(info.type, out, crc32(name.encode()))


@dataclass(slots=True)
class Moment:
    """What the counters said when a layer's experts were asked for."""

    layer: int
    rows: int
    at: float
    expert_s: float
    stalled_s: float
    reads: int


class ObservedLane(ExpertLane):
    """A lane that notes when each layer is run."""

    moments: list[Moment]

    def run_layer(self, layer: int, ids: NDArray[np.int32], compute: ComputeFn) -> None:
        now, counters = perf_counter(), self.stats.current
        reads = counters.misses + counters.lookahead_reads
        self.moments.append(Moment(layer, len(ids), now, counters.expert_s, counters.stalled_s, reads))
        super().run_layer(layer, ids, compute)


@dataclass(frozen=True, slots=True)
class Period:
    """From one layer's experts to the next layer's: seconds in all, in kernels of experts and waiting; reads begun."""

    rows: int
    seconds: float
    expert_s: float
    stalled_s: float
    reads: int


@dataclass(frozen=True, slots=True)
class PrefillCosts:
    """Seconds of a chunk of `rows` tokens: of a layer without experts, of all its experts, and of the rest."""

    rows: int
    layer_s: float
    experts_s: float
    rest_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What the miniature said; `streamed` is False where no expert of its layers is in the file yet."""

    compute: ComputeCosts
    prefill: PrefillCosts
    routed_layers: int
    streamed: bool


@dataclass(slots=True)
class _World:
    model: Model
    lane: ObservedLane
    engine: Engine
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def run(self, prompt_tokens: int, tokens: int) -> tuple[Run, list[Period]]:
        self.lane.moments = []
        run = measure(self.engine, [self.rng.integers(0, self.model.vocab_size, prompt_tokens).tolist()], tokens)
        return run, _periods(self.lane.moments)


def measure_costs(model: Model, settings: Settings, between: Callable[[], None] = lambda: None) -> Measured:
    """Runs the miniature of a model.

    Args:
        model: the whole one.
        settings: those of serving.
        between: called after each part, for what is to be measured over the same seconds.

    Raises:
        ConfigError: the model has one routed layer; a layer's time is that between two of them.
        ExpertServeError: the backend has no kernels for the model, or there is no memory for the miniature.
    """
    if len(model.towers) < 2:
        raise ConfigError(f"{model.file.paths[0]}: has one layer with experts; times are taken between two or more")
    layers = sorted(model.towers)[:ROUTED_LAYERS][-1] + 1
    with _world(model.file, settings, layers, "off") as world:
        _point_at_made_up(world.lane)
        world.run(8, _WARM_TOKENS)
        small, _ = world.run(32, 1)
        rows = _rows_within(settings.chunk, 1 / small.prefill_tok_s)
        world.run(rows, 1)
        chunk, prefill_periods = world.run(rows, 1)
        run, decode_periods = world.run(rows, _TOKENS)
        routed = len(world.model.towers)
        decode = [p for p in decode_periods if p.rows == 1]
        assert run.decode_tok_s is not None
        each_s, expert_s = _typical(decode)
        compute = ComputeCosts(
            step_s=max(0.0, 1 / run.decode_tok_s - routed * each_s),
            layer_s=each_s - expert_s,
            expert_s=expert_s / model.hp.top_k,
        )
        layer_s, experts_s = _typical([p for p in prefill_periods if p.rows == rows])
        rest_s = max(0.0, chunk.first_token_ms[0] / 1000 - routed * layer_s)
        prefill = PrefillCosts(rows, layer_s - experts_s, experts_s, rest_s)
        between()
        streamed = _is_here(world.model)
        if streamed:
            _forget_made_up(world.lane)
            waiting = _streamed(world)
            between()
            compute = _with_reads(compute, model.hp.top_k, waiting)
    if streamed and settings.lookahead != "off":
        with _world(model.file, settings, layers, "on") as world:
            guessing = _streamed(world)
            between()
            compute = _with_reads(compute, model.hp.top_k, waiting, guessing)
    return Measured(compute, prefill, routed, streamed)


@contextmanager
def _world(file: GGUFFile, settings: Settings, layers: int, lookahead: str) -> Iterator[_World]:
    model = load_model(MiniatureFile(file, layers))
    stats = ExpertStats(every=0, emit=lambda line: None)
    lane_settings = LaneSettings(device=settings.device, threads=settings.io_threads, lookahead=lookahead)  # type: ignore[arg-type]
    with ExitStack() as opened:
        backend = make_backend(settings.device, threads=settings.threads, flash_attention=settings.flash_attn)
        opened.callback(backend.close)
        dense = model.dense_weights()
        backend.check(dense, model.towers.values())
        reader = open_reader(settings.reader, file.paths, cacheable_bytes=None)
        lane = ObservedLane.assemble(_few_slots(model, reader), reader, lane_settings, stats)
        opened.callback(lane.close)
        assert isinstance(lane, ObservedLane)
        lane.moments = []
        backend.load_weights(dense, model.file.read_tensor, lambda nbytes: None)
        context = min(max(_CONTEXT, 2 * settings.chunk), model.hp.context_length)
        forward = Forward(
            model, backend, lane, max_rows=settings.chunk, kv_cells=-(-context // 256) * 256,
            kv_type=KVType(settings.kv_type), min_outputs=1, state_slots=slots_for(1, 0),
        )  # fmt: skip
        engine = Engine(forward, Tokenizer.from_gguf(file), parallel=1, context=context, chunk=settings.chunk)
        engine.start()
        opened.callback(engine.stop)
        yield _World(model, lane, engine)


def _few_slots(model: Model, reader: FileReader) -> SlotPlan:
    """Slots of about _EXPERT_BYTES, at most three in five experts."""
    classes = size_classes(model.towers, reader.align)
    least = least_slots(classes, model.hp.top_k)
    share = min(0.6, _EXPERT_BYTES / sum(group.all_bytes for group in classes))
    slots = tuple(max(low, int(share * c.num_experts)) for c, low in zip(classes, least, strict=True))
    return SlotPlan(classes, slots, "a miniature")


def _point_at_made_up(lane: ExpertLane) -> None:
    """Writes made-up experts to all slots and lets each expert's address be one of theirs."""
    for streamer, group in zip(lane.streamers, lane.plan.classes, strict=True):
        store, layout, tower = streamer.store, streamer.layout, group.towers[0]
        content = np.zeros(store.slot_bytes, np.uint8)
        for part, offset, nbytes in zip(tower.slices, layout.offsets, layout.slice_bytes, strict=True):
            fill_made_up(part.type, content[offset : offset + nbytes].data, offset)
        bases = []
        for slot in range(store.slot_count):
            store.write_slot(slot, content.data)
            bases.append(store.slot_for_read(slot).pointer)
        at = np.array(bases, np.uint64)[np.arange(streamer.address.shape[1]) % len(bases)]
        streamer.address[:] = at + np.array(layout.offsets, np.uint64)[:, None]


def _forget_made_up(lane: ExpertLane) -> None:
    for streamer in lane.streamers:
        streamer.address[:] = 0


def _streamed(world: _World) -> list[Period]:
    """Periods of decode with the file's experts."""
    world.run(16, _WARM_TOKENS)
    return [p for p in world.run(16, _STREAMED_TOKENS)[1] if p.rows == 1]


def _with_reads(
    compute: ComputeCosts, top_k: int, waiting: Sequence[Period], guessing: Sequence[Period] = ()
) -> ComputeCosts:
    """Adds what reads and guesses cost the processor, by periods without look-ahead and with it."""
    miss_s = read_cost([waiting, guessing] if guessing else [waiting])
    if miss_s is None:  # each layer read as many as the next
        reads = waiting[0].reads
        miss_s = (_busy(waiting) - compute.layer_s - top_k * compute.expert_s) / reads if reads else 0.0
    miss_s = max(0.0, miss_s)
    guess_s = max(0.0, _busy(guessing, miss_s) - _busy(waiting, miss_s)) if guessing else 0.0
    return dataclasses.replace(compute, miss_s=miss_s, guess_s=guess_s)


def read_cost(runs: Sequence[Sequence[Period]]) -> float | None:
    """Seconds of the processor that a read costs: by how much periods with more reads are longer, stalls left out.

    The median of the slopes between all pairs of a run's periods (Theil 1950, Sen 1968), which moments when other
    processes took part hardly move; None where no two periods differ in reads.
    """
    slopes = []
    for periods in runs:
        reads = np.array([p.reads for p in periods])
        busy = np.array([p.seconds - p.stalled_s for p in periods])
        more = np.subtract.outer(reads, reads)
        slopes.append(np.subtract.outer(busy, busy)[more > 0] / more[more > 0])
    found = np.concatenate(slopes)
    return float(np.median(found)) if len(found) else None


def _busy(periods: Sequence[Period], miss_s: float = 0.0) -> float:
    return median(p.seconds - p.stalled_s - p.reads * miss_s for p in periods)


def _typical(periods: list[Period]) -> tuple[float, float]:
    """Medians of a period and of its experts."""
    return median(p.seconds for p in periods), median(p.expert_s for p in periods)


def _periods(moments: list[Moment]) -> list[Period]:
    """Between layers of the same step."""
    return [
        Period(a.rows, b.at - a.at, b.expert_s - a.expert_s, b.stalled_s - a.stalled_s, b.reads - a.reads)
        for a, b in zip(moments, moments[1:], strict=False)
        if b.layer > a.layer and a.rows == b.rows
    ]


def _rows_within(chunk: int, row_s: float) -> int:
    """As many rows as take about _PREFILL_S, at most a chunk."""
    rows = chunk
    while rows > 16 and rows * row_s > _PREFILL_S:
        rows //= 2
    return rows


def _is_here(model: Model) -> bool:
    """Whether all experts of the miniature's layers are in the files as far as those go."""
    present = [path.stat().st_size for path in model.file.paths]
    parts = [part for tower in model.towers.values() for part in tower.slices]
    return all(part.offset + part.nbytes <= present[part.file_index] for part in parts)


def _layer(name: str) -> int:
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" and parts[1].isdecimal() else -1
