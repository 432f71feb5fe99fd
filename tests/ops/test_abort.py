"""An assertion that fails inside ggml ends the process, but not without its reason and the final line."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

CODE = """
import ctypes, sys
from expertserve.config import resolve
from expertserve.engine.load import load_model
from expertserve.experts.final_line import install_final_line
from expertserve.experts.stats import ExpertStats
stats = ExpertStats(every=0)
install_final_line(stats)
load_model(resolve({"model": sys.argv[1], "device": "cpu"}), stats)
from expertserve.ops.ggml.library import ggml
ggml.lib.ggml_abort(b"somewhere.c", 7, b"a broken promise")
"""


def test_an_abort_inside_ggml_prints_reason_and_final_line_once(tiny_moe: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, str(tiny_moe)], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGABRT
    assert "error: a kernel failed: somewhere.c:7: a broken promise" in done.stderr
    assert done.stderr.count("[expert-stream] steps=0 ") == 1
