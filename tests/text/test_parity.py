"""Token ids, bytes and rules equal llama.cpp's on the same GGUF: every pre-tokenizer served, and merging by score."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from expertserve.errors import GGUFError
from expertserve.gguf.file import GGUFFile
from expertserve.text.pretokenizers import PRETOKENIZERS
from expertserve.text.tokenizer import Tokenizer
from tests.text import peer as llama_cpp
from tests.text import published, vocabularies
from tests.text.corpus import CASES, CONTRACTIONS, CORPUS, LONG, SPECIAL, random_texts
from tests.text.peer import LlamaCpp
from tests.text.vocabularies import CONTROL, NORMAL, UNUSED, USER_DEFINED, Vocabulary

# One name of every distinct pre-tokenizer, and the names that only repeat one.
FIRST_NAMES = {pretokenizer: name for name, pretokenizer in reversed(PRETOKENIZERS.items())}
REPEATED = [name for name, pretokenizer in PRETOKENIZERS.items() if FIRST_NAMES[pretokenizer] != name]
TEXTS = CORPUS + random_texts(60, seed=1, longest=100)
FEW_TEXTS = ["Hello iPhone ALLCAPS", *random_texts(8, seed=3, longest=100)]
SPELLINGS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> [e~[ <|channel|> "
    "<|message|> <|start|> <|constrain|> <\uff5cend\u2581of\u2581sentence\uff5c> <|file_sep|> <|fim_prefix|> "
    "<|fim_suffix|> <|fim_middle|> <|unused1|> <pad> <unk>"
).split()


@dataclass
class Source:
    """Metadata in memory, in place of a file."""

    metadata: dict[str, Any]


@pytest.fixture(scope="module")
def peer() -> Iterator[LlamaCpp]:
    if not llama_cpp.AVAILABLE:
        pytest.skip("xllamacpp, which carries llama.cpp, is not installed")
    process = LlamaCpp()
    yield process
    process.close()


def specials(vocabulary: Vocabulary) -> Vocabulary:
    """Returns the vocabulary with special tokens that overlap each other and ordinary text."""
    for text in ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|a|>", "<|a|b|>", "[INST]"):
        vocabulary.set(text, CONTROL)
    for text in ("<|user|>", "<tool>", "XYZ", "YZ", "   ", "\u00e9\u4e2d"):
        vocabulary.set(text, USER_DEFINED)
    vocabulary.set("<|spare|>", UNUSED)
    # Words no merge leads to, which are tokens only where merges are ignored for whole words.
    for text in ("Hello", "iPhone", "ALLCAPS"):
        vocabulary.set(text, NORMAL)
    return vocabulary


@pytest.fixture(scope="module")
def trained() -> dict[bool, Vocabulary]:
    """Vocabularies by whether they are byte-level, trained on text like the text under test."""
    texts = [*(text for text in CORPUS if text not in LONG), *(CASES + CONTRACTIONS) * 10, *random_texts(2000, seed=2)]
    characters = vocabularies.train_characters([text.replace("\x00", "") for text in texts], 3000)
    for text in ("\n", "\n\n", "\n\n\n"):
        characters.set(text, NORMAL)
    return {True: specials(vocabularies.train_bytes(texts, 5000)), False: specials(characters)}


def check(peer: LlamaCpp, path: Path, metadata: dict[str, Any], texts: list[str]) -> Tokenizer:
    """Asserts that rules, pieces and the ids of all texts are llama.cpp's."""
    told = peer.load(path)
    assert "error" not in told
    tokenizer = Tokenizer.from_gguf(Source(metadata))
    bos, eos = (-1 if id_ is None else id_ for id_ in (tokenizer.bos_id, tokenizer.eos_id))
    assert told == {
        "size": tokenizer.vocab_size,
        "bos": bos,
        "eos": eos,
        "add_bos": tokenizer.add_bos,
        "add_eos": tokenizer.add_eos,
        "eog": sorted(tokenizer.eog_ids),
    }
    everything = range(tokenizer.vocab_size)
    assert [tokenizer.token_bytes(id_) for id_ in everything] == peer.pieces(special=True)
    assert [b"" if tokenizer.is_special(id_) else tokenizer.token_bytes(id_) for id_ in everything] == peer.pieces(
        special=False
    )
    spelt_out = [text for text in texts if "<" in text or "[" in text]
    for parse_special, asked in ((True, texts), (False, spelt_out)):
        expected = peer.encode(asked, add_special=True, parse_special=parse_special)
        for text, ids in zip(asked, expected, strict=True):
            assert tokenizer.encode(text, parse_special=parse_special) == ids, ascii(text[:100])
    return tokenizer


def bpe_metadata(vocabulary: Vocabulary, pre: str, **extra: Any) -> dict[str, Any]:
    ids = {"bos_token_id": vocabulary.tokens.index("<s>"), "eos_token_id": vocabulary.tokens.index("</s>")}
    return vocabulary.metadata("gemma4" if pre == "gemma4" else "gpt2", pre, **(ids | extra))


