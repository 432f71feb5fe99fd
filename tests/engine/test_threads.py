"""The engine's own thread: messages from other threads, rest when idle, and an orderly end."""

from __future__ import annotations

import threading
import time

import pytest

from expertserve.engine.request import FinishEvent, Request, SamplingParams, TokenEvent
from expertserve.engine.waiting import events
from expertserve.errors import ExpertReadError, RequestError
from expertserve.models.batch import Batch
from tests.engine.conftest import MakeRig
from tests.engine.fakes import Client, assert_got, assert_nothing_leaks
from tests.engine.test_batching import prompt
from tests.engine.test_sharing import greedy

WAIT = 30.0  # seconds; only a hang reaches it


def test_requests_from_many_threads_all_get_their_tokens(make_rig: MakeRig) -> None:
    rig = make_rig(cells=512)
    rig.engine.start()
    clients = [Client(f"{i}", prompt(i % 5, 20 + i), greedy(30)) for i in range(24)]
    threads = [threading.Thread(target=rig.engine.submit, args=(client.request,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rig.engine.drain(WAIT)
    for client in clients:
        assert_got(client, rig.oracle.expect(client.request.prompt, client.request.params))
    rig.engine.stop()
    assert_nothing_leaks(rig.engine)


def test_an_idle_engine_does_nothing(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    wakes: list[None] = []
    has_work = rig.engine._scheduler.has_work
    monkeypatch.setattr(rig.engine._scheduler, "has_work", lambda: wakes.append(None) or has_work())
    rig.engine.start()
    assert len(list(events(rig.engine, [1, 2, 3], greedy(3)))) == 4
    time.sleep(0.05)
    woken = len(wakes)
    time.sleep(0.2)
    assert len(wakes) == woken
    rig.engine.stop()


def test_drain_refuses_new_requests_and_lets_the_accepted_ones_end(make_rig: MakeRig) -> None:
    rig = make_rig(parallel=1)
    gate = threading.Event()
    rig.forward.fault = lambda batch: None if gate.wait(WAIT) else None
    clients = [Client(str(i), prompt(i, 10), greedy(5)) for i in range(3)]
    for client in clients:
        rig.engine.submit(client.request)
    rig.engine.start()
    assert not rig.engine.drain(0.01)
    assert rig.engine.state == "stopping"
    with pytest.raises(RequestError, match="shutting down") as refused:
        rig.engine.submit(Request("late", [1], greedy(1), lambda event: None))
    assert refused.value.http_status == 503
    gate.set()
    assert rig.engine.drain(WAIT)
    for client in clients:
        assert_got(client, rig.oracle.expect(client.request.prompt, client.request.params))
    rig.engine.stop()


def test_stop_cancels_what_still_runs_and_ends_the_thread(make_rig: MakeRig) -> None:
    rig = make_rig(parallel=2, cells=2048, context=2048)
    running = threading.Event()
    clients = [Client(str(i), prompt(i, 10), greedy(2000)) for i in range(4)]
    clients[0].on_token = running.set
    others = set(threading.enumerate())
    rig.engine.start()
    for client in clients:
        rig.engine.submit(client.request)
    assert running.wait(WAIT)
    rig.engine.stop()
    assert not [thread for thread in set(threading.enumerate()) - others if thread.name == "engine"]
    assert all(client.finish is not None and client.finish.reason == "cancelled" for client in clients)
    rig.engine.stop()
    assert_nothing_leaks(rig.engine)


def test_an_engine_that_never_started_stops_too(make_rig: MakeRig) -> None:
    rig = make_rig()
    client = Client("a", [1, 2], greedy(3))
    rig.engine.submit(client.request)
    rig.engine.stop()
    assert client.finish is not None and client.finish.reason == "cancelled"
    assert rig.engine.drain(0)


def test_waiting_for_events_gives_them_in_order_and_the_finish_last(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.engine.start()
    got = list(events(rig.engine, [1, 2, 3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)))
    assert [type(event) for event in got] == [TokenEvent] * 4 + [FinishEvent]
    expected = rig.oracle.expect([1, 2, 3], greedy(4))
    assert [event.token_id for event in got if isinstance(event, TokenEvent)] == expected.tokens
    rig.engine.stop()


def test_leaving_the_iteration_early_cancels_the_request(make_rig: MakeRig) -> None:
    rig = make_rig(context=2048)
    rig.engine.start()
    iterator = events(rig.engine, [1, 2, 3], greedy(2000))
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    snapshot = rig.engine.snapshot()
    assert snapshot["cancelled"] == 1 and snapshot["requests_queued"] == snapshot["requests_running"] == 0
    rig.engine.stop()
    assert_nothing_leaks(rig.engine)


def test_a_failed_request_raises_its_error(make_rig: MakeRig) -> None:
    rig = make_rig()

    def fail(batch: Batch) -> None:
        raise ExpertReadError("short read")

    rig.forward.fault = fail
    rig.engine.start()
    with pytest.raises(ExpertReadError, match="short read"):
        list(events(rig.engine, [1, 2, 3], greedy(4)))
    rig.engine.stop()
