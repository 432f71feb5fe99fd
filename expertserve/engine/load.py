"""From a file to a running engine: the one place where the parts are put together.

Everything that can refuse does so in the order in which it is cheap: header, tokenizer, shapes and types, memory, then
the weights. What was opened is closed again where a later part fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from expertserve import log
from expertserve.config import Settings
from expertserve.data import DEMO_NAME, model_path
from expertserve.engine.draft import scratch_cells
from expertserve.engine.engine import Engine
from expertserve.engine.states import slots_for
from expertserve.errors import CapacityError
from expertserve.experts.final_line import flush_final_line
from expertserve.experts.lane import ExpertLane
from expertserve.experts.memory import available_memory
from expertserve.experts.opening import LaneSettings
from expertserve.experts.stats import ExpertStats, write_line
from expertserve.gguf.file import GGUFFile
from expertserve.models.forward import Forward
from expertserve.models.model import Model
from expertserve.models.registry import load_model as describe_model
from expertserve.ops.base import KVType
from expertserve.ops.factory import make_backend
from expertserve.text.chat_template import ChatTemplate
from expertserve.text.tokenizer import Tokenizer
from expertserve.values import size_text

DEFAULT_CONTEXT = 8192
LEAST_CONTEXT = 512
KV_BUCKET = 256


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that answers.

    Attributes:
        name: how requests call it, unless an alias does.
        lane: its experts.
        memory_plan: bytes by what they are for, as planned before loading.
    """

    name: str
    file: GGUFFile
    tokenizer: Tokenizer
    template: ChatTemplate
    forward: Forward
    engine: Engine
    lane: ExpertLane
    memory_plan: dict[str, int]

    def close(self) -> None:
        """Ends the engine, then frees the model."""
        self.engine.stop()
        self.forward.close()


def load_model(settings: Settings, stats: ExpertStats) -> LoadedModel:
    """Opens, checks and loads the model that `settings` name, and starts its engine."""
    logger = log.get_logger(__name__)
    file = GGUFFile.open(model_path(settings.model))
    drafts = _drafts(settings)
    model = describe_model(file, draft=drafts > 0)
    tokenizer = Tokenizer.from_gguf(file)
    override = None if settings.chat_template is None else settings.chat_template.read_text(encoding="utf-8")
    template = ChatTemplate.from_gguf(file, tokenizer, override)
    with ExitStack() as opened:
        backend = make_backend(
            settings.device, threads=settings.threads, flash_attention=settings.flash_attn, on_abort=_on_abort
        )
        opened.callback(backend.close)
        dense = model.dense_weights()
        backend.check(dense, model.towers.values())
        free, reserve = backend.memory() or _host_memory()
        needs = memory_needs(model, settings, free, reserve)
        needs.require_fit()
        model.fit_context(needs.context)
        if settings.ctx and settings.ctx > needs.context:
            logger.warning(f"--ctx {settings.ctx} is more than the model was made for; using its {needs.context}")
        state_slots = slots_for(settings.parallel, drafts)
        judged = settings.parallel * (1 + drafts)
        lane = ExpertLane.open(
            file,
            model.towers,
            model.hp.top_k,
            _lane_settings(settings),
            stats,
            available_bytes=needs.left_bytes,
        )
        opened.callback(lane.close)
        for warning in lane.warnings:
            logger.warning(warning)
        with _progress("dense weights", needs.dense_bytes) as advance:
            backend.load_weights(dense, file.read_tensor, advance)
        forward = Forward(
            model,
            backend,
            lane,
            max_rows=max(settings.chunk, judged),
            kv_cells=needs.cells,
            kv_type=KVType(settings.kv_type),
            min_outputs=judged,
            state_slots=state_slots,
        )
        forward.prepare()
        _warm_up(lane)
        engine = Engine(
            forward,
            tokenizer,
            parallel=settings.parallel,
            context=needs.context,
            chunk=settings.chunk,
            draft=settings.draft,
            draft_tokens=drafts,
            slowdown=settings.prompt_slowdown,
            on_drafts=stats.count_drafts,
        )
        opened.pop_all()
    engine.start()
    logger.info("model ready", model=file.paths[0].name, context=engine.context, slots=lane.plan.reason)
    plan = {
        "dense weights": needs.dense_bytes,
        "KV cache": needs.kv_bytes + needs.state_bytes,
        "expert slots": lane.plan.arena_bytes,
        "reserve": reserve,
    }
    return LoadedModel(_name(file, settings.model), file, tokenizer, template, forward, engine, lane, plan)


