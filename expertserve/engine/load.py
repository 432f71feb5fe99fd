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
from expertserve.data import model_path
from expertserve.engine.engine import Engine
from expertserve.experts.lane import ExpertLane, LaneSettings
from expertserve.experts.stats import ExpertStats
from expertserve.gguf.file import GGUFFile
from expertserve.models.forward import Forward
from expertserve.models.registry import load_model as describe_model
from expertserve.ops.base import KVType
from expertserve.ops.factory import make_backend
from expertserve.text.chat_template import ChatTemplate
from expertserve.text.tokenizer import Tokenizer

DEFAULT_CONTEXT = 8192
KV_BUCKET = 256


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that answers.

    Attributes:
        name: how requests call it, unless an alias does.
    """

    name: str
    file: GGUFFile
    tokenizer: Tokenizer
    template: ChatTemplate
    forward: Forward
    engine: Engine

    def close(self) -> None:
        """Ends the engine, then frees the model."""
        self.engine.stop()
        self.forward.close()


def load_model(settings: Settings, stats: ExpertStats) -> LoadedModel:
    """Opens, checks and loads the model that `settings` name, and starts its engine."""
    file = GGUFFile.open(model_path(settings.model))
    model = describe_model(file)
    tokenizer = Tokenizer.from_gguf(file)
    override = None if settings.chat_template is None else settings.chat_template.read_text(encoding="utf-8")
    template = ChatTemplate.from_gguf(file, tokenizer, override)
    context = settings.ctx or min(model.hp.context_length, DEFAULT_CONTEXT)
    with ExitStack() as opened:
        backend = make_backend(settings.device, threads=settings.threads, flash_attention=settings.flash_attn)
        opened.callback(backend.close)
        dense = model.dense_weights()
        backend.check(dense, model.towers.values())
        lane = ExpertLane.open(file, model.towers, model.hp.top_k, _lane_settings(settings), stats)
        opened.callback(lane.close)
        with _progress("loading weights", sum(info.nbytes for info in dense)) as advance:
            backend.load_weights(dense, file.read_tensor, advance)
        forward = Forward(
            model,
            backend,
            lane,
            max_rows=max(settings.chunk, settings.parallel),
            kv_cells=-(-context // KV_BUCKET) * KV_BUCKET,
            kv_type=KVType(settings.kv_type),
            min_outputs=settings.parallel,
        )
        forward.prepare()
        engine = Engine(forward, tokenizer, parallel=settings.parallel, context=context, chunk=settings.chunk)
        opened.pop_all()
    engine.start()
    log.get_logger(__name__).info(
        "model ready", model=file.paths[0].name, context=engine.context, kv_mib=forward.kv_bytes >> 20
    )
    return LoadedModel(_name(file, settings.model), file, tokenizer, template, forward, engine)


def _lane_settings(settings: Settings) -> LaneSettings:
    return LaneSettings(
        device=settings.device, budget=settings.expert_cache, reader=settings.reader, threads=settings.io_threads
    )


def _name(file: GGUFFile, given: str) -> str:
    return given if model_path(given).name != given and "/" not in given else file.paths[0].stem


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
