"""The embedded model: it speaks, streams to the same logits, agrees with llama.cpp, and has learned its routing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from expertserve.bench.replay import POLICIES, hit_rate, read_requests, slots_of
from expertserve.data import model_path
from expertserve.experts.stats import ExpertStats
from expertserve.gguf.file import GGUFFile
from expertserve.text.chat_template import ChatTemplate
from expertserve.text.tokenizer import Tokenizer
from tests.models.build import greedy, make_batch, open_forward
from tests.text.peer import AVAILABLE

DEMO = model_path("demo")
TRACE = Path(__file__).parent / "data" / "demo_routing.trace.xz"
PROSE = "The Congress of the United States has the power to lay taxes, and the people of the several States"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile.open(DEMO))


def answer(tokenizer: Tokenizer, question: str, count: int = 60) -> str:
    template = ChatTemplate.from_gguf(GGUFFile.open(DEMO), tokenizer)
    prompt = template.render([{"role": "user", "content": question}])
    with open_forward(DEMO) as forward:
        tokens, _ = greedy(forward, tokenizer.encode(prompt, parse_special=True), count)
    ends = [i for i, token in enumerate(tokens) if token in tokenizer.eog_ids]
    assert ends, "the answer does not end"
    return tokenizer.decode(tokens[: ends[0]])


def test_the_file_is_at_most_20_mib_and_its_layers_differ_in_slot_size() -> None:
    assert DEMO.stat().st_size <= 20 << 20
    down = {info.type.name for name, info in GGUFFile.open(DEMO).tensors.items() if "ffn_down_exps" in name}
    assert down == {"Q8_0", "Q5_0", "Q4_0"}


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        (
            "Why is the sky blue?",
            "The sky is blue because air scatters the blue part of sunlight more than the red part.",
        ),
        ("What is the capital of France?", "The capital of France is Paris."),
    ],
)
def test_it_answers_what_it_was_taught_in_sentences(tokenizer: Tokenizer, question: str, expected: str) -> None:
    assert answer(tokenizer, question).strip().startswith(expected)


def test_it_predicts_prose_far_better_than_chance(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROSE)
    with open_forward(DEMO) as forward:
        logits = forward(make_batch(ids)).astype(np.float64)
    log_odds = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    bits = -log_odds[np.arange(len(ids) - 1), ids[1:]].sum() / np.log(2)
    assert bits / len(PROSE.encode()) < 1.9


def test_streamed_logits_are_the_resident_ones_and_a_quarter_of_the_slots_hits_more_than_a_quarter(
    tokenizer: Tokenizer,
) -> None:
    ids = tokenizer.encode(PROSE + " are free. In the year of our Lord one thousand eight hundred, the President said:")
    found = []
    stats = ExpertStats(every=0, emit=lambda line: None)
    for budget in ("100%", "25%"):
        with open_forward(DEMO, budget=budget, lookahead="off", stats=stats if budget == "25%" else None) as forward:
            found.append(np.stack([forward(make_batch([token], i))[0].copy() for i, token in enumerate(ids)]))
    assert np.array_equal(found[0], found[1])
    total = stats.total()
    assert total.hits / (total.hits + total.misses) > 0.4


@pytest.mark.skipif(not AVAILABLE, reason="xllamacpp, which carries llama.cpp, is not installed")
def test_llama_cpp_continues_with_the_same_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("And the LORD spake unto Moses, saying,")
    code = (
        "import json, os, sys, xllamacpp\n"
        "params = xllamacpp.CommonParams()\n"
        "params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers = sys.argv[1], 512, 1, 0\n"
        "params.warmup = params.fit_params = False\n"
        "server = xllamacpp.Server(params)\n"
        "body = {'prompt': json.loads(sys.argv[2]), 'max_tokens': 24, 'temperature': 0, 'logprobs': 1}\n"
        "said = []\n"
        "server.handle_completions(body, lambda c: said.append(c if isinstance(c, dict) else json.loads(c)))\n"
        "print('IDS', json.dumps([e['id'] for e in said[0]['choices'][0]['logprobs']['content']]), flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, DEMO, json.dumps(ids)], capture_output=True, text=True, timeout=120
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("IDS ")), None)
    assert line is not None, done.stderr[-2000:]
    with open_forward(DEMO) as forward:
        ours, gaps = greedy(forward, ids, 24)
    for position, (a, b) in enumerate(zip(ours, json.loads(line.removeprefix("IDS ")), strict=False)):
        assert a == b or gaps[position] < 0.01, f"token {position} is {a}, llama.cpp's is {b}, gap {gaps[position]}"
        if a != b:
            break


def test_our_policy_beats_lru_on_the_recorded_routing_and_not_the_optimum() -> None:
    requests = read_requests(TRACE, warm_up=200)
    assert requests.experts == dict.fromkeys(range(6), 40) and requests.step_rows[:, 0].sum() == 20460
    for share in (0.25, 0.5):
        rates = {name: hit_rate(requests, policy, slots_of(requests, share)) for name, policy in POLICIES.items()}
        assert rates["LRU"] + 0.03 < rates["ours"] < rates["Belady"]
        assert rates["ours"] > share + 0.2