@pytest.mark.parametrize("pre", FIRST_NAMES.values())
def test_every_pretokenizer_cuts_text_as_llama_cpp_does(
    pre: str, peer: LlamaCpp, trained: dict[bool, Vocabulary], tmp_path: Path
) -> None:
    vocabulary = trained[PRETOKENIZERS[pre].byte_level]
    metadata = bpe_metadata(vocabulary, pre)
    tokenizer = check(peer, vocabularies.write(tmp_path / "model.gguf", metadata), metadata, TEXTS)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=True)) == text


@pytest.mark.parametrize("pre", REPEATED)
def test_names_that_share_a_pretokenizer_share_it_in_llama_cpp(
    pre: str, peer: LlamaCpp, trained: dict[bool, Vocabulary], tmp_path: Path
) -> None:
    metadata = bpe_metadata(trained[PRETOKENIZERS[pre].byte_level], pre)
    check(peer, vocabularies.write(tmp_path / "model.gguf", metadata), metadata, FEW_TEXTS)


def test_the_corpus_tells_every_two_pretokenizers_apart(trained: dict[bool, Vocabulary]) -> None:
    cut: dict[Any, str] = {}
    for pretokenizer, pre in FIRST_NAMES.items():
        if not pretokenizer.byte_level:
            continue
        tokenizer = Tokenizer.from_gguf(Source(bpe_metadata(trained[True], pre)))
        ids = tuple(tuple(tokenizer.encode(text, add_special=False)) for text in TEXTS if text not in LONG)
        rules = (pretokenizer.patterns, pretokenizer.ignore_merges)
        assert cut.setdefault(ids, rules) == rules


def test_characters_are_of_the_classes_llama_cpp_knows(peer: LlamaCpp) -> None:
    classes = peer.classes()
    if classes is None:
        pytest.skip("this build of llama.cpp does not tell its classes")
    undefined, space = 1, 1 << 8
    names = {"N": 1 << 1, "L": 1 << 2, "M": 1 << 4, "P": 1 << 5, "S": 1 << 6}
    # Classes come in runs of code points; the ends of a run show where it is cut. Newer ones are unknown to one side.
    edges = [
        code
        for code in range(1, 0x10FFFF)
        if classes[code] != undefined
        and not 0xD7FF < code < 0xE000
        and (classes[code] != classes[code - 1] or classes[code] != classes[code + 1])
    ]
    assert len(edges) > 2000
    text = "".join(map(chr, edges))
    patterns = {rf"\p{{{name}}}": bit for name, bit in names.items()} | {r"\s": space}
    for pattern, bit in patterns.items():
        others = Split(Regex(pattern), "removed").pre_tokenize_str(text)
        found = set(text) - {char for part, _ in others for char in part}
        assert found == {chr(code) for code in edges if classes[code] & bit}, pattern


@pytest.mark.parametrize("space_prefix", [True, False])
@pytest.mark.parametrize("ties", [True, False])
def test_merging_by_score_equals_llama_cpp(ties: bool, space_prefix: bool, peer: LlamaCpp, tmp_path: Path) -> None:
    texts = [text.replace("\x00", "") for text in CORPUS + random_texts(200, seed=4)]
    vocabulary = specials(vocabularies.score_vocabulary(texts, 5, ties=ties))
    metadata = vocabulary.metadata("llama", "default", add_space_prefix=space_prefix, add_eos_token=True)
    tokenizer = check(peer, vocabularies.write(tmp_path / "model.gguf", metadata), metadata, [*texts, "a\x00b"])
    plain = [
        text for text in texts if "<" not in text and "   " not in text and "YZ" not in text and "\u00e9" not in text
    ]
    assert len(plain) > 100
    for text in plain:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special=True) == text
    sequences = [tokenizer.encode(text, add_special=False, parse_special=True) for text in texts]
    decoded = [text.decode("utf-8", "replace") for text in peer.detokenize(sequences)]
    assert [tokenizer.decode(ids) for ids in sequences] == decoded


