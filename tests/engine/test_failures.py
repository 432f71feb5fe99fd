"""A failed read ends the requests that met it and no other; a bug ends the engine, and says so."""

from __future__ import annotations

import pytest

from expertserve.engine.request import ErrorEvent, Event, FinishEvent, Request, SamplingParams
from expertserve.errors import ExpertReadError, RequestError
from expertserve.models.batch import Batch
from tests.engine.conftest import MakeRig, Rig
from tests.engine.fakes import Client, assert_got, assert_nothing_leaks, run_to_end
from tests.engine.test_batching import prompt
from tests.engine.test_sharing import greedy

POISON = 95


def fail_on_poison(batch: Batch) -> None:
    if POISON in batch.tokens:
        raise ExpertReadError("layer 3, expert 7: 4096 of 8192 bytes read")


def clean_prompt(seed: int, length: int) -> list[int]:
    return [token % POISON for token in prompt(seed, length)]


def clean(rig: Rig, client: Client) -> bool:
    return POISON not in rig.oracle.expect(client.request.prompt, client.request.params).tokens


def test_a_failed_read_ends_only_the_request_that_met_it(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.forward.fault = fail_on_poison
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logit_bias={POISON: -100.0})
    good = [Client(f"good{i}", clean_prompt(i, 20), params) for i in range(4)]
    bad = Client("bad", [*clean_prompt(9, 20), POISON, 3], params)
    for client in (*good[:2], bad, *good[2:]):
        rig.engine.submit(client.request)
    run_to_end(rig.engine)
    assert bad.error is not None and isinstance(bad.error.error, ExpertReadError)
    for client in good:
        assert_got(client, rig.oracle.expect(client.request.prompt, params))
    assert rig.engine.state == "ready" and rig.engine.snapshot()["errors"] == 1
    assert_nothing_leaks(rig.engine)


def test_a_request_fails_in_decode_without_its_neighbours(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.forward.fault = fail_on_poison
    clients = [Client(str(i), clean_prompt(i, 10), greedy(40)) for i in range(8)]
    for client in clients:
        rig.engine.submit(client.request)
    run_to_end(rig.engine)
    survivors = [client for client in clients if clean(rig, client)]
    assert 0 < len(survivors) < len(clients)
    for client in clients:
        expected = rig.oracle.expect(client.request.prompt, client.request.params)
        if client in survivors:
            assert_got(client, expected)
        elif client.error is not None:
            assert client.tokens == expected.tokens[: expected.tokens.index(POISON) + 1]
        else:  # the poison was its last token, which is never evaluated
            assert expected.tokens.index(POISON) == len(expected.tokens) - 1
    assert_nothing_leaks(rig.engine)


def test_a_failed_request_leaves_nothing_behind(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.forward.fault = fail_on_poison
    client = Client("bad", clean_prompt(1, 40), SamplingParams(temperature=0, logit_bias={POISON: 100.0}))
    rig.engine.submit(client.request)
    run_to_end(rig.engine)
    assert client.error is not None and client.tokens == [POISON]
    snapshot = rig.engine.snapshot()
    assert snapshot["kv_cells_free"] == snapshot["kv_cells"]


def test_a_sequence_that_borrowed_unwritten_cells_is_evaluated_again(make_rig: MakeRig) -> None:
    rig = make_rig()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logit_bias={POISON: -100.0})
    shared = clean_prompt(1, 15)
    bad = Client("bad", [*shared, POISON], params)
    borrowers = [Client(f"b{i}", shared + clean_prompt(5 + i, 5), params) for i in range(2)]
    rig.forward.fault = fail_on_poison
    first_tokens: list[Client] = []
    for client in (bad, *borrowers):
        client.on_token = lambda client=client: first_tokens.append(client)  # type: ignore[misc]
        rig.engine.submit(client.request)
    run_to_end(rig.engine)
    assert first_tokens[:2] == borrowers, "the order of arrival was lost"
    assert rig.forward.batches[0][0] == 26, "the borrowers did not start in the step that failed"
    assert bad.error is not None
    for client in borrowers:
        assert_got(client, rig.oracle.expect(client.request.prompt, params))
    assert_nothing_leaks(rig.engine)


def test_a_dead_disk_ends_every_request_and_the_engine_lives_on(make_rig: MakeRig) -> None:
    rig = make_rig(parallel=3)
    clients = [Client(str(i), prompt(i, 20), greedy(5)) for i in range(7)]

    def fail(batch: Batch) -> None:
        raise ExpertReadError("the disk is gone")

    rig.forward.fault = fail
    for client in clients:
        rig.engine.submit(client.request)
    run_to_end(rig.engine)
    assert all(client.error is not None for client in clients)
    assert_nothing_leaks(rig.engine)
    rig.forward.fault = lambda batch: None
    after = Client("after", prompt(1, 20), greedy(5))
    rig.engine.submit(after.request)
    run_to_end(rig.engine)
    assert_got(after, rig.oracle.expect(after.request.prompt, after.request.params))


def test_logits_that_are_no_numbers_end_one_request(make_rig: MakeRig) -> None:
    rig = make_rig()
    impossible = SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(97), -float("inf")))
    bad, good = Client("bad", prompt(1, 5), impossible), Client("good", prompt(2, 5), greedy(5))
    for client in (bad, good):
        rig.engine.submit(client.request)
    run_to_end(rig.engine)
    assert bad.error is not None and "no token can be sampled" in str(bad.error.error)
    assert_got(good, rig.oracle.expect(good.request.prompt, good.request.params))
    assert_nothing_leaks(rig.engine)


