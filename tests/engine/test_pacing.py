"""Prompts beside running answers: however a step's time depends on its rows, it settles below the limit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from expertserve.engine.pacing import FIRST_ROWS, RECENT, REFRESH, PromptPacer
from expertserve.engine.request import SamplingParams
from expertserve.errors import RequestError
from tests.engine.conftest import MakeRig
from tests.engine.fakes import Client, assert_got, assert_nothing_leaks, run_to_end
from tests.engine.test_batching import prompt


@pytest.mark.parametrize(
    "cost",
    [
        lambda rows: 0.010 + 0.0005 * rows,  # linear: 20 rows double it
        lambda rows: 0.010 + 0.002 * rows**0.5,  # experts shared among rows
        lambda rows: 0.010,  # prompts cost nothing
    ],
)
def test_steps_settle_below_the_limit_and_use_what_it_allows(cost: Callable[[int], float]) -> None:
    pacer = PromptPacer(512, 2.0)
    rows, times = [], []
    for _ in range(400):
        rows.append(pacer.rows)
        times.append(cost(rows[-1]))
        pacer.observe(1, rows[-1], times[-1])
    slowdowns = [seconds / cost(0) for seconds in times[200:]]
    assert max(slowdowns) < 2.2
    assert max(slowdowns) > 1.8 or max(rows) == 512
    assert rows[0] == 0 and rows[-REFRESH:].count(0) == 1


def test_prompts_go_on_where_even_one_row_is_too_slow() -> None:
    pacer = PromptPacer(512, 2.0)
    pacer.observe(1, 0, 0.01)
    for _ in range(REFRESH - 1):
        assert pacer.rows >= 1
        pacer.observe(1, pacer.rows, 1.0)


def test_a_short_prompt_does_not_raise_what_a_long_one_may_take() -> None:
    pacer = PromptPacer(512, 2.0)
    pacer.observe(1, 0, 0.01)
    for _ in range(REFRESH - 1):
        assert pacer.rows == FIRST_ROWS
        pacer.observe(1, 2, 0.011)


def test_steps_that_something_else_delayed_do_not_raise_what_a_step_may_take() -> None:
    pacer = PromptPacer(512, 2.0)
    for number in range(2 * RECENT):
        pacer.observe(1, 0, 0.2 if number % 3 == 0 else 0.01)
    pacer.observe(1, pacer.rows, 0.021)
    assert pacer.rows < FIRST_ROWS


def test_no_limit_is_the_whole_chunk() -> None:
    pacer = PromptPacer(512, 0.0)
    pacer.observe(1, 512, 100.0)
    assert pacer.rows == 512


def test_only_steps_that_answers_wait_for_are_paced(make_rig: MakeRig) -> None:
    rig = make_rig(parallel=2, chunk=48, max_rows=64, slowdown=2.0)
    running = Client("a", prompt(1, 96), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    rig.engine.submit(running.request)
    while not running.tokens:
        rig.engine.tick()
    assert [rows for rows, _, _ in rig.forward.batches] == [48, 48]
    late = Client("b", prompt(2, 40), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    rig.engine.submit(late.request)
    for rows in (1, 1 + FIRST_ROWS):  # what the decode alone takes is seen first
        rig.engine.tick()
        assert rig.forward.batches[-1][:2] == (rows, 1)
    run_to_end(rig.engine)
    for client in (running, late):
        assert_got(client, rig.oracle.expect(client.request.prompt, client.request.params))


@pytest.mark.parametrize(
    ("limits", "code"), [({"queue_timeout_s": 0.0}, "queue_timeout"), ({"timeout_s": 0.0}, "request_timeout")]
)
def test_a_request_whose_time_is_over_fails_with_408(make_rig: MakeRig, limits: dict[str, float], code: str) -> None:
    rig = make_rig(parallel=1)
    client = Client("a", prompt(1, 20), SamplingParams(temperature=0, max_tokens=5))
    for name, value in limits.items():
        setattr(client.request, name, value)
    rig.engine.submit(client.request)
    run_to_end(rig.engine)
    assert client.error is not None and isinstance(client.error.error, RequestError)
    assert (client.error.error.code, client.error.error.http_status) == (code, 408)
    assert_nothing_leaks(rig.engine)


def test_waiting_time_does_not_count_once_a_request_runs(make_rig: MakeRig) -> None:
    rig = make_rig(parallel=1)
    client = Client("a", prompt(1, 20), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    rig.engine.submit(client.request)
    rig.engine.tick()
    client.request.queue_timeout_s = 0.0
    run_to_end(rig.engine)
    assert_got(client, rig.oracle.expect(client.request.prompt, client.request.params))
