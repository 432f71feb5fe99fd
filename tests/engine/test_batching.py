"""Which rows a step has: decodes first, then prompt chunks, within the limits; and what a request must not notice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from expertserve.engine.request import SamplingParams
from expertserve.errors import ConfigError
from tests.engine.conftest import MakeRig
from tests.engine.fakes import Client, assert_got, assert_nothing_leaks, run_to_end

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 96, length).tolist()


def test_one_request_gets_what_the_plain_loop_gives(make_rig: MakeRig) -> None:
    rig = make_rig()
    client = Client("a", prompt(1, 50), GREEDY)
    rig.engine.submit(client.request)
    run_to_end(rig.engine)
    assert_got(client, rig.oracle.expect(client.request.prompt, GREEDY))
    assert rig.forward.batches == [(32, 0, 0), (18, 0, 1)] + [(1, 1, 1)] * 11
    assert_nothing_leaks(rig.engine)


def test_a_prompt_is_evaluated_beside_running_decodes(make_rig: MakeRig) -> None:
    rig = make_rig(chunk=16)
    first, second = Client("a", prompt(1, 5), GREEDY), Client("b", prompt(2, 40), GREEDY)
    rig.engine.submit(first.request)
    rig.engine.tick()
    rig.engine.submit(second.request)
    run_to_end(rig.engine)
    assert rig.forward.batches[1:5] == [(17, 1, 1), (17, 1, 1), (9, 1, 2), (2, 2, 2)]
    for client in (first, second):
        assert_got(client, rig.oracle.expect(client.request.prompt, GREEDY))


def test_a_step_never_has_more_rows_than_the_forward_takes(make_rig: MakeRig) -> None:
    rig = make_rig(parallel=8, chunk=1000, max_rows=20)
    clients = [Client(str(i), prompt(i, 30 + i), GREEDY) for i in range(12)]
    for client in clients:
        rig.engine.submit(client.request)
    run_to_end(rig.engine)
    assert max(rows for rows, _, _ in rig.forward.batches) == 20
    for client in clients:
        assert_got(client, rig.oracle.expect(client.request.prompt, GREEDY))


def test_at_most_parallel_requests_run_and_they_start_in_order(make_rig: MakeRig) -> None:
    rig = make_rig(parallel=3)
    started: list[int] = []
    for i in range(9):
        client = Client(str(i), prompt(i, 4), SamplingParams(temperature=0, max_tokens=1 + i % 4, ignore_eos=True))
        client.on_token = lambda i=i: None if i in started else started.append(i)  # type: ignore[misc]
        rig.engine.submit(client.request)
    while rig.engine.tick():
        assert rig.engine.snapshot()["requests_running"] <= 3
    assert max(decodes for _, decodes, _ in rig.forward.batches) == 3
    assert started == list(range(9))


@pytest.mark.parametrize("max_outputs", [4, 10])
def test_prompt_logprobs_never_ask_for_more_logits_than_the_forward_returns(
    make_rig: MakeRig, max_outputs: int
) -> None:
    rig = make_rig(chunk=32, parallel=4, max_outputs=max_outputs)
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    clients = [Client(f"echo{i}", prompt(i, 35), params) for i in range(2)]
    clients += [Client(f"plain{i}", prompt(5 + i, 6), GREEDY) for i in range(4)]
    for client in clients:
        rig.engine.submit(client.request)
    run_to_end(rig.engine)
    assert max(outputs for _, _, outputs in rig.forward.batches) > max_outputs - 4
    for client in clients:
        assert_got(client, rig.oracle.expect(client.request.prompt, client.request.params))


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_echo_gives_the_logprob_of_every_prompt_token(make_rig: MakeRig, max_tokens: int, length: int) -> None:
    rig = make_rig()
    params = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=97, logprobs=1, ignore_eos=True)
    for name in ("cold", "warm"):  # a prefix in the cache must not swallow logits
        client = Client(name, prompt(7, length), params)
        rig.engine.submit(client.request)
        run_to_end(rig.engine)
        assert_got(client, rig.oracle.expect(client.request.prompt, params))
        logits = rig.oracle.logits(client.request.prompt + client.tokens).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        assert client.prompt_logprobs is not None and len(client.prompt_logprobs) == length
        assert client.prompt_logprobs[0] is None
        for index, got in enumerate(client.prompt_logprobs[1:]):
            assert got is not None and got.token_id == client.request.prompt[index + 1]
            assert got.logprob == pytest.approx(expected[index, got.token_id], abs=1e-5)
            assert dict(got.top) == pytest.approx(dict(enumerate(expected[index])), abs=1e-5)
        for index, new in enumerate(client.logprobs):
            assert new is not None and new.token_id == client.tokens[index]
            assert new.logprob == pytest.approx(expected[length - 1 + index].max(), abs=1e-5)
            assert len(new.top) == 1
    assert_nothing_leaks(rig.engine)


def test_max_tokens_zero_evaluates_the_prompt_and_samples_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    client = Client("a", prompt(1, 20), SamplingParams(max_tokens=0))
    rig.engine.submit(client.request)
    run_to_end(rig.engine)
    assert client.finish is not None and client.finish.reason == "length" and client.tokens == []
    assert rig.forward.batches == [(20, 0, 0)]


def test_a_full_context_ends_with_length(make_rig: MakeRig) -> None:
    rig = make_rig(context=40)
    params = SamplingParams(temperature=0, ignore_eos=True)
    client = Client("a", prompt(1, 33), params)
    rig.engine.submit(client.request)
    run_to_end(rig.engine)
    assert_got(client, rig.oracle.expect(client.request.prompt, params))
    assert client.finish is not None and client.finish.reason == "length" and len(client.tokens) == 7


def test_an_end_of_generation_token_ends_with_stop_unless_ignored(make_rig: MakeRig) -> None:
    rig = make_rig()
    for ignore in (False, True):
        params = SamplingParams(temperature=0, max_tokens=5, logit_bias={96: 100.0}, ignore_eos=ignore)
        client = Client("a", prompt(1, 3), params)
        rig.engine.submit(client.request)
        run_to_end(rig.engine)
        assert client.finish is not None
        assert (client.finish.reason, client.tokens) == (("length", [96] * 5) if ignore else ("stop", [96]))


def test_forced_tokens_are_evaluated_in_place_of_the_models_own(make_rig: MakeRig) -> None:
    """After them the model goes on as after a prompt that ends with them."""
    rig = make_rig()
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    start, forced = prompt(1, 9), (5, 77, 5)
    client = Client("a", start, replace(params, max_tokens=8, forced=forced))
    rig.engine.submit(client.request)
    run_to_end(rig.engine)
    assert client.tokens == [*forced, *rig.oracle.expect([*start, *forced], params).tokens]


def test_timings_add_up(make_rig: MakeRig) -> None:
    rig = make_rig()
    client = Client("a", prompt(1, 40), GREEDY)
    rig.engine.submit(client.request)
    run_to_end(rig.engine)
    assert client.finish is not None
    timings = client.finish.timings
    assert min(timings.queue_ms, timings.prompt_ms, timings.decode_ms) > 0
    assert timings.ttft_ms == pytest.approx(timings.queue_ms + timings.prompt_ms)


@pytest.mark.parametrize(("parallel", "chunk"), [(0, 8), (65, 8), (4, 0)])
def test_impossible_settings_are_refused(make_rig: MakeRig, parallel: int, chunk: int) -> None:
    with pytest.raises(ConfigError, match="parallel is|chunk is"):
        make_rig(parallel=parallel, chunk=chunk)
