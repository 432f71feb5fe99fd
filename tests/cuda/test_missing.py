"""What is said where CuPy is there and cannot be used: a reason, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        ("OSError(30, 'Read-only file system', '/home/.cupy')", "/home/.cupy.*CUPY_CACHE_DIR"),
        ("ImportError('libcudart.so.12 is missing')", "libcudart.so.12 is missing.*install it again"),
    ],
)
def test_a_cupy_that_cannot_be_imported_is_a_reason(tmp_path: Path, raised: str, reason: str) -> None:
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text(f"raise {raised}\n")
    asked = "import re, sys\nfrom expertserve.ops.cuda.device import missing\nassert re.search(sys.argv[1], missing())"
    path = os.pathsep.join((str(tmp_path), str(CHECKOUT)))
    ended = subprocess.run(
        [sys.executable, "-c", asked, reason], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
