"""One configuration of `expertserve bench`, measured in this process.

It drives the engine as a server does, so scheduling and sampling are in the figures. A first run, not timed, asks for
log-probabilities and checks that they are finite; every run has prompts of its own, so that no prefix is reused. Token
ids from a file are fed in one cold run instead, so that two engines compute the same thing; the model's own choices are
compared with them. The sequences of a batch are submitted in one step of the engine, so that the same rows are computed
together each time. The last line on standard output is one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from operator import eq
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from zlib import crc32

import numpy as np

from expertserve import __version__
from expertserve.bench.meter import Meter, Reading, difference, peak_memory
from expertserve.bench.page_cache import cached_share, drop, fill
from expertserve.config import Settings
from expertserve.data import model_path
from expertserve.engine.load import LoadedModel, load_model
from expertserve.engine.request import (
    ErrorEvent,
    Event,
    FinishEvent,
    Request,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
)
from expertserve.engine.waiting import Submits
from expertserve.errors import ConfigError, ExpertServeError, KernelUnavailableError
from expertserve.experts.stats import PHASES, ExpertStats, PhaseCounters
from expertserve.gguf.file import GGUFFile


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of a batch gave.

    Attributes:
        decode_tok_s: of all sequences, from the moment when each has its first token; None where none follows it.
        first_token_ms: of each sequence.
        intervals_ms: between two tokens of a sequence, of all of them.
        decoded: tokens of that stretch.
        sampled: all tokens.
        agreement: share of the forced tokens that the model itself would have chosen.
        digest: of the log-probability of every token, where they were asked for; equal digests are equal outputs, bit
            for bit.
        tokens: digest of the ids.
        readings: before, when each sequence had its first token, and after.
    """

    prefill_tok_s: float
    decode_tok_s: float | None
    first_token_ms: tuple[float, ...]
    intervals_ms: tuple[float, ...]
    decoded: int
    sampled: int
    tokens: str
    readings: tuple[Reading, Reading, Reading]
    agreement: float | None = None
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class Feed:
    """Token ids of a prompt and of the decode that follows it."""

    prompt: list[int]
    decode: tuple[int, ...]

    @classmethod
    def read(cls, path: Path) -> Feed:
        """Reads `{"prompt": [ids], "decode": [ids]}`.

        Raises:
            ConfigError: the file is something else.
        """
        try:
            content = json.loads(path.read_bytes())
            feed = cls(list(content["prompt"]), tuple(content["decode"]))
        except (ValueError, KeyError, TypeError):
            feed = cls([], ())
        if not feed.prompt or not feed.decode or not all(type(i) is int for i in (*feed.prompt, *feed.decode)):
            raise ConfigError(
                f'--feed {path}: should be JSON, {{"prompt": [ids], "decode": [ids]}}, neither list empty'
            )
        return feed


