"""Files that the package carries: the embedded model that `demo` names.

The model is small enough to ship, so nothing is fetched or written on first use. tools/train_demo makes it.
"""

from __future__ import annotations

from pathlib import Path

DEMO_NAME = "demo"


def model_path(name: str) -> Path:
    """The file that a MODEL argument means: the embedded model for `demo`, else the path itself."""
    return Path(__file__).with_name("demo.gguf") if name == DEMO_NAME else Path(name).expanduser()
