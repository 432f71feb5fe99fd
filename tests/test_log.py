"""The program's log lines, as a process writes them."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAILING = """
from expertserve import log
log.configure("{form}", "info")
def answer(api_key):
    raise ValueError("no luck")
try:
    answer("se" + "cret")
except ValueError:
    log.get_logger("x").exception("a request failed")
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_traceback_shows_where_and_no_values(form: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILING.format(form=form)], stderr=subprocess.PIPE, text=True, check=True
    )
    assert "a request failed" in done.stderr and "ValueError: no luck" in done.stderr and "in answer" in done.stderr
    assert "secret" not in done.stderr
