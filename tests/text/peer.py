"""The other side of peer_process.py: asks llama.cpp for its answers over pipes.

Owns the process. One vocabulary is loaded at a time.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

AVAILABLE = importlib.util.find_spec("xllamacpp") is not None


class LlamaCpp:
    """llama.cpp's tokenizer."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("peer_process.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        with self._process as process:
            try:
                process.communicate(timeout=30)
            finally:
                process.kill()  # nothing where it has ended

    def load(self, path: Path) -> dict[str, Any]:
        """Loads a model's vocabulary; returns its size, ids and rules, or {"error": ...} if it is refused."""
        reply = self._call("load", path=str(path))
        assert isinstance(reply, dict)
        return reply

    def encode(self, texts: list[str], *, add_special: bool, parse_special: bool) -> list[list[int]]:
        reply = self._call("encode", texts=texts, add_special=add_special, parse_special=parse_special)
        assert isinstance(reply, list)
        return reply

    def detokenize(self, sequences: list[list[int]]) -> list[bytes]:
        return [base64.b64decode(text) for text in self._call("detokenize", sequences=sequences)]

    def pieces(self, *, special: bool) -> list[bytes]:
        """Returns the bytes of every token; of special ones only if asked."""
        return [base64.b64decode(piece) for piece in self._call("pieces", special=special)]

    def classes(self) -> list[int] | None:
        """Returns llama.cpp's class bits of every code point; None where this build does not tell."""
        reply = self._call("classes")
        assert reply is None or isinstance(reply, list)
        return reply

    def _call(self, call: str, **arguments: Any) -> Any:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            _, errors = process.communicate(timeout=30)
            raise RuntimeError(f"llama.cpp ended with status {process.returncode}: {errors[-500:]}")
        return json.loads(line)