def test_a_callback_that_raises_cancels_its_request_only(make_rig: MakeRig) -> None:
    rig = make_rig()
    bad, good = Client("bad", prompt(1, 5), greedy(50)), Client("good", prompt(2, 5), greedy(50))

    def gone() -> None:
        raise ConnectionError("the client is gone")

    bad.on_token = gone
    for client in (bad, good):
        rig.engine.submit(client.request)
    run_to_end(rig.engine)
    assert len(bad.tokens) == 1 and bad.finish is not None and bad.finish.reason == "cancelled"
    assert_got(good, rig.oracle.expect(good.request.prompt, good.request.params))
    assert_nothing_leaks(rig.engine)


def test_a_bug_in_the_forward_fails_the_engine_by_name(make_rig: MakeRig) -> None:
    rig = make_rig(parallel=1)

    def bug(batch: Batch) -> None:
        raise ZeroDivisionError("a bug")

    rig.forward.fault = bug
    ended: list[Event] = []
    for name in ("running", "queued"):
        rig.engine.submit(Request(name, [1, 2, 3], greedy(5), ended.append))
    rig.engine.start()
    assert rig.engine.drain(20)
    assert len(ended) == 2 and all(isinstance(event, ErrorEvent) for event in ended)
    assert rig.engine.state == "failed" and "ZeroDivisionError: a bug" in str(rig.engine.error)
    with pytest.raises(RequestError, match="the engine has failed") as refused:
        rig.engine.submit(Request("late", [1], greedy(5), ended.append))
    assert refused.value.http_status == 503
    rig.engine.stop()
    assert rig.engine.state == "failed"


@pytest.mark.parametrize(
    ("tokens", "params", "message"),
    [
        ([], SamplingParams(), "no tokens"),
        ([1, 97], SamplingParams(), "token id outside 0..96"),
        ([-1], SamplingParams(), "token id outside 0..96"),
        ([1] * 256, SamplingParams(), "256 tokens and the context holds 256"),
        ([1] * 257, SamplingParams(max_tokens=0), "257 tokens and the context holds 256"),
        ([1], SamplingParams(temperature=-0.1), "temperature"),
        ([1], SamplingParams(temperature=float("nan")), "temperature"),
        ([1], SamplingParams(top_p=1.5), "top_p"),
        ([1], SamplingParams(min_p=-1), "min_p"),
        ([1], SamplingParams(repeat_penalty=0), "repeat_penalty"),
        ([1], SamplingParams(repeat_penalty=5e-324), "repeat_penalty"),
        ([1], SamplingParams(repeat_penalty=1e300), "repeat_penalty"),
        ([1], SamplingParams(repeat_last_n=-2), "repeat_last_n"),
        ([1], SamplingParams(max_tokens=-1), "max_tokens"),
        ([1], SamplingParams(logprobs=98), "logprobs"),
        ([1], SamplingParams(prompt_logprobs=-1), "prompt_logprobs"),
        ([1], SamplingParams(presence_penalty=float("inf")), "presence_penalty"),
        ([1], SamplingParams(logit_bias={97: 1.0}), "logit_bias"),
        ([1], SamplingParams(logit_bias={0: float("nan")}), "logit_bias"),
        ([1] * 200, SamplingParams(forced=(3,) * 56), "200 tokens of prompt, 56 forced"),
        ([1], SamplingParams(forced=(3, 97)), "forced token"),
        ([1], SamplingParams(forced=(-1,)), "forced token"),
        ([1], SamplingParams(stop=("",)), "stop string"),
        ([1], SamplingParams(stop=("x" * 1025,)), "stop string"),
        ([1], SamplingParams(stop=("x",) * 65), "stop strings"),
    ],
)
def test_what_can_never_be_served_is_refused_before_it_is_queued(
    make_rig: MakeRig, tokens: list[int], params: SamplingParams, message: str
) -> None:
    rig = make_rig()
    with pytest.raises(RequestError, match=message) as refused:
        rig.engine.submit(Request("a", tokens, params, lambda event: None))
    assert refused.value.param is not None and refused.value.http_status == 400
    assert not rig.engine.tick() and rig.engine.snapshot()["requests_queued"] == 0


def test_a_prompt_that_just_fits_is_served(make_rig: MakeRig) -> None:
    rig = make_rig()
    for name, length, max_tokens in (("one token", 255, None), ("echo", 256, 0)):
        client = Client(name, prompt(1, length), SamplingParams(temperature=0, max_tokens=max_tokens))
        rig.engine.submit(client.request)
        run_to_end(rig.engine)
        assert_got(client, rig.oracle.expect(client.request.prompt, client.request.params))


def test_an_id_is_free_again_when_its_request_has_ended(make_rig: MakeRig) -> None:
    rig = make_rig()
    resubmitted: list[FinishEvent] = []

    def again(event: Event) -> None:
        if isinstance(event, FinishEvent):
            resubmitted.append(event)
            if len(resubmitted) == 1:
                rig.engine.submit(Request("a", [1, 2], greedy(2), again))

    rig.engine.submit(Request("a", [1, 2], greedy(2), again))
    with pytest.raises(RequestError, match="already running"):
        rig.engine.submit(Request("a", [1, 2], greedy(2), again))
    run_to_end(rig.engine)
    assert len(resubmitted) == 2