class _Watch:
    """What a batch's requests send, with the time when the engine sent it; called on the engine's thread."""

    def __init__(self, meter: Meter, count: int) -> None:
        self.times: list[list[float]] = [[] for _ in range(count)]
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.logprobs: list[list[TokenLogprob]] = [[] for _ in range(count)]
        self.finished: list[FinishEvent] = []
        self.readings: list[Reading] = []
        self.ended: SimpleQueue[ExpertServeError | None] = SimpleQueue()
        self._meter = meter

    def take(self, sequence: int, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self.times[sequence].append(perf_counter())
            self.tokens[sequence].append(event.token_id)
            self.logprobs[sequence] += [event.logprob] if event.logprob else []
            if len(self.times[sequence]) == 1 and all(self.times):
                self.readings.append(self._meter.read())
        elif isinstance(event, FinishEvent):
            self.finished.append(event)
            if len(self.finished) == len(self.times):
                self.ended.put(None)
        elif isinstance(event, ErrorEvent):
            self.ended.put(event.error)

    def begin(self, engine: Submits, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        self.readings.append(self._meter.read())
        try:
            for number, prompt in enumerate(prompts):
                engine.submit(Request(f"bench-{number}", prompt, params, lambda event, n=number: self.take(n, event)))  # type: ignore[misc]
        except ExpertServeError as error:
            self.ended.put(error)


def measure(
    engine: Submits,
    prompts: Sequence[list[int]],
    decode_tokens: int,
    *,
    meter: Meter | None = None,
    logprobs: int | None = None,
    forced: tuple[int, ...] = (),
) -> Run:
    """One greedy run of a batch; with `logprobs` it also looks at each token's, beside that many of the best.

    Raises:
        ExpertServeError: a request was refused or failed.
        KernelUnavailableError: a log-probability is not finite.
    """
    params = SamplingParams(
        temperature=0.0,
        max_tokens=decode_tokens,
        ignore_eos=True,
        logprobs=logprobs,
        forced=forced,
    )
    meter = meter or Meter(ExpertStats(every=0))
    watch = _Watch(meter, len(prompts))
    if len(prompts) == 1:
        watch.begin(engine, prompts, params)
    else:  # what a callback submits is queued before the engine's next step
        gate = SamplingParams(temperature=0.0, max_tokens=0)
        engine.submit(Request("bench-gate", [0], gate, lambda _: watch.begin(engine, prompts, params)))
    error = watch.ended.get()
    if error is not None:
        raise error
    watch.readings.append(meter.read())
    return _run_of(watch, forced)


def _run_of(watch: _Watch, forced: tuple[int, ...]) -> Run:
    output = [logprob.logprob for each in watch.logprobs for logprob in each]
    if not all(map(math.isfinite, output)):
        raise KernelUnavailableError("the model's output is not finite: kernels and file do not go together")
    chosen = [logprob.top[0][0] for each in watch.logprobs for logprob in each if logprob.top]
    timings, usages = [event.timings for event in watch.finished], [event.usage for event in watch.finished]
    computed = sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)
    last_first = max(timing.ttft_ms for timing in timings)
    decode_ms = max(timing.ttft_ms + timing.decode_ms for timing in timings) - last_first
    begins = max(times[0] for times in watch.times)
    decoded = sum(at > begins for times in watch.times for at in times[1:])
    ids = np.array([token for each in watch.tokens for token in each], np.int64)
    before, between, after = watch.readings
    return Run(
        prefill_tok_s=computed / (last_first - min(timing.queue_ms for timing in timings)) * 1000,
        decode_tok_s=decoded / decode_ms * 1000 if decoded else None,
        first_token_ms=tuple(timing.ttft_ms for timing in timings),
        intervals_ms=tuple(1000 * (b - a) for t in watch.times for a, b in zip(t, t[1:], strict=False)),
        decoded=decoded,
        sampled=len(ids),
        tokens=f"{crc32(ids.tobytes()):08x}",
        readings=(before, between, after),
        agreement=sum(map(eq, chosen, forced)) / len(forced) if forced else None,
        digest=f"{crc32(np.array(output).tobytes()):08x}" if output else None,
    )


def measure_fed(engine: Submits, feed: Feed, meter: Meter | None = None) -> Run:
    """One cold run over the given tokens; all of `decode` are computed, and one more token is sampled after them."""
    run = measure(engine, [feed.prompt], len(feed.decode) + 1, meter=meter, logprobs=1, forced=feed.decode)
    _show("fed", run)
    return run


def measure_all(
    engine: Submits,
    vocab_size: int,
    *,
    prompt_tokens: int,
    decode_tokens: int,
    repetitions: int,
    batch: int = 1,
    meter: Meter | None = None,
) -> tuple[Run, list[Run]]:
    """A checked run that warms up, and `repetitions` timed ones, with prompts that are the same in every process."""
    draws = np.random.default_rng(0)
    runs = []
    for number in range(repetitions + 1):
        prompts = draws.integers(0, vocab_size, (batch, prompt_tokens)).tolist()
        run = measure(engine, prompts, decode_tokens, meter=meter, logprobs=None if number else 0)
        runs.append(run)
        if number:
            _show(f"run {number}", run)
    return runs[0], runs[1:]


def measure_cold(model: LoadedModel, settings: Settings, meter: Meter) -> tuple[Run, Run]:
    """The first run of a process, timed, and a checked one after it."""
    draws = np.random.default_rng(0)
    shape = (settings.batch, settings.prompt_tokens)
    prompts = [draws.integers(0, model.tokenizer.vocab_size, shape).tolist() for _ in range(2)]
    first = measure(model.engine, prompts[0], settings.decode_tokens, meter=meter)
    _show("cold run", first)
    return first, measure(model.engine, prompts[1], settings.decode_tokens, meter=meter, logprobs=0)


def _show(name: str, run: Run) -> None:
    decode = "-" if run.decode_tok_s is None else f"{run.decode_tok_s:.2f} tok/s"
    print(f"{name}: prefill {run.prefill_tok_s:.1f} tok/s, decode {decode}", flush=True)


def fed_summary(run: Run) -> dict[str, object]:
    """A run over given tokens, with what tells whether its output was right."""
    return {**summary([run]), "agreement": run.agreement, "digest": run.digest}


def summary(runs: Sequence[Run]) -> dict[str, float | None]:
    """Medians over the runs."""
    decode = [run.decode_tok_s for run in runs if run.decode_tok_s is not None]
    return {
        "prefill_tok_s": round(statistics.median(run.prefill_tok_s for run in runs), 2),
        "decode_tok_s": round(statistics.median(decode), 3) if decode else None,
        "first_token_ms": round(statistics.median(ms for run in runs for ms in run.first_token_ms), 2),
    }


def counted(runs: Sequence[Run]) -> dict[str, object]:
    """What the counters say of the runs, and each run's own figures."""
    phases = {name: PhaseCounters() for name in PHASES}
    for run in runs:
        before, _, after = run.readings
        for name, total in phases.items():
            total.add(difference(after.phases[name], before.phases[name]))
    gaps = [ms for run in runs for ms in run.intervals_ms]
    disk = [_disk_bytes(run) for run in runs]
    known = all(first is not None for first, _ in disk)
    return {
        "prefill_tok_s_runs": [round(run.prefill_tok_s, 3) for run in runs],
        "decode_tok_s_runs": [round(run.decode_tok_s, 3) for run in runs if run.decode_tok_s is not None],
        "first_token_ms_runs": [round(ms, 3) for run in runs for ms in run.first_token_ms],
        "interval_p50_ms": round(float(np.percentile(gaps, 50)), 3) if gaps else None,
        "interval_p99_ms": round(float(np.percentile(gaps, 99)), 3) if gaps else None,
        "decoded": sum(run.decoded for run in runs),
        "sampled": sum(run.sampled for run in runs),
        "forwards": sum(run.readings[2].forwards - run.readings[0].forwards for run in runs),
        "draft_steps": sum(run.readings[2].draft_steps - run.readings[0].draft_steps for run in runs),
        "disk_bytes": {"prefill": sum(a or 0 for a, _ in disk), "decode": sum(b or 0 for _, b in disk)}
        if known
        else None,
        "other_cores": _other_cores(runs),
        "phases": {name: asdict(counters) for name, counters in phases.items()},
        "tokens_digest": f"{crc32(' '.join(run.tokens for run in runs).encode()):08x}",
    }


def _other_cores(runs: Sequence[Run]) -> float | None:
    """Cores that other processes kept busy meanwhile."""
    spans = [(run.readings[0], run.readings[2]) for run in runs]
    seconds = [after.others_s - before.others_s for before, after in spans if after.others_s and before.others_s]
    elapsed = sum(after.at_s - before.at_s for before, after in spans)
    return round(max(0.0, sum(seconds)) / elapsed, 3) if len(seconds) == len(spans) and elapsed > 0 else None


def _disk_bytes(run: Run) -> tuple[int | None, int | None]:
    """Bytes from storage until each sequence had its first token, and from there on."""
    before, between, after = (reading.disk_bytes for reading in run.readings)
    if before is None or between is None or after is None:
        return None, None
    return between - before, after - between


def bench(settings: Settings, stats: ExpertStats) -> int:
    """Measures the model that `settings` name and prints the result; returns the exit status."""
    feed = None if settings.feed is None else Feed.read(settings.feed)
    with closing(GGUFFile.open(model_path(settings.model))) as file:
        paths = file.paths
    if settings.page_cache != "any":
        (drop if settings.page_cache == "cold" else fill)(paths)
    cached = cached_share(paths)
    model = load_model(dataclasses.replace(settings, parallel=settings.batch, prompt_slowdown=0.0), stats)
    try:
        meter = Meter(stats, lambda: int(model.engine.snapshot()["steps"]))
        if feed is not None:
            runs = [measure_fed(model.engine, feed, meter)]
            result = fed_summary(runs[0])
        elif settings.page_cache == "cold":
            first, checked = measure_cold(model, settings, meter)
            runs = [first]
            result = {**summary(runs), "digest": checked.digest}
        else:
            checked, runs = measure_all(
                model.engine,
                model.tokenizer.vocab_size,
                prompt_tokens=settings.prompt_tokens,
                decode_tokens=settings.decode_tokens,
                repetitions=settings.repetitions,
                batch=settings.batch,
                meter=meter,
            )
            result = {**summary(runs), "digest": checked.digest}
        left = cached_share(paths)  # first: it says so where a file has gone
        conditions = _conditions(settings, model, stats, feed) | {"cached": [cached, left]}
        print(json.dumps({**result, **counted(runs), **conditions}))
    finally:
        model.close()
    return 0


def _conditions(settings: Settings, model: LoadedModel, stats: ExpertStats, feed: Feed | None) -> dict[str, object]:
    return {
        "version": __version__,
        "model": model.name,
        "file_bytes": sum(path.stat().st_size for path in model.file.paths),
        "threads": settings.threads,
        "kv_type": settings.kv_type,
        "flash_attn": settings.flash_attn,
        "prompt_tokens": len(feed.prompt) if feed else settings.prompt_tokens,
        "decode_tokens": len(feed.decode) if feed else settings.decode_tokens,
        "repetitions": 1 if feed or settings.page_cache == "cold" else settings.repetitions,
        "page_cache": settings.page_cache,
        "batch": settings.batch,
        "chunk": settings.chunk,
        "draft": settings.draft,
        "draft_tokens": settings.draft_tokens,
        "reader": stats.read_mode,
        "slots": model.lane.plan.total_slots,
        "peak_bytes": peak_memory(),
    }
