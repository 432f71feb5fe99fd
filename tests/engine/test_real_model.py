"""The engine over a real forward: streams side by side give what each gives alone.

Kernels choose their order of summation by the shape of the batch, so a token may differ where the two best are nearly
equal; the comparison ends there and says so.
"""

from __future__ import annotations

from pathlib import Path

from expertserve.engine.engine import Engine
from expertserve.engine.request import SamplingParams
from expertserve.models.forward import Forward
from tests.engine.fakes import Client, PieceTokenizer, assert_nothing_leaks, run_to_end
from tests.engine.test_batching import prompt
from tests.models.build import open_forward

NEAR_TIE = 1e-3
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)


def serve(forward: Forward, prompts: list[list[int]], parallel: int) -> tuple[list[Client], Engine]:
    tokenizer = PieceTokenizer(forward.vocab_size)
    engine = Engine(forward, tokenizer, parallel=parallel, context=256, chunk=24)
    clients = [Client(str(i), tokens, PARAMS) for i, tokens in enumerate(prompts)]
    for client in clients:
        engine.submit(client.request)
    run_to_end(engine)
    return clients, engine


def equal_up_to_near_ties(alone: Client, together: Client) -> bool:
    for got, expected, at in zip(together.tokens, alone.tokens, alone.logprobs, strict=True):
        assert at is not None
        if got != expected:
            return at.top[0][1] - at.top[1][1] < NEAR_TIE
    return True


def test_eight_streams_of_a_real_model_equal_themselves_alone(tiny_moe: Path) -> None:
    shared = prompt(1, 30)
    prompts = [shared[: 10 + 3 * i] + prompt(i, 4 * i) for i in range(7)] + [shared[:10]]
    with open_forward(tiny_moe, kv_type="f32", flash=False, cells=256) as forward:
        alone = [serve(forward, [tokens], 1)[0][0] for tokens in prompts]
        together, engine = serve(forward, prompts, 8)
    counts = engine.snapshot()
    assert counts["cached_tokens"] > 60 and counts["preemptions"] > 0, "nothing was shared, or memory was not short"
    for one, other in zip(alone, together, strict=True):
        assert equal_up_to_near_ties(one, other), f"{other.tokens} instead of {one.tokens}"
    assert sum(one.tokens == other.tokens for one, other in zip(alone, together, strict=True)) >= 6
    assert_nothing_leaks(engine)
