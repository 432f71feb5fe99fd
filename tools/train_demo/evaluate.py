"""What the card says of the demo model, measured on the files themselves: by the project's engine and by llama.cpp."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import xllamacpp
from numpy.typing import NDArray

from expertserve.config import prepare_libraries, resolve
from expertserve.engine.load import LoadedModel, load_model
from expertserve.engine.request import FinishEvent, SamplingParams, TokenEvent
from expertserve.engine.waiting import events
from expertserve.experts.stats import ExpertStats
from expertserve.experts.trace import read_trace
from expertserve.kv.cache import bucket_length
from expertserve.models.batch import Batch
from tests.models.build import make_batch

from .corpus import Scored, Tokens, bits_per_byte, windows_of
from .data import Document
from .model import Model

QUESTIONS = (
    "Why is the sky blue?",
    "What is a river?",
    "What is the capital of France?",
    "What does it mean to borrow?",
    "What is the opposite of hot?",
    "Use the word brave in a sentence.",
    "Who are you?",
    "Tell me a short story.",
)
OPENINGS = ("My fellow citizens, the state of our Union is", "And the LORD said unto Moses,", "The whale")
TRACE_TOKENS = 20_000
MAX_CONTEXT = 1024


def bits(streams: Sequence[Scored], nats: dict[str, float]) -> dict[str, float]:
    """Bits per byte of each source and of `all`."""
    found = {s.source: bits_per_byte(nats[s.source], s.bytes) for s in streams}
    return {**found, "all": bits_per_byte(sum(nats.values()), sum(s.bytes for s in streams))}


@torch.no_grad()
def score_float(model: Model, streams: Sequence[Scored]) -> dict[str, float]:
    """Bits per byte of the trained weights in float32."""
    nats = {}
    for stream in streams:
        nats[stream.source] = 0.0
        for window in windows_of(stream.tokens, model.shape.context):
            tokens = torch.from_numpy(window)
            logits, _, _ = model(tokens[None, :-1])
            nats[stream.source] += F.cross_entropy(logits[0], tokens[1:], reduction="sum").item()
    return bits(streams, nats)


def score_file(path: Path, streams: Sequence[Scored], threads: int) -> dict[str, float]:
    """Bits per byte of a GGUF file as the project computes it, in windows of its whole context."""
    model, _ = open_model(path, threads)
    nats = {}
    for stream in streams:
        nats[stream.source] = 0.0
        for window in windows_of(stream.tokens, model.forward.context_length):
            logits = torch.from_numpy(model.forward(_batch(window[:-1], 0)))
            nats[stream.source] += F.cross_entropy(logits, torch.from_numpy(window[1:]), reduction="sum").item()
    model.close()
    return bits(streams, nats)


def compressed(documents: Sequence[Document]) -> dict[str, float]:
    """Bits per byte that gzip and xz make of the held-out text, all of it in one piece."""
    text = "\n".join(d.text for d in documents if d.held_out).encode()
    return {
        "gzip": 8 * len(gzip.compress(text, 9)) / len(text),
        "xz": 8 * len(lzma.compress(text, preset=9)) / len(text),
    }


def held_out_windows(streams: Sequence[Scored], length: int) -> list[Tokens]:
    """Windows of `length` tokens, the sources taking turns, TRACE_TOKENS tokens in all."""
    turns: list[Iterator[Tokens]] = [windows_of(s.tokens, length) for s in streams]
    found: list[Tokens] = []
    while turns and sum(map(len, found)) < TRACE_TOKENS:
        for turn in list(turns):
            window = next(turn, None)
            if window is None or len(window) <= length:
                turns.remove(turn)
            else:
                found.append(window[:-1])
    return found[: -(-TRACE_TOKENS // length)]


def stream(
    path: Path, windows: Sequence[Tokens], threads: int, budget: str, trace: Path | None = None
) -> dict[str, Any]:
    """Decodes the windows token by token with `budget` of the experts in slots: hits, and a digest of all logits."""
    flags = {"expert_cache": budget, "reader": "buffered", "lookahead": "off"}
    model, stats = open_model(path, threads, **flags, **({"trace": str(trace)} if trace else {}))
    digest = hashlib.sha256()
    for window in windows:
        for position in range(len(window)):
            digest.update(model.forward(_batch(window[position : position + 1], position)).tobytes())
    phases = stats.snapshot()["phases"]["decode"]
    model.close()
    return {"budget": budget, "hits": phases["hits"], "misses": phases["misses"], "logits_sha256": digest.hexdigest()}


def routing(trace: Path) -> dict[str, Any]:
    """Of each layer: entropy of the use of its experts in bits, and what share its most used quarter takes."""
    layers, steps = read_trace(trace)
    counts = {layer: np.zeros(experts) for layer, experts in layers.items()}
    tokens = again = asked = 0
    before: dict[int, set[int]] = {}
    for step in steps:
        tokens += step.rows.decode_rows
        for layer, ids in step.layers:
            np.add.at(counts[layer], ids.ravel(), 1)
            now = set(ids.ravel().tolist())
            again, asked = again + len(now & before.get(layer, set())), asked + len(now)
            before[layer] = now
    shares = [np.sort(c / c.sum())[::-1] for c in counts.values()]
    entropy = [float(-(s[s > 0] * np.log2(s[s > 0])).sum()) for s in shares]
    quarter = [float(s[: len(s) // 4].sum()) for s in shares]
    return {"tokens": tokens, "entropy_bits": entropy, "top_quarter": quarter, "chosen_again_next_token": again / asked}


def samples(path: Path, threads: int) -> list[dict[str, str]]:
    """Greedy answers to QUESTIONS as a chat, and continuations of OPENINGS at temperature 0.8 from seed 1."""
    model, _ = open_model(path, threads)
    chats = [model.template.render([{"role": "user", "content": q}]) for q in QUESTIONS]
    found = [{"prompt": q, "answer": _answer(model, c, 0.0, 60)} for q, c in zip(QUESTIONS, chats, strict=True)]
    found += [{"prompt": o, "answer": _answer(model, o, 0.8, 80)} for o in OPENINGS]
    model.close()
    return found


def beside_llama_cpp(
    path: Path, windows: Sequence[Tokens], threads: int, positions: int = 48, greedy: int = 64
) -> dict[str, Any]:
    """Log-probabilities and greedy continuations by us and by llama.cpp, on the same file and token ids.

    The end of a text is never taken: told to go on, llama.cpp leaves it out of the choice, and so does `_greedy`.
    """
    model, _ = open_model(path, threads)
    peer = _LlamaCpp(path, threads)
    errors, same_best, lengths, gaps = [], 0, [], []
    for number in range(positions):
        window = windows[number % len(windows)]
        ids = window[: 16 + 7 * number]
        ours = torch.from_numpy(model.forward(_batch(ids, 0, last_only=True)).copy())[0].log_softmax(-1).numpy()
        theirs = peer.log_probabilities(ids.tolist(), len(ours))
        errors.append(float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)))
        same_best += int(ours.argmax() == theirs.argmax())
    for window in windows[:12]:
        prompt = window[:64].tolist()
        ours_ids, theirs_ids = _greedy(model, prompt, greedy), peer.greedy(prompt, greedy)
        pairs = zip(ours_ids, theirs_ids, strict=True)
        agreed = next((i for i, (a, b) in enumerate(pairs) if a != b), greedy)
        lengths.append(agreed)
        if agreed < greedy:
            ids = np.array([*prompt, *ours_ids[:agreed]], np.int64)
            logits = model.forward(_batch(ids, 0, last_only=True))[0].copy()
            logits[list(model.tokenizer.eog_ids)] = -np.inf
            best = np.sort(logits)
            gaps.append(float(best[-1] - best[-2]))
    model.close()
    return {
        "positions": positions,
        "median_relative_error": float(np.median(errors)),
        "largest_relative_error": max(errors),
        "same_best_token": same_best,
        "greedy_runs": len(lengths),
        "greedy_equal": lengths.count(greedy),
        "greedy_agreed_tokens": lengths,
        "gaps_where_they_part": gaps,
    }


def open_model(path: Path, threads: int, **flags: str) -> tuple[LoadedModel, ExpertStats]:
    prepare_libraries()
    stats = ExpertStats(every=0, emit=lambda line: None)
    told = {
        "model": str(path),
        "threads": str(threads),
        "ctx": str(MAX_CONTEXT),
        "chunk": str(MAX_CONTEXT),
        "parallel": "1",
        "stats_every": "0",
    }
    return load_model(resolve({**told, **flags}), stats), stats


def _batch(ids: Tokens, start: int, *, last_only: bool = False) -> Batch:
    """One sequence's tokens from position `start`, with cells for them and what went before."""
    cells = bucket_length(start + len(ids), MAX_CONTEXT)
    return make_batch(ids.tolist(), start, n_kv=cells, all_outputs=not last_only)


