"""The served schema, fuzzed: whatever fits it or breaks it, no answer is the server's fault."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from expertserve.server.app import create_app
from expertserve.server.state import ServerSettings, ServerState
from tests.server.hash_world import World
from tests.server.worlds import Running, running

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
SCHEMA = schemathesis.openapi.from_dict(create_app(ServerState(ServerSettings())).openapi())
OPERATIONS = {result.ok().label: result.ok() for result in SCHEMA.get_all_operations()}


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Running]:
    with running(World(), request_timeout_s=5.0) as server:
        yield server


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
@pytest.mark.parametrize("label", OPERATIONS)
def test_no_answer_is_the_servers_fault(fuzzed: Running, label: str, mode: str) -> None:
    operation = OPERATIONS[label]
    if not list(operation.body or ()):
        mode = "POSITIVE"  # nothing of it can be wrong
    strategy = operation.as_strategy(generation_mode=getattr(schemathesis.GenerationMode, mode))

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(strategy)
    def ask(case: Any) -> None:
        response = case.call(base_url=fuzzed.url, timeout=20)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert response.json()["error"]["message"], response.text

    ask()
    assert fuzzed.world.engine.state == "ready"
