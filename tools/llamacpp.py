"""llama.cpp, the package xllamacpp, as the measurements run it; an interpreter needs nothing but that package.

    python -m tools.llamacpp answer MODEL --prompt IDS.json --decode 48     # one answer's figures, a line of JSON
    python -m tools.llamacpp serve MODEL --parallel 8                       # prints its address, serves till input ends

Weights are mapped as they lie in the file or, with --repack (llama.cpp's default), copied in a layout of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class LlamaCpp:
    """A loaded model behind llama.cpp's server, on a port that was free."""

    def __init__(self, model: str, *, threads: int, repack: bool, ctx: int = 2048, parallel: int = 1) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_ctx, params.n_parallel, params.n_ubatch, params.n_gpu_layers = ctx, parallel, 512, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.warmup = params.fit_params = False
        params.no_extra_bufts = not repack
        params.endpoint_metrics = True
        params.port = 0
        self._server = xllamacpp.Server(params)
        self.address: str = self._server.listening_address

    def answer(self, ids: Sequence[int], count: int, *, cached: bool = False) -> dict[str, Any]:
        """A greedy answer of `count` tokens to token ids.

        Args:
            cached: whether a prompt that was seen before may be reused.

        Returns:
            `tokens`, `prefill` and `decode` in tokens a second (decode is of the tokens after the first), and
            `read_bytes`, fetched from storage while the prompt was read and while it decoded.
        """
        body = {"prompt": list(ids), "n_predict": count, "temperature": 0, "ignore_eos": True, "cache_prompt": cached}
        data = json.dumps(body | {"stream": True, "return_tokens": True}).encode()
        request = urllib.request.Request(f"{self.address}/completion", data, {"Content-Type": "application/json"})
        tokens: list[int] = []
        reads = [read_bytes()]
        timings: dict[str, Any] = {}
        with urllib.request.urlopen(request) as lines:
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if not tokens:
                    reads.append(read_bytes())
                tokens += event["tokens"]
                timings = event.get("timings", timings)
        reads.append(read_bytes())
        # Its own rate of decode counts the first token, which comes with the prompt.
        decode = (count - 1) / timings["predicted_ms"] * 1000 if count > 1 else None
        prefill = timings["prompt_per_second"]
        fetched = [after - before for before, after in zip(reads, reads[1:], strict=False)]
        return {"tokens": tokens, "prefill": prefill, "decode": decode, "read_bytes": fetched}


def read_bytes() -> int:
    """Bytes that the kernel has fetched from storage for this process."""
    found = re.search(r"^read_bytes: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("answer", "serve"))
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--repack", action="store_true")
    parser.add_argument("--prompt", type=Path, help='a file {"prompt": [ids]}')
    parser.add_argument("--decode", type=int, default=48, help="tokens after the first")
    args = parser.parse_args()
    llama = LlamaCpp(args.model, threads=args.threads, repack=args.repack, ctx=args.ctx, parallel=args.parallel)
    if args.what == "serve":
        print(llama.address, flush=True)
        sys.stdin.read()
    else:
        print(json.dumps(llama.answer(json.loads(args.prompt.read_text())["prompt"], args.decode + 1)), flush=True)


if __name__ == "__main__":
    main()
