"""Multiple choice as an evaluation harness asks for it: its score through the server is that of resident logits.

The harness itself (lm-eval) runs where its command `lm_eval` is found; that its requests, written here by hand, give
the same numbers is tested everywhere.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from expertserve.data import model_path
from expertserve.gguf.file import GGUFFile
from expertserve.text.tokenizer import Tokenizer
from tests.models.build import make_batch, open_forward
from tests.server.served_process import Serving, serving

DEMO = model_path("demo")
ITEMS = [
    ("The capital of France is", ["Paris", "bread", "London", "a river"], 0),
    ("The sky is", ["a fish", "blue", "seven", "Germany"], 1),
    ("The Congress of the United", ["Kings", "Waters", "States", "Colours"], 2),
    ("Bread is made of", ["iron", "glass", "flour", "light"], 2),
    ("A river is a stream of", ["water", "sand", "paper", "people"], 0),
    ("A dog is an", ["number", "hour", "idea", "animal"], 3),
    ("The President shall be", ["elected", "purple", "eaten", "wet"], 0),
    ("Two and two are", ["green", "four", "never", "the"], 1),
]
EXACT = 1e-6  # nats in the sum over a continuation
ROUNDED = 0.3  # where rows of other texts share the step, products are summed in another order (docs/RELIABILITY.md)


@dataclass(frozen=True)
class Score:
    """Log-likelihoods of each item's choices, whether each is the greedy continuation, and the share of right items."""

    loglikelihoods: list[list[float]]
    greedy: list[list[bool]]

    @property
    def accuracy(self) -> float:
        hits = [
            int(np.argmax(values)) == answer for values, (_, _, answer) in zip(self.loglikelihoods, ITEMS, strict=True)
        ]
        return sum(hits) / len(hits)


def encoded(encode: Any, question: str, choice: str) -> tuple[list[int], int]:
    """Token ids of question and choice together, and how many of them are the question's."""
    return encode(f"{question} {choice}"), len(encode(question))


@pytest.fixture(scope="module")
def resident() -> Score:
    """From the logits of a forward with every expert in memory, each text alone."""
    tokenizer = Tokenizer.from_gguf(GGUFFile.open(DEMO))
    values, greedy = [], []
    with open_forward(DEMO, budget="100%") as forward:
        for question, choices, _ in ITEMS:
            values.append([])
            greedy.append([])
            for choice in choices:
                ids, context = encoded(lambda text: tokenizer.encode(text, add_special=False), question, choice)
                logits = forward(make_batch(ids)).astype(np.float64)[context - 1 : -1]
                normal = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
                normal -= logits.max(1, keepdims=True)
                values[-1].append(float(sum(normal[np.arange(len(normal)), ids[context:]])))
                greedy[-1].append(bool((logits.argmax(1) == ids[context:]).all()))
    return Score(values, greedy)


@pytest.fixture(scope="module")
def streamed() -> Iterator[Serving]:
    with serving(DEMO, "--expert-cache", "30%") as server:
        yield server


def assert_equal(found: Score, resident: Score, within: float) -> None:
    assert np.abs(np.array(found.loglikelihoods) - np.array(resident.loglikelihoods)).max() < within
    assert found.greedy == resident.greedy
    assert found.accuracy == resident.accuracy


def test_the_task_tells_models_apart(resident: Score) -> None:
    assert 0 < resident.accuracy <= 1 and any(map(any, resident.greedy)) and not all(map(all, resident.greedy))


def ask(http: httpx.Client, pairs: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
    """One request of the harness: log-likelihoods of continuations, and whether they are greedy."""
    body = {"prompt": [ids for ids, _ in pairs], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234,
            "echo": True}  # fmt: skip
    choices = sorted(http.post("/v1/completions", json=body).json()["choices"], key=lambda choice: choice["index"])
    found = []
    for choice, (_, context) in zip(choices, pairs, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][context:-1]
        best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][context:-1]]
        found.append((sum(logprobs), logprobs == best))
    return found


@pytest.mark.parametrize(("at_once", "within"), [(1, EXACT), (4, ROUNDED)])
def test_a_harnesss_requests_give_the_score_of_resident_logits(
    streamed: Serving, resident: Score, at_once: int, within: float
) -> None:
    found = []
    with httpx.Client(base_url=streamed.url, timeout=60) as http:
        assert http.get("/tokenizer_info").json()["eos_token"]

        def encode(text: str) -> list[int]:
            body = {"prompt": text, "add_special_tokens": False}
            tokens: list[int] = http.post("/tokenize", json=body).json()["tokens"]
            return tokens

        for question, choices, _ in ITEMS:
            pairs = [encoded(encode, question, choice) for choice in choices]
            found.append([one for at in range(0, 4, at_once) for one in ask(http, pairs[at : at + at_once])])
    score = Score([[value for value, _ in item] for item in found], [[greedy for _, greedy in item] for item in found])
    assert_equal(score, resident, within)


@pytest.mark.skipif(shutil.which("lm_eval") is None, reason="the command lm_eval (package lm-eval[api]) is not on PATH")
def test_lm_eval_itself_gives_the_score_of_resident_logits(streamed: Serving, resident: Score, tmp_path: Path) -> None:
    rows = [{"question": question, "choices": choices, "answer": answer} for question, choices, answer in ITEMS]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "facts.yaml").write_text(
        f"""task: facts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "items.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    )
    arguments = f"base_url={streamed.url}/v1/completions,model=demo,num_concurrent=1"
    command = [
        *("lm_eval", "--model", "local-completions", "--model_args", arguments, "--batch_size", "1"),
        *("--tasks", "facts", "--include_path", str(tmp_path)),
        *("--output_path", str(tmp_path / "out"), "--log_samples"),
    ]
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (tmp_path / "out").rglob("results_*.json")
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    by_item = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    found = [[response[0] for response in sample["resps"]] for sample in by_item]
    score = Score(
        [[float(value) for value, _ in responses] for responses in found],
        [[str(greedy) == "True" for _, greedy in responses] for responses in found],
    )
    assert_equal(score, resident, EXACT)
    assert json.loads(results.read_text())["results"]["facts"]["acc,none"] == pytest.approx(resident.accuracy)