def _on_abort(message: str) -> None:
    """The kernel library ends the process after this; its reason and the statistics are said first."""
    write_line(f"error: a kernel failed: {message}")
    flush_final_line()


def _host_memory() -> tuple[int, int]:
    """Free bytes of the host, and how many of them to leave alone."""
    memory = available_memory()
    return memory.nbytes, memory.reserve_bytes


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What is taken before expert slots are, and what it leaves them.

    Attributes:
        context: tokens that may be held at once.
        reserve_bytes: what is left to others.
        cells: of the KV cache; the context and what drafts need beside it.
        left_bytes: for slots; negative where the rest alone is too much.
    """

    reserve_bytes: int

    dense_bytes: int
    context: int
    cells: int
    kv_bytes: int
    state_bytes: int
    left_bytes: int

    def require_fit(self) -> None:
        """Raises CapacityError where there is too little memory even without experts."""
        if self.left_bytes < 0:
            kept = self.kv_bytes + self.state_bytes
            free = self.left_bytes + self.dense_bytes + kept + self.reserve_bytes
            raise CapacityError(
                f"{size_text(self.dense_bytes)} of dense weights and {size_text(kept)} of KV cache and states for "
                f"{self.cells} tokens do not fit the {size_text(free)} of memory there are, of which a reserve of "
                f"{size_text(self.reserve_bytes)} is left alone; experts come on top: lower --ctx or free memory"
            )


def memory_needs(model: Model, settings: Settings, free_bytes: int, reserve_bytes: int) -> MemoryNeeds:
    """Divides `free_bytes` of the memory where the model computes, from its header alone."""
    own = free_bytes - reserve_bytes
    dense = sum(info.nbytes for info in model.dense_weights())
    drafts = _drafts(settings)
    kv_type = KVType(settings.kv_type)
    context = min(settings.ctx or _default_context(model, kv_type, own - dense), model.hp.context_length)
    cells = -(-context // KV_BUCKET) * KV_BUCKET + scratch_cells(settings.parallel, drafts)
    kv, states = kv_bytes(model, kv_type, cells), slots_for(settings.parallel, drafts) * state_bytes(model)
    return MemoryNeeds(reserve_bytes, dense, context, cells, kv, states, own - dense - kv - states)


def _drafts(settings: Settings) -> int:
    """Tokens that are guessed at once."""
    return 0 if settings.draft == "off" else settings.draft_tokens


def kv_bytes(model: Model, kv_type: KVType, cells: int) -> int:
    """Bytes of a KV cache of `cells` tokens."""
    return cells * sum(layout.cell_bytes(kv_type) for layout in model.kv_layouts())


def state_bytes(model: Model) -> int:
    """Bytes of one sequence's recurrent state."""
    return sum(layout.nbytes for layout in model.recurrent_layouts())


def _default_context(model: Model, kv_type: KVType, left: int) -> int:
    """The model's context, but at most DEFAULT_CONTEXT and a quarter of the memory that the dense part leaves."""
    context = min(model.hp.context_length, DEFAULT_CONTEXT)
    while context > LEAST_CONTEXT and kv_bytes(model, kv_type, context) > left // 4:
        context //= 2
    return context


def _warm_up(lane: ExpertLane) -> None:
    total = lane.plan.total_slots
    slot_bytes = lane.plan.arena_bytes // total
    with _progress("experts", lane.plan.arena_bytes) as advance:
        done = 0

        def progress(experts: int, _: int) -> None:
            nonlocal done
            advance((experts - done) * slot_bytes)
            done = experts

        lane.warm_up(progress)


def _lane_settings(settings: Settings) -> LaneSettings:
    return LaneSettings(
        device=settings.device,
        budget=settings.expert_cache,
        host_cache=settings.host_cache,
        reader=settings.reader,
        threads=settings.io_threads,
        lookahead=settings.lookahead,
        profile=settings.profile,
        trace=settings.trace,
        forced=str(settings.expert_cache) == "off",
    )


def _name(file: GGUFFile, given: str) -> str:
    return given if given == DEMO_NAME else file.paths[0].stem


@contextmanager
def _progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error where that is a terminal; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total_bytes)
        yield lambda nbytes: progress.advance(task, nbytes)
