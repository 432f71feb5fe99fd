"""One server for all tests that only talk to it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog

from tests.server.hash_world import World
from tests.server.worlds import Running, running


@pytest.fixture(scope="package", autouse=True)
def quiet() -> Iterator[None]:
    """Without this every request prints a line."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="package")
def shared_server() -> Iterator[Running]:
    with running(World()) as server:
        yield server


@pytest.fixture
def server(shared_server: Running) -> Iterator[Running]:
    """The shared server; afterwards the model is healthy and nothing of the test runs any more."""
    yield shared_server
    shared_server.world.heal()
    shared_server.world.wait_for("requests_running", 0)
    shared_server.world.wait_for("requests_queued", 0)
