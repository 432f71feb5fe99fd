"""`expertserve bench`: prefill and decode rates of one sequence.

It drives the engine as a server does, so scheduling and sampling are in the figures. A first run, not timed, asks for
log-probabilities and checks that they are finite; every run has a prompt of its own, so that no prefix is reused. Token
ids from a file are fed in one cold run instead, so that two engines compute the same thing; the model's own choices are
compared with them. The last line on standard output is one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from contextlib import closing
from dataclasses import dataclass
from operator import eq
from pathlib import Path
from zlib import crc32

import numpy as np

from expertserve import __version__
from expertserve.config import Settings
from expertserve.engine.load import LoadedModel, load_model
from expertserve.engine.request import FinishEvent, SamplingParams, TokenEvent
from expertserve.engine.waiting import Submits, events
from expertserve.errors import ConfigError, KernelUnavailableError
from expertserve.experts.stats import ExpertStats


@dataclass(frozen=True, slots=True)
class Run:
    """Rates of one run.

    Attributes:
        agreement: share of the forced tokens that the model itself would have chosen.
        digest: of the log-probability of every token of a forced run; equal digests are equal outputs, bit for bit.
    """

    prefill_tok_s: float
    decode_tok_s: float | None
    first_token_ms: float
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


def measure(
    engine: Submits, prompt: list[int], decode_tokens: int, *, logprobs: int | None = None, forced: tuple[int, ...] = ()
) -> Run:
    """One greedy run; with `logprobs` it also looks at each token's, beside that many of the best.

    Raises:
        KernelUnavailableError: a log-probability is not finite.
    """
    params = SamplingParams(
        temperature=0.0,
        max_tokens=decode_tokens,
        ignore_eos=True,
        logprobs=logprobs,
        forced=forced,
    )
    finish = None
    chosen: list[int] = []
    output: list[float] = []
    with closing(events(engine, prompt, params)) as stream:
        for event in stream:
            if isinstance(event, TokenEvent) and event.logprob:
                if not math.isfinite(event.logprob.logprob):
                    raise KernelUnavailableError(
                        "the model's output is not finite: kernels and file do not go together"
                    )
                output.append(event.logprob.logprob)
                chosen += [event.logprob.top[0][0]] if event.logprob.top else []
            finish = event if isinstance(event, FinishEvent) else None
    assert finish is not None
    usage, timings = finish.usage, finish.timings
    computed, decoded = usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens - 1
    return Run(
        prefill_tok_s=computed / timings.prompt_ms * 1000,
        decode_tok_s=decoded / timings.decode_ms * 1000 if decoded > 0 else None,
        first_token_ms=timings.ttft_ms,
        agreement=sum(map(eq, chosen, forced)) / len(forced) if forced else None,
        digest=f"{crc32(np.array(output).tobytes()):08x}" if forced else None,
    )


def measure_fed(engine: Submits, feed: Feed) -> Run:
    """One cold run over the given tokens; all of `decode` are computed, and one more token is sampled after them."""
    run = measure(engine, feed.prompt, len(feed.decode) + 1, logprobs=1, forced=feed.decode)
    _show("fed", run)
    return run


def measure_all(
    engine: Submits, vocab_size: int, *, prompt_tokens: int, decode_tokens: int, repetitions: int
) -> list[Run]:
    """`repetitions` runs after a checked one, with prompts that are the same in every process."""
    draws = np.random.default_rng(0)
    runs = []
    for number in range(repetitions + 1):
        prompt = draws.integers(0, vocab_size, prompt_tokens).tolist()
        run = measure(engine, prompt, decode_tokens, logprobs=None if number else 0)
        if number:
            runs.append(run)
            _show(f"run {number}", run)
    return runs


def _show(name: str, run: Run) -> None:
    decode = "-" if run.decode_tok_s is None else f"{run.decode_tok_s:.2f} tok/s"
    print(f"{name}: prefill {run.prefill_tok_s:.1f} tok/s, decode {decode}", flush=True)


def fed_summary(run: Run) -> dict[str, float | str | None]:
    """A run over given tokens, with what tells whether its output was right."""
    return {**summary([run]), "agreement": run.agreement, "digest": run.digest}


def summary(runs: list[Run]) -> dict[str, float | None]:
    """Medians over the runs."""
    decode = [run.decode_tok_s for run in runs if run.decode_tok_s is not None]
    return {
        "prefill_tok_s": round(statistics.median(run.prefill_tok_s for run in runs), 2),
        "decode_tok_s": round(statistics.median(decode), 3) if decode else None,
        "first_token_ms": round(statistics.median(run.first_token_ms for run in runs), 2),
    }


def bench(settings: Settings, stats: ExpertStats) -> int:
    """Measures the model that `settings` name and prints the result; returns the exit status."""
    feed = None if settings.feed is None else Feed.read(settings.feed)
    with closing(load_model(dataclasses.replace(settings, parallel=1), stats)) as model:
        if feed is not None:
            result = fed_summary(measure_fed(model.engine, feed))
        else:
            runs = measure_all(
                model.engine,
                model.tokenizer.vocab_size,
                prompt_tokens=settings.prompt_tokens,
                decode_tokens=settings.decode_tokens,
                repetitions=settings.repetitions,
            )
            result = dict(summary(runs))
        print(json.dumps({**result, **_conditions(settings, model, feed)}))
    return 0


def _conditions(settings: Settings, model: LoadedModel, feed: Feed | None) -> dict[str, object]:
    return {
        "version": __version__,
        "model": model.name,
        "file_bytes": sum(path.stat().st_size for path in model.file.paths),
        "threads": settings.threads,
        "kv_type": settings.kv_type,
        "flash_attn": settings.flash_attn,
        "prompt_tokens": len(feed.prompt) if feed else settings.prompt_tokens,
        "decode_tokens": len(feed.decode) if feed else settings.decode_tokens,
        "repetitions": 1 if feed else settings.repetitions,
    }