@pytest.mark.parametrize("seed", range(16))
def test_roles_and_ends_of_generation_are_found_by_spelling_as_llama_cpp_does(
    seed: int, peer: LlamaCpp, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    vocabulary = vocabularies.train_bytes(["some text to train on, not much"], 300)
    for text in chance.sample(SPELLINGS, chance.choice((3, 8, 20, len(SPELLINGS)))):
        vocabulary.set(text, chance.choice((NORMAL, CONTROL, CONTROL, USER_DEFINED, UNUSED)))
    count = len(vocabulary.tokens)
    roles = ("bos", "eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep", "padding")
    extra = {f"{role}_token_id": chance.randrange(260, count + 3) for role in roles if chance.random() < 0.4}
    extra |= {key: chance.random() < 0.5 for key in ("add_bos_token", "add_eos_token") if chance.random() < 0.6}
    metadata = vocabulary.metadata(
        "gpt2", chance.choice(("qwen2", "gpt-4o", "llama-bpe", "glm4", "chatglm-bpe")), **extra
    )
    path = vocabularies.write(tmp_path / "model.gguf", metadata)
    told = peer.load(path)
    # Asked for a BOS or EOS there is none of, llama.cpp aborts, by version when it loads or when it encodes.
    if "error" in told or (told["add_bos"] and told["bos"] < 0) or (told["add_eos"] and told["eos"] < 0):
        with pytest.raises(GGUFError, match="token_id is missing"):
            Tokenizer.from_gguf(Source(metadata))
    else:
        check(peer, path, metadata, ["".join(SPELLINGS), " ".join(SPELLINGS), "x<|end|>y</s>z", ""])


def test_white_space_after_special_tokens_of_phi_3_is_dropped_as_in_llama_cpp(peer: LlamaCpp, tmp_path: Path) -> None:
    texts = [
        *SPECIAL,
        "<unk>  x",
        "<|user|>  \n x <|a|>\n",
        "<s>  x</s>  y",
        "<|endoftext|>  x",
        "<tool>\u00a0x  <tool>",
    ]
    vocabulary = specials(vocabularies.score_vocabulary(texts, 6, ties=False))
    metadata = vocabulary.metadata("llama", "default") | {"general.name": "Phi-3.5 MoE"}
    path = vocabularies.write(tmp_path / "model.gguf", vocabulary.metadata("llama", "default"), name="Phi-3.5 MoE")
    check(peer, path, metadata, texts)


def test_a_symbol_that_is_no_token_falls_apart_as_in_llama_cpp(peer: LlamaCpp, tmp_path: Path) -> None:
    vocabulary = vocabularies.train_bytes(["abcab abc cab \u4e2d\u4e2d bca"], 280)
    for missing in ("abc", "\u0120", "z", "ab"):
        if missing in vocabulary.tokens:
            vocabulary.tokens[vocabulary.tokens.index(missing)] = f"gone {missing}"
    vocabulary.merges.append(vocabulary.merges[0])
    metadata = vocabulary.metadata("gpt2", "qwen2")
    path = vocabularies.write(tmp_path / "model.gguf", metadata)
    peer.load(path)
    tokenizer = Tokenizer.from_gguf(Source(metadata))
    texts = ["abcab", "abc abc", "zaz z", " ab ", "\u4e2dab\u4e2d", "cabz abca"]
    expected = peer.encode(texts, add_special=True, parse_special=True)
    assert [tokenizer.encode(text, parse_special=True) for text in texts] == expected


def test_a_merge_listed_twice_keeps_its_first_rank_as_in_llama_cpp(peer: LlamaCpp, tmp_path: Path) -> None:
    vocabulary = vocabularies.train_bytes(["x"], 256)
    vocabulary.merges = ["a b", "b c", "a b"]
    ids = [vocabulary.add(text, NORMAL) for text in ("ab", "bc")]
    metadata = vocabulary.metadata("gpt2", "qwen2")
    tokenizer = check(peer, vocabularies.write(tmp_path / "model.gguf", metadata), metadata, ["abc", "bcab", "aabcc"])
    assert tokenizer.encode("abc")[0] == ids[0]


def test_the_defaults_of_a_file_that_says_little_are_llama_cpps(peer: LlamaCpp, tmp_path: Path) -> None:
    metadata = vocabularies.train_bytes(["nothing said but tokens and merges"], 300).metadata("gpt2")
    del metadata["tokenizer.ggml.token_type"]
    check(peer, vocabularies.write(tmp_path / "model.gguf", metadata), metadata, FEW_TEXTS)


@pytest.mark.shared
def test_oracle_models_tokenise_as_llama_cpp_does(peer: LlamaCpp, oracle_dir: Path) -> None:
    texts = [text for text in CORPUS if text not in LONG] + random_texts(30, seed=7, longest=60)
    folders = sorted(path for path in oracle_dir.iterdir() if path.is_dir())
    assert len(folders) >= 20
    compared = 0
    for folder in folders:
        path = sorted(folder.glob("model-*.gguf"))[0]
        tokenizer = check(peer, path, GGUFFile.open(path).metadata, texts)
        reference = json.loads((folder / "ref.json").read_text())
        with np.load(folder / "ref.npz") as arrays:
            if "text_ids_lcpp" in arrays.files:
                expected = arrays["text_ids_lcpp"].tolist()
                assert tokenizer.encode(reference["text"], add_special=False) == expected, folder.name
                compared += 1
    assert compared >= 15


@pytest.mark.parametrize("read", published.READERS)
def test_published_vocabularies_tokenise_as_llama_cpp_does(read: str, peer: LlamaCpp, tmp_path: Path) -> None:
    metadata = published.READERS[read]()
    if metadata is None:
        pytest.skip(f"the package that carries the vocabulary of {read} is not installed")
    check(peer, vocabularies.write(tmp_path / "model.gguf", metadata), metadata, TEXTS)
