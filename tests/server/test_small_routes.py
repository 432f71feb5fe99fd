"""Models, tokens, the schema."""

from __future__ import annotations

import re

from tests.server.hash_world import BOS, CONTEXT, MODEL, VOCAB
from tests.server.worlds import Running


def test_models_are_listed_with_what_clients_look_for(server: Running) -> None:
    models = server.client.models.list().data
    assert [model.id for model in models] == [MODEL, "other-name"]
    extra = models[0].model_extra or {}
    assert extra["max_model_len"] == CONTEXT and extra["meta"]["n_vocab"] == VOCAB
    assert server.client.models.retrieve(MODEL).id == MODEL


def test_tokenize_takes_either_servers_form(server: Running) -> None:
    plain = server.post("/tokenize", content="h\u00e9").json()
    assert plain == {"tokens": [104, 195, 169], "count": 3, "max_model_len": CONTEXT}
    assert server.post("/tokenize", content="h", add_special=True).json()["tokens"] == [BOS, 104]
    assert server.post("/tokenize", prompt="h").json()["tokens"] == [BOS, 104]
    assert server.post("/tokenize", prompt="h", add_special_tokens=False).json()["tokens"] == [104]
    pieces = server.post("/tokenize", content="h\u00e9", with_pieces=True).json()["tokens"]
    assert pieces == [{"id": 104, "piece": "h"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    refused = server.post("/tokenize", content="h", prompt="h")
    assert refused.status_code == 400 and "Exactly one" in refused.json()["error"]["message"]
    assert server.post("/tokenize", content=5).json()["error"]["param"] == "content"


def test_detokenize_is_the_way_back(server: Running) -> None:
    text = "na\u00efve \U0001f600"
    tokens = server.post("/tokenize", content=text).json()["tokens"]
    assert server.post("/detokenize", tokens=tokens).json() == {"content": text, "prompt": text}
    for tokens in ([VOCAB], [-1], ["x"], 5):
        refused = server.post("/detokenize", tokens=tokens)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tokens"


def test_a_harness_learns_the_special_tokens_and_the_template(server: Running) -> None:
    info = server.http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<s>", "</s>", None)
    assert info["chat_template"] == ""


def test_ready_and_the_panels_reading(server: Running) -> None:
    assert server.http.get("/ready").json() == {"status": "ready"}
    stats = server.http.get("/stats").json()
    assert stats["heat"]["layers"] == [{"layer": 0, "hotness": [0, 100, 50], "resident": [0, 1, 1]}]
    assert stats["engine"]["kv_cells"] == 4096 and stats["stream"]["about"]["slots"] == 3
    assert stats["memory"]["resident_bytes"] > 1 << 20 and stats["memory"]["plan"] == {"expert slots": 1000}


def test_the_page_loads_nothing_from_elsewhere(server: Running) -> None:
    page = server.http.get("/")
    assert page.headers["content-type"].startswith("text/html") and "default-src 'self'" in str(page.headers)
    names = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert {"ui/page.css", "ui/page.js"} <= set(names)
    for name in ["ui/panel.js", "ui/markdown.js", *(name for name in names if not name.startswith("data:"))]:
        asset = server.http.get(f"/{name}")
        assert asset.status_code == 200 and not re.search(r"https?://[a-z0-9]", asset.text), name
    assert server.http.get("/ui/app.py").status_code == server.http.get("/ui/..%2fapp.py").status_code == 404


def test_the_schema_names_the_routes_and_no_page_needs_the_network(server: Running) -> None:
    schema = server.http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health"} <= schema["paths"].keys()
    assert server.http.get("/docs").status_code == 404


def test_every_response_carries_its_request_id(server: Running) -> None:
    ids = {server.http.get(path).headers["x-request-id"] for path in ("/health", "/nowhere", "/v1/models")}
    assert len(ids) == 3
