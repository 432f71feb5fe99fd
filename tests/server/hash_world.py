"""The real engine over a hash model, with a byte tokenizer.

The model's answers are known from `Oracle` without any server. Its forward can be slowed, held or made to fail. The
tokenizer's tokens are single bytes, so half of what the model says is no UTF-8: texts must survive that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from expertserve.engine.engine import Engine
from expertserve.engine.request import SamplingParams
from expertserve.errors import RequestError
from expertserve.models.batch import Batch
from expertserve.server.state import ServedModel
from expertserve.text.grammar import GrammarCompiler
from expertserve.text.stream import NO_MARKS, StreamDecoder
from tests.engine.fakes import Expected, HashForward, Oracle

BOS, EOS, VOCAB = 256, 257, 258
CONTEXT = 512
MODEL = "hash-moe"
_DECODE = {"hits": 7, "rows": 0, "computing_s": 0.0, "stalled_s": 0.0, "lane_s": 0.0}
DISK_LIMIT = 64 << 20
STREAM: dict[str, Any] = {
    "hits": 7,
    "misses": 0,
    "bytes": 0,
    "read_mode": "none",
    "about": {"slots": 3, "disk_limit_bytes_s": DISK_LIMIT},
    "phases": {"decode": _DECODE},
}


class ByteTokenizer:
    """Token i is byte i; BOS is put in front."""

    vocab_size = VOCAB
    eog_ids = frozenset({EOS})
    special_texts = {"bos": "<s>", "eos": "</s>"}

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return [BOS] * add_special + list(text.encode("utf-8", "replace"))

    def min_tokens(self, text: str) -> int:
        return len(text.encode("utf-8", "replace"))

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        bytes_of = self.shown if skip_special else self.token_bytes
        return b"".join(map(bytes_of, ids)).decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if id < 256 else {BOS: b"<s>", EOS: b"</s>"}[id]

    def token_text(self, id: int) -> str:
        return self.token_bytes(id).decode("utf-8", "replace")

    def is_special(self, id: int) -> bool:
        return id in (BOS, EOS)

    def shown(self, id: int) -> bytes:
        return b"" if self.is_special(id) else self.token_bytes(id)

    def special_id(self, text: str) -> int | None:
        return {"<s>": BOS, "</s>": EOS}.get(text)

    def stream(self, *, skip_special: bool = True, marks: Mapping[int, str] = NO_MARKS) -> StreamDecoder:
        return StreamDecoder(self.shown if skip_special else self.token_bytes, marks)


class PlainTemplate:
    """Prints everything it is given, so that a test sees what arrived."""

    source = ""

    def render(
        self, messages: Sequence[Any], /, *, tools: Any = None, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        if kwargs.get("fail"):
            raise RequestError("chat template: asked to fail", param="messages")
        parts = [f"{message['role']}:{_text(message['content'])}\n" for message in messages]
        if tools:
            parts.insert(0, f"tools:{[tool['function']['name'] for tool in tools]}\n")
        if kwargs:
            parts.insert(0, f"{kwargs}\n")
        return "".join(parts) + ("assistant:" if add_generation_prompt else "")


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


class World:
    """Engine, model and what they should say."""

    def __init__(
        self,
        context: int = CONTEXT,
        template: PlainTemplate | None = None,
        tokenizer: ByteTokenizer | None = None,
        forward: type[HashForward] = HashForward,
    ) -> None:
        self.template = template or PlainTemplate()
        self.tokenizer = tokenizer or ByteTokenizer()
        vocab_size = self.tokenizer.vocab_size
        self.forward = forward(vocab_size=vocab_size, max_rows=64, kv_cells=4096, context_length=context)
        self.engine = Engine(self.forward, self.tokenizer, parallel=8, context=context, chunk=48)
        self.oracle = Oracle(self.tokenizer, context, vocab_size)  # type: ignore[arg-type]
        self.read_bytes: Callable[[], int] = lambda: 0
        self.engine.start()

    def served(self) -> ServedModel:
        return ServedModel(
            engine=self.engine,
            tokenizer=self.tokenizer,
            chat_template=self.template,
            grammars=GrammarCompiler(self.tokenizer),
            names=(MODEL, "other-name"),
            context_length=self.engine.context,
            fingerprint="fp_test",
            stream_snapshot=lambda: {**STREAM, "bytes": self.read_bytes()},
            heat=lambda: {0: (np.array([0.0, 4.0, 1.0]), np.array([False, True, True]))},
            memory_plan={"expert slots": 1000},
            close=self.engine.stop,
        )

    def expect(self, prompt: str | list[int], **params: Any) -> Expected:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return self.oracle.expect(ids, SamplingParams(**{"temperature": 0.0, **params}))

    def chat_text(self, content: str, **params: Any) -> str:
        return self.expect(f"user:{content}\nassistant:", **params).text

    def slow(self, seconds: float) -> None:
        """Every step takes this long from now on."""
        self.forward.fault = lambda batch: time.sleep(seconds)

    def fault(self, fault: Callable[[Batch], None]) -> None:
        self.forward.fault = fault

    def heal(self) -> None:
        self.forward.fault = lambda batch: None

    def wait_for(self, name: str, value: float, timeout_s: float = 5.0) -> None:
        """Until the engine's counter `name` is `value`."""
        self._wait(lambda snapshot: snapshot[name], name, value, timeout_s)

    def wait_for_under_way(self, count: int, timeout_s: float = 5.0) -> None:
        """Until so many sequences run or wait: which of the two depends on when the engine's step began."""
        self._wait(lambda s: s["requests_running"] + s["requests_queued"], "under way", count, timeout_s)

    def _wait(self, of: Callable[[Mapping[str, Any]], float], name: str, value: float, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while (seen := of(self.engine.snapshot())) != value:
            assert time.monotonic() < deadline, f"{name} is {seen}, not {value}"
            time.sleep(0.005)