def _answer(model: LoadedModel, prompt: str, temperature: float, count: int) -> str:
    ids = model.tokenizer.encode(prompt, parse_special=True)
    params = SamplingParams(temperature=temperature, max_tokens=count, seed=1)
    return "".join(
        e.text for e in events(model.engine, ids, params) if isinstance(e, (TokenEvent, FinishEvent))
    ).strip()


def _greedy(model: LoadedModel, prompt: list[int], count: int) -> list[int]:
    bias = dict.fromkeys(model.tokenizer.eog_ids, -100.0)
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logit_bias=bias)
    return [e.token_id for e in events(model.engine, prompt, params) if isinstance(e, TokenEvent)]


class _LlamaCpp:
    """llama.cpp on a file, fed with token ids."""

    def __init__(self, path: Path, threads: int) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.n_gpu_layers = 1024, 1, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.warmup = params.fit_params = False
        self._server = xllamacpp.Server(params)

    def _ask(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []
        self._server.handle_completions(body, lambda c: chunks.append(c if isinstance(c, dict) else json.loads(c)))
        return chunks

    def log_probabilities(self, ids: list[int], vocab: int) -> NDArray[np.float64]:
        """log p of every token after `ids`."""
        (answer,) = self._ask(
            {
                "prompt": ids,
                "max_tokens": 1,
                "temperature": 0,
                "logprobs": vocab,
                "n_probs": vocab,
                "cache_prompt": False,
            }
        )
        found = np.full(vocab, np.nan)
        for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            found[entry["id"]] = entry["logprob"]
        return found

    def greedy(self, ids: list[int], count: int) -> list[int]:
        body = {
            "prompt": ids,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "cache_prompt": False,
        }
        (answer,) = self._ask(body)
        return [entry["id"] for entry in answer["choices"][0]["logprobs"]["content"]]


def write_json(path: Path, report: dict[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=1) + "\n")
