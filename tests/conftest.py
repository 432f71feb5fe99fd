"""Fixtures every test folder may use: where the oracle models lie, and a tiny model made on the spot."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def oracle_dir() -> Path:
    """The folder of oracle models beside the checkout; skips where it is absent."""
    path = Path(__file__).parents[1].parent / "shared" / "oracle"
    if not path.is_dir():
        pytest.skip("the oracle fixtures (shared/oracle beside the checkout) are absent")
    return path
