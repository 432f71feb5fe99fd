"""What every test folder may use: the oracle models, a tiny model made on the spot; logging and signals as usual."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import structlog

from tests.gguf_writer import make_tiny_moe
from tests.made import MADE

# As commands do before OpenMP is loaded: beside another process, spinning at barriers slows a test down 50 times.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# A shell without job control starts what runs in the background with SIGINT ignored, and every process started from
# here would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """What a test that runs a command has configured of logging writes to a stream that ends with it."""
    before, level = structlog.get_config(), logging.getLogger().level
    yield
    structlog.configure(**before)
    root = logging.getLogger()
    root.setLevel(level)
    root.handlers[:] = [handler for handler in root.handlers if type(handler) is not logging.StreamHandler]


@pytest.fixture(scope="session")
def oracle_dir() -> Path:
    """The folder of oracle models beside the checkout; skips where it is absent."""
    path = Path(__file__).parents[1].parent / "shared" / "oracle"
    if not path.is_dir():
        pytest.skip("the oracle fixtures (shared/oracle beside the checkout) are absent")
    return path


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole `qwen3moe` model of 2 layers and 8 experts (F16 and Q8_0); do not write to it."""
    return make_tiny_moe(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The file of a made-up model, by architecture and type of its matrices; do not write to it."""
    folder = tmp_path_factory.mktemp("made")
    return cache(lambda architecture, kind: MADE[architecture].write(folder / f"{architecture}-{kind}.gguf", kind))
