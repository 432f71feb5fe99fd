"""Models in several files: found from any of them, and refused by name when they do not belong together."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from expertserve.errors import GGUFError
from expertserve.gguf.file import GGUFFile
from tests.gguf.raw import key, model, number, refusal, tensor, text
from tests.gguf_writer import make_tiny_moe

DATA = bytes(range(64))
ABSENT = object()


def part(folder: Path, number_: int, count: int, /, *names: str, total: int = 3, **changes: object) -> Path:
    """Write one split with a tensor for each name; `changes` replace (or drop, if ABSENT) a split key."""
    values = {"no": number_ - 1, "count": count, "tensors_count": total} | changes
    keys = [number(f"split.{k.replace('_', '.')}", v) for k, v in values.items() if isinstance(v, int)]
    keys += [text(f"split.{k.replace('_', '.')}", v) for k, v in values.items() if isinstance(v, str)]
    tensors = [tensor(name, [8], offset=32 * i) for i, name in enumerate(names)]
    path = folder / f"m-{number_:05d}-of-{count:05d}.gguf"
    path.write_bytes(model(keys, tensors, DATA[: 32 * len(names)], arch="qwen3moe" if number_ == 1 else None))
    return path


@pytest.mark.parametrize("split", [2, 3, 9])
def test_a_split_model_is_the_whole_model(tmp_path: Path, split: int) -> None:
    whole = GGUFFile.open(make_tiny_moe(tmp_path / "whole.gguf"))
    for index in (1, split):
        first = make_tiny_moe(tmp_path / "m.gguf", split=split)
        with GGUFFile.open(first.with_name(f"m-{index:05d}-of-{split:05d}.gguf")) as file:
            assert [p.name for p in file.paths] == [f"m-{i + 1:05d}-of-{split:05d}.gguf" for i in range(split)]
            assert list(file.tensors) == list(whole.tensors)
            assert {t.file_index for t in file.tensors.values()} == set(range(split))
            assert len(file.fingerprint()) == split
            assert file.get("block_count") == 2
            for name, info in file.tensors.items():
                ours, wanted = bytearray(info.nbytes), bytearray(whole.tensors[name].nbytes)
                file.read_tensor(name, memoryview(ours))
                whole.read_tensor(name, memoryview(wanted))
                assert ours == wanted
    whole.close()


def test_a_first_split_without_tensors_is_fine(tmp_path: Path) -> None:
    part(tmp_path, 1, 2, total=2)
    with GGUFFile.open(part(tmp_path, 2, 2, "a", "b", total=2)) as file:
        assert {name: t.file_index for name, t in file.tensors.items()} == {"a": 1, "b": 1}


def test_a_model_marked_as_one_split_needs_no_special_name(tmp_path: Path) -> None:
    path = part(tmp_path, 1, 1, "a", total=1)
    with GGUFFile.open(path.rename(tmp_path / "renamed.gguf")) as file:
        assert list(file.tensors) == ["a"]


def refused(path: Path) -> str:
    with pytest.raises(GGUFError) as caught:
        GGUFFile.open(path).close()
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith("put all splits of one model, unrenamed, in one folder")
    return message


def test_a_missing_split_is_named(tmp_path: Path) -> None:
    first = part(tmp_path, 1, 4, "a")
    part(tmp_path, 3, 4, "c")
    assert "split m-00002-of-00004.gguf and 1 more of 4 is missing" in refused(first)
    part(tmp_path, 2, 4, "b")
    assert "split m-00004-of-00004.gguf of 4 is missing" in refused(first)


def test_a_renamed_split_is_refused(tmp_path: Path) -> None:
    first = part(tmp_path, 1, 2, "a")
    part(tmp_path, 2, 2, "b", "c")
    for name in ("m.gguf", "m-00001-of-00003.gguf", "m-00003-of-00002.gguf", "m-00000-of-00002.gguf"):
        assert "does not fit the name" in refused(Path(shutil.copy(first, tmp_path / name)))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"no": 0}, "m-00002-of-00002.gguf: metadata 'split.no' is 0, but 1 is expected"),
        ({"no": ABSENT}, "metadata 'split.no' is missing"),
        ({"no": "1"}, "metadata 'split.no' is not an integer"),
        ({"count": 3}, "metadata 'split.count' is 3, but 2 is expected"),
        ({"count": ABSENT}, "metadata 'split.count' is missing"),
        ({"tensors_count": 4}, "metadata 'split.tensors.count' is 4, but 3 is expected"),
        ({"tensors_count": ABSENT}, "metadata 'split.tensors.count' is missing"),
    ],
)
def test_splits_that_disagree_are_refused(tmp_path: Path, changes: dict[str, object], expected: str) -> None:
    first = part(tmp_path, 1, 2, "a")
    part(tmp_path, 2, 2, "b", "c", **changes)
    assert expected in refused(first)


def test_a_split_with_too_few_tensors_is_refused(tmp_path: Path) -> None:
    first = part(tmp_path, 1, 2, "a")
    part(tmp_path, 2, 2, "b")
    assert "'split.tensors.count' is 3, but 2 is expected" in refused(first)


def test_one_tensor_in_two_splits_is_refused(tmp_path: Path) -> None:
    first = part(tmp_path, 1, 2, "a")
    part(tmp_path, 2, 2, "b", "a")
    assert "m-00002-of-00002.gguf: tensor 'a' is also in m-00001-of-00002.gguf" in refused(first)


def test_splits_of_two_architectures_are_refused(tmp_path: Path) -> None:
    first = part(tmp_path, 1, 2, "a")
    content = model([number("split.no", 1), number("split.count", 2), number("split.tensors.count", 1)], arch="olmoe")
    part(tmp_path, 1, 2, "a", total=1)
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(content)
    assert "the architecture differs" in refused(first)


def test_a_malformed_second_split_is_named(tmp_path: Path) -> None:
    first = part(tmp_path, 1, 2, "a")
    second = part(tmp_path, 2, 2, "b", "c")
    second.write_bytes(second.read_bytes()[:-8])
    with pytest.raises(GGUFError, match=r"m-00002-of-00002\.gguf: tensor 'c' lies at"):
        GGUFFile.open(first)


def test_a_count_that_is_no_integer_is_refused(tmp_path: Path) -> None:
    assert "'split.count' is not an integer" in refusal(tmp_path, model([key("split.count", 6, bytes(4))]))
