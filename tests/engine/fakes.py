"""A model and a tokenizer whose every output is a hash, so that any mistake of the engine changes a token.

`HashForward` has the structure of a two-layer transformer: layer 0 keeps the token and position of each cell, layer 1
keeps a hash of everything the writing row saw in layer 0, and the logits are a hash of everything the row sees in
layer 1; a recurrent one adds a running hash of the sequence, kept in its state slot. A wrong mask, cell, position,
stale cell or leak between sequences therefore changes the logits. `Oracle` computes the same function from a list of
tokens alone, without cells, masks, slots or batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertserve.engine.engine import Engine
from expertserve.engine.request import (
    ErrorEvent,
    Event,
    FinishEvent,
    PromptEvent,
    Request,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
)
from expertserve.engine.sampler import Sampler
from expertserve.models.batch import Batch

U64 = NDArray[np.uint64]


def mix(x: U64) -> U64:
    """splitmix64's finaliser."""
    x = (x + np.uint64(0x9E3779B97F4A7C15)) & np.uint64(2**64 - 1)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def embed(tokens: NDArray[np.int32], positions: NDArray[np.int32]) -> U64:
    return mix(tokens.astype(np.uint64) * np.uint64(1_000_003) + mix(positions.astype(np.uint64)))


def logits_of(states: U64, vocab_size: int) -> NDArray[np.float32]:
    grid = mix(states[:, None] + mix(np.arange(vocab_size, dtype=np.uint64))[None, :])
    return (grid >> np.uint64(40)).astype(np.float32) / np.float32(2**24) * 8


