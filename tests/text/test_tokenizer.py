"""What holds of a tokenizer without another engine to ask: refusals, exact bytes, streams, odd input."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertserve.errors import GGUFError, RequestError, UnsupportedModelError
from expertserve.text.tokenizer import Tokenizer
from tests.text import vocabularies
from tests.text.corpus import CORPUS, LONG, random_texts
from tests.text.vocabularies import BYTE, CONTROL, NORMAL, UNDEFINED, UNKNOWN, UNUSED, USER_DEFINED, Vocabulary

TEXTS = [text.replace("\x00", "") for text in CORPUS if text not in LONG]


@dataclass
class Source:
    """Metadata in memory, in place of a file."""

    metadata: dict[str, Any]


def byte_pairs(**extra: Any) -> Tokenizer:
    vocabulary = vocabularies.train_bytes(TEXTS, 600)
    extra = {"bos_token_id": vocabulary.set("<s>", CONTROL), "eos_token_id": vocabulary.set("</s>", CONTROL)} | extra
    vocabulary.set("<tool>", USER_DEFINED)
    return Tokenizer.from_gguf(Source(vocabulary.metadata("gpt2", "qwen2", **extra)))


def by_score(**extra: Any) -> Tokenizer:
    vocabulary = vocabularies.score_vocabulary(TEXTS, 1, ties=False)
    vocabulary.set("<tool>", USER_DEFINED)
    return Tokenizer.from_gguf(Source(vocabulary.metadata("llama", **extra)))


TOKENIZERS = {"byte pairs": byte_pairs(), "by score": by_score()}


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@given(text=st.text(max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_text_comes_back_from_its_tokens(tokenizer: Tokenizer, text: str) -> None:
    # U+2581 is how a score-merged vocabulary spells a space: the two are one to it.
    if "<tool>" not in text and "\u2581" not in text:
        assert tokenizer.decode(tokenizer.encode(text), skip_special=True) == text


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_stream_of_any_tokens_is_the_text_of_all_their_bytes(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    for skip_special in (False, True):
        stream = tokenizer.stream(skip_special=skip_special)
        streamed = "".join([stream.push(id_) for id_ in ids] + [stream.flush()])
        shown = [id_ for id_ in ids if not (skip_special and tokenizer.is_special(id_))]
        assert streamed == b"".join(map(tokenizer.token_bytes, shown)).decode("utf-8", "replace")
        assert tokenizer.decode(ids, skip_special=skip_special) in (streamed, streamed.removeprefix(" "))


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def by_character() -> Tokenizer:
    return Tokenizer.from_gguf(Source(vocabularies.train_characters(TEXTS, 600).metadata("gemma4", bos_token_id=0)))


def swallowing() -> Tokenizer:
    """Special tokens swallow the white space behind them, and a byte has no token."""
    vocabulary = vocabularies.train_bytes(TEXTS, 600)
    vocabulary.set("<s>", CONTROL)
    vocabulary.tokens[vocabulary.tokens.index("z")] = "<|end|>"
    return Tokenizer.from_gguf(Source(vocabulary.metadata("gpt2", "qwen2", eos_token_id=1) | {"general.name": "Phi-3"}))


FLOORS = {**TOKENIZERS, "by character": by_character(), "swallowing": swallowing()}


@pytest.mark.parametrize("tokenizer", FLOORS.values(), ids=FLOORS)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_no_text_has_fewer_tokens_than_its_floor(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = st.integers(0, tokenizer.vocab_size - 1)
    spelt = ids.map(tokenizer.token_text)  # texts that come near the floor: long tokens, again and again
    longest = st.sampled_from(
        sorted(range(tokenizer.vocab_size), key=lambda id_: -len(tokenizer.token_bytes(id_)))[:20]
    )
    pieces = spelt | longest.map(lambda id_: tokenizer.token_text(id_) * 9) | st.text(max_size=9) | st.just("z" * 9)
    text = "".join(data.draw(st.lists(pieces, max_size=12)))
    for parse_special in (False, True):
        ids_of = tokenizer.encode(text, add_special=False, parse_special=parse_special)
        assert tokenizer.min_tokens(text) <= len(ids_of)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_the_floor_is_no_worse_than_a_text_of_longest_tokens(tokenizer: Tokenizer) -> None:
    longest = max(len(tokenizer.token_text(id_).encode()) for id_ in range(tokenizer.vocab_size))
    for text in TEXTS:
        least = len(text.encode()) / (3 * longest)  # a space is as long as U+2581, which merging by score has for it
        assert tokenizer.min_tokens(text * 100) >= int(100 * least)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_stream_never_shows_part_of_a_character(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        stream = tokenizer.stream()
        parts = [stream.push(id_) for id_ in tokenizer.encode(text, add_special=False)]
        assert stream.flush() == ""
        assert "".join(parts).count("\ufffd") == text.count("\ufffd")


def test_an_unfinished_character_shows_as_one_replacement_when_the_stream_ends() -> None:
    tokenizer = TOKENIZERS["by score"]
    emoji = [tokenizer.encode("x", add_special=False)[-1] * 0 + 3 + byte for byte in "\U0001f995".encode()]
    assert b"".join(map(tokenizer.token_bytes, emoji)).decode() == "\U0001f995"
    stream = tokenizer.stream()
    assert [stream.push(id_) for id_ in emoji[:3]] == ["", "", ""]
    assert stream.flush() == "\ufffd"
    assert [stream.push(id_) for id_ in emoji] == ["", "", "", "\U0001f995"]


def test_tokens_that_are_marks_are_told_from_the_same_letters() -> None:
    tokenizer = TOKENIZERS["by score"]
    eos = tokenizer.special_id(tokenizer.special_texts["eos"])
    assert eos == tokenizer.eos_id is not None and tokenizer.special_id("Hello") is None
    spelt = [3 + byte for byte in "\ufdd0</s>".encode()]
    stream = tokenizer.stream(marks={eos: "</s>"})
    assert "".join(map(stream.push, [*spelt, eos, 3 + 0xC3])) == "\ufffd</s>\ufdd0</s>"
    assert stream.push(eos) == "\ufffd\ufdd0</s>" and stream.flush() == ""
    plain = tokenizer.stream()
    assert "".join(map(plain.push, [*spelt, eos])) == "\ufdd0</s>"


def test_a_generated_text_keeps_the_space_it_starts_with() -> None:
    tokenizer = TOKENIZERS["by score"]
    ids = tokenizer.encode("Hello", add_special=False)
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.flush() == " Hello"
    assert tokenizer.decode(ids) == "Hello"


def test_control_tokens_in_text_count_only_when_asked_for_but_user_defined_ones_always() -> None:
    tokenizer = TOKENIZERS["byte pairs"]
    bos = tokenizer.bos_id
    assert bos is not None
    assert bos not in tokenizer.encode("a<s>b", add_special=False)
    assert tokenizer.encode("a<s>b", add_special=False, parse_special=True)[1] == bos
    with_tool = tokenizer.encode("a<tool>b", add_special=False)
    assert b"<tool>" in map(tokenizer.token_bytes, with_tool)
    assert tokenizer.decode(with_tool, skip_special=True) == "a<tool>b"
    assert tokenizer.decode([bos, *with_tool], skip_special=True) == "a<tool>b"
    assert tokenizer.decode([bos, *with_tool]) == "<s>a<tool>b"


def test_bos_and_eos_are_added_as_the_file_says() -> None:
    assert TOKENIZERS["byte pairs"].encode("") == []
    both = byte_pairs(add_bos_token=True, add_eos_token=True)
    assert both.encode("") == [both.bos_id, both.eos_id]
    assert both.encode("", add_special=False) == []
    assert TOKENIZERS["by score"].encode("") == [1]
    assert by_score(add_bos_token=False).encode("") == []


def test_halves_of_surrogate_pairs_count_as_replacement_characters() -> None:
    for tokenizer in TOKENIZERS.values():
        assert tokenizer.encode("a\ud83db\udc00") == tokenizer.encode("a\ufffdb\ufffd")


@pytest.mark.parametrize("id_", [-1, 10**9])
def test_an_id_outside_the_vocabulary_is_the_requests_fault(id_: int) -> None:
    tokenizer = TOKENIZERS["byte pairs"]
    for use in (tokenizer.token_bytes, tokenizer.token_text, lambda id_: tokenizer.decode([id_], skip_special=True)):
        with pytest.raises(RequestError, match=f"{id_} is not in the vocabulary"):
            use(id_)


def test_every_kind_of_token_has_the_bytes_it_stands_for() -> None:
    vocabulary = Vocabulary(["<unk>", "<s>", "</s>"], kinds=[UNKNOWN, CONTROL, CONTROL], scores=[0.0] * 3)
    expected = {0: b"<unk>", 1: b"<s>", 2: b"</s>"}
    for text, kind, told in (
        ("\u2581a\u2581", NORMAL, b" a "),
        ("<0xE9>", BYTE, b"\xe9"),
        ("<\u2581t>", USER_DEFINED, "<\u2581t>".encode()),
        ("unused", UNUSED, b""),
        ("undefined", UNDEFINED, b""),
        ("", NORMAL, b"[EMPTY_8]"),
    ):
        expected[vocabulary.add(text, kind)] = told
    tokenizer = Tokenizer.from_gguf(Source(vocabulary.metadata("llama")))
    assert {id_: tokenizer.token_bytes(id_) for id_ in expected} == expected
    assert tokenizer.token_text(4) == "\ufffd"
    assert tokenizer.special_texts == {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"model": "bert"}, UnsupportedModelError, "'bert'.*gpt2, llama and gemma4"),
        ({"model": None}, UnsupportedModelError, "gpt2, llama and gemma4"),
        ({"pre": "made-up"}, UnsupportedModelError, "'made-up'.*deepseek-v3.*qwen2"),
        ({"tokens": None}, GGUFError, "tokens is missing"),
        ({"tokens": ["a", "b", "a"]}, GGUFError, "'a' twice"),
        ({"tokens": ["a", 1]}, GGUFError, "tokens has an element of the wrong type"),
        ({"tokens": "abc"}, GGUFError, "tokens has an element of the wrong type"),
        ({"merges": None}, GGUFError, "merges is missing"),
        ({"merges": [3]}, GGUFError, "merges has an element"),
        ({"token_type": [1]}, GGUFError, "token_type has 1 entries"),
        ({"token_type": ["x"]}, GGUFError, "token_type has an element"),
        ({"model": "llama", "scores": [1.0]}, GGUFError, "scores has 1 entries"),
        ({"add_bos_token": "yes"}, GGUFError, "add_bos_token is 'yes'"),
        ({"add_bos_token": True, "tokens": ["a", "b"], "token_type": [1, 1], "merges": []}, GGUFError, "BOS"),
    ],
)
def test_metadata_that_cannot_be_used_is_refused_by_name(
    changed: dict[str, Any], error: type[Exception], said: str
) -> None:
    metadata = vocabularies.train_bytes(["a few words"], 300).metadata("gpt2", "qwen2")
    for key, value in changed.items():
        metadata[f"tokenizer.ggml.{key}"] = value
        if value is None:
            del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(error, match=said) as refused:
        Tokenizer.from_gguf(Source(metadata))
    assert "\n" not in str(refused.value)


def test_kinds_out_of_range_and_malformed_merges_do_no_harm() -> None:
    vocabulary = vocabularies.train_bytes(["a few words"], 300)
    vocabulary.merges += ["", " ", "x", "a ", " b", "gone missing", "a b c"]
    metadata = vocabulary.metadata("gpt2", "qwen2")
    metadata["tokenizer.ggml.token_type"][5] = 99
    tokenizer = Tokenizer.from_gguf(Source(metadata))
    assert tokenizer.token_bytes(5) == b""
    assert tokenizer.decode(tokenizer.encode("few words gone")) == "few words gone"


def test_a_byte_without_a_token_is_named() -> None:
    vocabulary = Vocabulary(["<unk>", "<s>", "</s>", "a"], kinds=[UNKNOWN, CONTROL, CONTROL], scores=[0.0] * 4)
    tokenizer = Tokenizer.from_gguf(Source(vocabulary.metadata("llama", add_space_prefix=False)))
    assert tokenizer.encode("aa") == [1, 3, 3]
    with pytest.raises(GGUFError, match="byte 0xC3"):
        tokenizer.encode("\u00e9")


def test_threads_may_share_a_tokenizer() -> None:
    from concurrent.futures import ThreadPoolExecutor

    texts = random_texts(300, seed=9)
    for make in (byte_pairs, by_score):
        shared, alone = make(), make()
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(shared.encode, texts)) == [alone.encode(text) for text in texts]


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer = byte_pairs()
    text = "17 apples, 4 pears. " * 60_000
    done = threading.Event()
    longest = 0.0

    def watch() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not done.wait(0.001):
            now = time.perf_counter()
            last, longest = now, max(longest, now - last)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    tokenizer.encode(text)
    took = time.perf_counter() - began
    done.set()
    watcher.join()
    assert longest < 0.6 * took, "the text held the interpreter"
