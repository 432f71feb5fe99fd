"""`expertserve bench`: prefill and decode rates of one sequence.

It drives the engine as a server does, so scheduling and sampling are in the figures. A first run, not timed, asks for
log-probabilities and checks that they are finite; every run has a prompt of its own, so that no prefix is reused. The
last line on standard output is one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from expertserve import __version__
from expertserve.config import Settings
from expertserve.engine.load import LoadedModel, load_model
from expertserve.engine.request import FinishEvent, SamplingParams, TokenEvent
from expertserve.engine.waiting import Submits, events
from expertserve.errors import KernelUnavailableError
from expertserve.experts.stats import ExpertStats


@dataclass(frozen=True, slots=True)
class Run:
    """Rates of one run."""

    prefill_tok_s: float
    decode_tok_s: float | None
    first_token_ms: float


def measure(engine: Submits, prompt: list[int], decode_tokens: int, *, check: bool = False) -> Run:
    """One greedy run; with `check` it also looks at each token's log-probability.

    Raises:
        KernelUnavailableError: a log-probability is not finite.
    """
    params = SamplingParams(temperature=0.0, max_tokens=decode_tokens, ignore_eos=True, logprobs=0 if check else None)
    finish = None
    with closing(events(engine, prompt, params)) as stream:
        for event in stream:
            if isinstance(event, TokenEvent) and event.logprob and not math.isfinite(event.logprob.logprob):
                raise KernelUnavailableError("the model's output is not finite: kernels and file do not go together")
            finish = event if isinstance(event, FinishEvent) else None
    assert finish is not None
    usage, timings = finish.usage, finish.timings
    computed, decoded = usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens - 1
    return Run(
        prefill_tok_s=computed / timings.prompt_ms * 1000,
        decode_tok_s=decoded / timings.decode_ms * 1000 if decoded > 0 else None,
        first_token_ms=timings.ttft_ms,
    )


def measure_all(
    engine: Submits, vocab_size: int, *, prompt_tokens: int, decode_tokens: int, repetitions: int
) -> list[Run]:
    """`repetitions` runs after a checked one, with prompts that are the same in every process."""
    draws = np.random.default_rng(0)
    runs = []
    for number in range(repetitions + 1):
        prompt = draws.integers(0, vocab_size, prompt_tokens).tolist()
        run = measure(engine, prompt, decode_tokens, check=number == 0)
        if number:
            runs.append(run)
            print(f"run {number}: prefill {run.prefill_tok_s:.1f} tok/s, decode {_shown(run.decode_tok_s)}", flush=True)
    return runs


def _shown(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.2f} tok/s"


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
    with closing(load_model(dataclasses.replace(settings, parallel=1), stats)) as model:
        runs = measure_all(
            model.engine,
            model.tokenizer.vocab_size,
            prompt_tokens=settings.prompt_tokens,
            decode_tokens=settings.decode_tokens,
            repetitions=settings.repetitions,
        )
        print(json.dumps({**summary(runs), **_conditions(settings, model)}))
    return 0


def _conditions(settings: Settings, model: LoadedModel) -> dict[str, object]:
    return {
        "version": __version__,
        "model": model.name,
        "file_bytes": sum(path.stat().st_size for path in model.file.paths),
        "threads": settings.threads,
        "kv_type": settings.kv_type,
        "flash_attn": settings.flash_attn,
        "prompt_tokens": settings.prompt_tokens,
        "decode_tokens": settings.decode_tokens,
        "repetitions": settings.repetitions,
    }