class HashForward:
    """The fake model; see the module docstring."""

    def __init__(
        self,
        vocab_size: int = 97,
        max_rows: int = 64,
        kv_cells: int = 2048,
        context_length: int = 4096,
        max_outputs: int | None = None,
        state_slots: int = 0,
    ) -> None:
        self.state_slots, self._states = state_slots, np.zeros(state_slots, np.uint64)
        self.vocab_size, self.context_length = vocab_size, context_length
        self.max_rows, self.kv_cells = max_rows, kv_cells
        self.max_outputs = max_rows if max_outputs is None else max_outputs
        self.batches: list[tuple[int, int, int]] = []  # rows, decode rows, outputs
        self.fault: Callable[[Batch], None] = lambda batch: None
        self._layers = [np.zeros(kv_cells, np.uint64), np.zeros(kv_cells, np.uint64)]
        self._draft_layer = np.zeros(kv_cells, np.uint64)
        self.hidden = np.zeros((max_rows, 6), np.float32)
        self.draft_batches: list[int] = []  # rows
        self._logits = np.zeros((0, vocab_size), np.float32)

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        self._check(batch)
        self._logits[:] = np.nan  # the previous logits are gone
        self.batches.append((len(batch.tokens), batch.decode_rows, len(batch.outputs)))
        visible = (batch.mask == 0).astype(np.uint64)
        n_kv = batch.mask.shape[1]
        state = embed(batch.tokens, batch.positions)
        sums: list[U64] = []
        for layer, memory in enumerate(self._layers):
            if layer == 1:
                self.fault(batch)  # in the middle: this layer's K and V of the batch are not written
            memory[batch.cells] = state
            sums.append(visible @ memory[:n_kv])
            state = mix(sums[-1])
        running = self._run_states(batch) if self.state_slots else np.zeros(len(state), np.uint64)
        self._leave_hidden(sums[0], sums[1], running)
        self._logits = logits_of((state + running)[batch.outputs], self.vocab_size)
        return self._logits

    def _leave_hidden(self, *parts: U64) -> None:
        self.hidden[:] = np.nan
        self.hidden[: len(parts[0])] = np.stack(parts, axis=1).view(np.float32)

    def draft(self, batch: Batch, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the target would say after one more token, from the hidden state alone; wrong one time in four."""
        self._check(batch)
        self.fault(batch)
        self.draft_batches.append(len(batch.tokens))
        first, second, running = hidden.view(np.uint64).T.copy()
        inputs = embed(batch.tokens, batch.positions)
        self._draft_layer[batch.cells] = inputs
        seen = batch.mask == 0
        assert bool(np.all(seen[np.arange(len(inputs)), batch.cells])), "a row does not see itself"
        assert bool(np.all((self._draft_layer[: seen.shape[1]] != 0) | ~seen)), "a row sees a cell nobody has filled"
        first = first + inputs
        second = second + mix(first)
        if self.state_slots:
            running = mix(running + inputs)
        state = mix(second) + running
        self._leave_hidden(first, second, running)
        self._logits = logits_of((state + (state % np.uint64(4) == 0))[batch.outputs], self.vocab_size)
        return self._logits

    def _run_states(self, batch: Batch) -> U64:
        """The running hash after each row."""
        out, inputs = np.zeros(len(batch.tokens), np.uint64), embed(batch.tokens, batch.positions)
        assert [row for _, _, start, end in batch.runs for row in range(start, end)] == [*range(len(out))]
        targets = [int(target) for _, target, _, _ in batch.runs]
        assert len({*targets}) == len(targets)
        for i, (source, target, start, end) in enumerate(batch.runs):
            assert source not in targets[i:], "a state is written that is still needed"
            state = np.zeros(1, np.uint64) if source < 0 else self._states[source : source + 1].copy()
            for row in range(start, end):
                state = mix(state + inputs[row])
                out[row] = state[0]
            self._states[target] = state[0]
        return out

    def _check(self, batch: Batch) -> None:
        rows = len(batch.tokens)
        assert 0 < rows <= self.max_rows and len(batch.outputs) <= self.max_outputs
        assert batch.tokens.dtype == batch.positions.dtype == batch.outputs.dtype == np.int32
        assert batch.cells.dtype == np.int64 and batch.mask.dtype == np.float16
        assert batch.positions.shape == batch.cells.shape == (rows,)
        assert batch.mask.shape[0] == rows and batch.mask.shape[1] % 256 == 0 and batch.mask.shape[1] <= self.kv_cells
        assert batch.mask.flags.c_contiguous
        assert bool(np.all((batch.mask == 0) | np.isneginf(batch.mask)))
        assert len(np.unique(batch.cells)) == rows, "two rows write one cell"
        assert bool(np.all(np.diff(batch.outputs) > 0)) and bool(np.all(batch.outputs < rows))
        assert 0 <= batch.decode_rows <= rows


@dataclass(frozen=True)
class Expected:
    """What a request must get when nothing disturbs it."""

    tokens: list[int]
    text: str
    reason: str


class Oracle:
    """The same model as a pure function of a token list, with the plain loop around it."""

    def __init__(
        self, tokenizer: PieceTokenizer, context: int, vocab_size: int = 97, *, recurrent: bool = False
    ) -> None:
        self.tokenizer, self.context, self.vocab_size = tokenizer, context, vocab_size
        self.recurrent = recurrent

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits after every token, [len(tokens), vocab]."""
        first = embed(np.array(tokens, np.int32), np.arange(len(tokens), dtype=np.int32))
        second = mix(np.cumsum(first, dtype=np.uint64))
        third = mix(np.cumsum(second, dtype=np.uint64))
        if self.recurrent:
            state = np.zeros(1, np.uint64)
            for row in range(len(tokens)):
                state = mix(state + first[row])
                third[row : row + 1] += state
        return logits_of(third, self.vocab_size)

    def expect(self, prompt: Sequence[int], params: SamplingParams) -> Expected:
        tokens, new, sampler, stream, text = list(prompt), list[int](), Sampler(params), self.tokenizer.stream(), ""
        while len(tokens) < self.context and (params.max_tokens is None or len(new) < params.max_tokens):
            token = sampler.sample(self.logits(tokens)[-1], np.array(tokens, np.int32))
            tokens.append(token)
            new.append(token)
            if token in self.tokenizer.eog_ids and not params.ignore_eos:
                return Expected(new, text + stream.flush(), "stop")
            text += stream.push(token)
            found = [at for stop in params.stop if (at := text.find(stop)) >= 0]
            if found:
                return Expected(new, text[: min(found)], "stop")
        return Expected(new, text + stream.flush(), "length")


class PieceStream:
    """Joins the tokens' bytes and gives out whole characters only."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces, self._pending = pieces, b""

    def push(self, token_id: int) -> str:
        self._pending += self._pieces[token_id]
        for cut in range(len(self._pending), max(-1, len(self._pending) - 4), -1):
            try:
                text = self._pending[:cut].decode()
            except UnicodeDecodeError:
                continue
            self._pending = self._pending[cut:]
            return text
        text, self._pending = self._pending.decode(errors="replace"), b""
        return text

    def flush(self) -> str:
        text, self._pending = self._pending.decode(errors="replace"), b""
        return text


class PieceTokenizer:
    """Token i is a few letters; some tokens are halves of a two-byte character; the last id ends the text."""

    def __init__(self, vocab_size: int = 97) -> None:
        letters = "abc"
        pieces = [letters[i % 3] * (1 + i % 2) + letters[(i // 3) % 3] for i in range(vocab_size)]
        self.pieces = [piece.encode() for piece in pieces]
        self.pieces[5], self.pieces[6] = b"\xc3", b"\xa4"
        self.pieces[-1] = b"<end>"
        self.eog_ids = frozenset({vocab_size - 1})

    def stream(self, *, marks: object = None) -> PieceStream:
        return PieceStream(self.pieces)


class Client:
    """Collects a request's events and checks their order."""

    def __init__(self, name: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self.request = Request(name, list(prompt), params, self._on_event)
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprob | None] = []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.finish: FinishEvent | None = None
        self.error: ErrorEvent | None = None
        self.on_token: Callable[[], None] = lambda: None

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def _on_event(self, event: Event) -> None:
        assert not self.ended, "an event after the last one"
        match event:
            case PromptEvent():
                assert self.prompt_logprobs is None and not self.tokens
                self.prompt_logprobs = event.logprobs
            case TokenEvent():
                self.tokens.append(event.token_id)
                self.pieces.append(event.text)
                self.logprobs.append(event.logprob)
                self.on_token()
            case FinishEvent():
                self.finish = event
                self.pieces.append(event.text)
                assert event.usage.completion_tokens == len(self.tokens)
                assert event.usage.prompt_tokens == len(self.request.prompt)
            case ErrorEvent():
                self.error = event


def assert_got(client: Client, expected: Expected) -> None:
    """The client got exactly what the oracle says."""
    assert client.finish is not None, client.error
    got = Expected(client.tokens, client.text, client.finish.reason)
    assert got == expected, f"{client.request.id}: {got} instead of {expected}"


def run_to_end(engine: Engine, *, check: bool = True) -> None:
    """Steps an engine that has no thread until nothing is left to do."""
    while engine.tick():
        if check:
            engine.check_integrity()


def assert_nothing_leaks(engine: Engine) -> None:
    """All requests ended: what is in use belongs to the prefix cache, and clearing that frees every cell."""
    engine.check_integrity()
    before = engine.snapshot()
    assert before["requests_running"] == before["requests_queued"] == before["kv_cells_used"] == 0
    engine.clear_prefix_cache()
    engine.tick()
    engine.check_integrity()
    after = engine.snapshot()
    assert after["kv_cells_cached"] == 0 and after["kv_cells_free"] == after["kv_cells"]
