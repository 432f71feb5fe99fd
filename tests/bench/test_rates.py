"""Rates of runs, over an engine with known timings."""

from __future__ import annotations

from pathlib import Path

import pytest

from expertserve.bench.rates import Feed, fed_summary, measure_all, measure_fed, summary
from expertserve.engine.request import FinishEvent, Request, Timings, TokenEvent, TokenLogprob, Usage
from expertserve.errors import ConfigError, KernelUnavailableError


class FakeEngine:
    """Takes longer for each request: prompts 100 ms and decode 10 ms, times the number of the request."""

    def __init__(self, logprob: float = -1.0) -> None:
        self.requests: list[Request] = []
        self._logprob = logprob

    def submit(self, request: Request, /) -> None:
        self.requests.append(request)
        number, tokens = len(self.requests), request.params.max_tokens or 0
        for token in range(tokens):
            wanted = request.params.logprobs
            top = [(7 * token, self._logprob)] if wanted else []
            logprob = None if wanted is None else TokenLogprob(token, self._logprob, top)
            request.on_event(TokenEvent(token, "", logprob))
        usage = Usage(len(request.prompt), tokens, 0)
        request.on_event(FinishEvent("length", "", usage, Timings(0.0, 100.0 * number, 10.0 * number, 100.0 * number)))

    def cancel(self, request_id: str, /) -> None: ...


def runs(engine: FakeEngine, decode_tokens: int = 5) -> dict[str, float | None]:
    return summary(measure_all(engine, 50, prompt_tokens=20, decode_tokens=decode_tokens, repetitions=3)[1])


def test_medians_leave_out_the_warm_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert runs(FakeEngine()) == {
        "prefill_tok_s": pytest.approx(20 / 0.3, abs=0.01),
        "decode_tok_s": pytest.approx(4 / 0.03, abs=0.01),
        "first_token_ms": 300.0,
    }


def test_prompts_differ_so_that_none_is_reused_and_are_the_same_every_time() -> None:
    first, second = FakeEngine(), FakeEngine()
    runs(first)
    runs(second)
    prompts = [request.prompt for request in first.requests]
    assert len({prompt[0] for prompt in prompts}) > 1 and len({tuple(prompt) for prompt in prompts}) == 4
    assert prompts == [request.prompt for request in second.requests]


def test_only_the_warm_up_asks_for_log_probabilities() -> None:
    engine = FakeEngine()
    runs(engine)
    assert [request.params.logprobs for request in engine.requests] == [0, None, None, None]


def test_output_that_is_not_finite_ends_the_benchmark() -> None:
    with pytest.raises(KernelUnavailableError, match="not finite"):
        runs(FakeEngine(logprob=float("nan")))


def test_one_token_has_no_decode_rate() -> None:
    assert runs(FakeEngine(), decode_tokens=1)["decode_tok_s"] is None


def test_fed_tokens_are_all_computed_and_compared_with_the_models_choices() -> None:
    engine = FakeEngine()
    run = measure_fed(engine, Feed([5, 6, 7], (0, 7, 14, 20)))
    (request,) = engine.requests
    assert request.prompt == [5, 6, 7] and request.params.forced == (0, 7, 14, 20) and request.params.max_tokens == 5
    assert run.agreement == 3 / 4
    assert run.decode_tok_s == pytest.approx(4 / 0.01)
    assert fed_summary(run)["agreement"] == 0.75


def test_equal_outputs_have_equal_digests_and_others_do_not() -> None:
    feed = Feed([5, 6, 7], (0, 7, 14, 20))
    digests = [fed_summary(measure_fed(FakeEngine(logprob), feed))["digest"] for logprob in (-1.0, -1.0, -1.0000001)]
    assert digests[0] == digests[1] != digests[2] and isinstance(digests[0], str) and len(digests[0]) == 8


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"prompt": [1]}', '{"prompt": [], "decode": [1]}', '{"prompt": [1.5], "decode": [1]}',
                '{"prompt": [true], "decode": [1]}', '{"prompt": 3, "decode": [1]}', "\xff"]
)  # fmt: skip
def test_a_file_without_token_ids_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "ids.json"
    path.write_text(content, "latin-1")
    with pytest.raises(ConfigError, match=r"--feed .*should be JSON"):
        Feed.read(path)


def test_a_file_with_token_ids_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ids.json"
    path.write_text('{"prompt": [3, 4], "decode": [5]}')
    assert Feed.read(path) == Feed([3, 4], (5,))
