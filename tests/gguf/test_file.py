"""Opening a model, reading its bytes, and noticing what happens to the file meanwhile."""

from __future__ import annotations

import errno
import gc
import io
import os
import threading
import time
from pathlib import Path

import pytest

from expertserve.errors import GGUFError
from expertserve.gguf import positional
from expertserve.gguf.file import GGUFFile
from tests.gguf.raw import key, model, number, opened, refusal, tensor, text

DATA = bytes(i * 7 % 251 for i in range(1024))
CONTENT = model(
    [number("qwen3moe.block_count", 3), key("qwen3moe.scale", 6, b"\x00\x00\x00\x40"), text("qwen3moe.name", "x")],
    [tensor("a", [8]), tensor("b", [16, 15], offset=64)],
    DATA,
)


def test_tensors_are_read_where_they_lie(tmp_path: Path) -> None:
    with opened(tmp_path, CONTENT) as file:
        for name, start, stop in (("a", 0, 32), ("b", 64, 1024)):
            out = bytearray(stop - start)
            file.read_tensor(name, memoryview(out))
            assert out == DATA[start:stop]


def test_any_item_size_of_buffer_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = positional._read_once
    monkeypatch.setattr(positional, "_read_once", lambda file, out, offset: whole(file, out[:7], offset))
    with opened(tmp_path, CONTENT) as file:
        out = memoryview(bytearray(32)).cast("f")
        file.read_tensor("a", out)
        assert out.tobytes() == DATA[:32]


def test_a_read_that_comes_in_pieces_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = positional._read_once
    monkeypatch.setattr(positional, "_read_once", lambda file, out, offset: whole(file, out[:7], offset))
    with opened(tmp_path, CONTENT) as file:
        out = bytearray(960)
        file.read_tensor("b", memoryview(out))
        assert out == DATA[64:]


class SlowSeek(io.FileIO):
    """Leaves time for another thread between seeking and reading."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        at = super().seek(offset, whence)
        time.sleep(0.001)
        return at


def test_threads_read_right_where_there_are_no_positional_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positional, "_read_once", positional.seek_and_read)
    path = tmp_path / "data"
    path.write_bytes(DATA)
    with SlowSeek(path) as file:
        results = [bytearray(32) for _ in range(16)]
        readers = [
            threading.Thread(target=positional.read_at, args=(file, memoryview(out), 32 * i))
            for i, out in enumerate(results)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    assert b"".join(results) == DATA[: 32 * 16]


def test_a_file_cut_while_loaded_fails_the_read(tmp_path: Path) -> None:
    with opened(tmp_path, CONTENT) as file:
        os.truncate(file.paths[0], len(CONTENT) - 1)
        out = bytearray(960)
        with pytest.raises(
            GGUFError, match=r"m\.gguf: the file ended after 959 of 960 bytes \(at byte \d+\); .*restart"
        ):
            file.read_tensor("b", memoryview(out))


def test_a_failing_disk_is_a_named_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(file: io.FileIO, out: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with opened(tmp_path, CONTENT) as file:
        monkeypatch.setattr(positional, "_read_once", broken)
        with pytest.raises(GGUFError, match=r"m\.gguf: cannot read 32 bytes \(at byte \d+\): Input/output error"):
            file.read_tensor("a", memoryview(bytearray(32)))


def test_a_disk_that_fails_under_the_header_is_a_named_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: io.BufferedReader, size: int = -1) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("io.BufferedReader", type("Broken", (io.BufferedReader,), {"read": broken}))
    assert "Input/output error" in refusal(tmp_path, CONTENT)


def test_a_buffer_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path, CONTENT) as file, pytest.raises(ValueError, match="32 bytes, the buffer 33"):
        file.read_tensor("a", memoryview(bytearray(33)))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with opened(tmp_path, CONTENT) as file, pytest.raises(GGUFError, match=r"m\.gguf: tensor 'zzz' is missing"):
        file.read_tensor("zzz", memoryview(bytearray(1)))


def test_metadata_of_the_architecture_is_found_by_its_short_key(tmp_path: Path) -> None:
    with opened(tmp_path, CONTENT) as file:
        assert file.architecture == "qwen3moe"
        assert file.get("block_count") == 3
        assert file.get("block_count", kind=int) == 3
        assert file.get("block_count", kind=float) == 3.0
        assert isinstance(file.get("block_count", kind=float), float)
        assert file.get("scale", kind=float) == 2.0
        assert file.get("absent", None) is None
        assert file.get("absent", 5, kind=int) == 5


def test_missing_or_mistyped_metadata_is_named(tmp_path: Path) -> None:
    with opened(tmp_path, CONTENT) as file:
        with pytest.raises(GGUFError, match=r"m\.gguf: metadata 'qwen3moe\.absent' is missing"):
            file.get("absent")
        for name, kind in (("name", int), ("scale", int), ("block_count", bool), ("block_count", list)):
            with pytest.raises(GGUFError, match=rf"'qwen3moe\.{name}' is not of type {kind.__name__}"):
                file.get(name, kind=kind)


def test_the_fingerprint_is_of_the_file_as_opened(tmp_path: Path) -> None:
    with opened(tmp_path, CONTENT) as file:
        status = os.stat(file.paths[0])
        expected = ((str(file.paths[0]), len(CONTENT), status.st_mtime_ns, status.st_ino),)
        assert file.fingerprint() == expected
        file.paths[0].write_bytes(b"other")
        assert file.fingerprint() == expected


@pytest.mark.parametrize("change", ["rewritten", "replaced", "grown", "removed"])
def test_a_file_changed_on_disk_is_noticed(tmp_path: Path, change: str) -> None:
    with opened(tmp_path, CONTENT) as file:
        path = file.paths[0]
        file.check_unchanged()
        if change == "rewritten":
            os.utime(path, ns=(0, file.fingerprint()[0][2] + 1))
        elif change == "replaced":
            other = tmp_path / "other"
            other.write_bytes(CONTENT)
            os.utime(other, ns=(0, file.fingerprint()[0][2]))
            other.replace(path)
        elif change == "grown":
            path.write_bytes(CONTENT + b"x")
        else:
            path.unlink()
        with pytest.raises(GGUFError, match=r"m\.gguf: .* while loaded.*restart"):
            file.check_unchanged()


def test_a_replaced_file_still_gives_its_old_bytes(tmp_path: Path) -> None:
    with opened(tmp_path, CONTENT) as file:
        other = tmp_path / "other"
        other.write_bytes(bytes(len(CONTENT)))
        other.replace(file.paths[0])
        out = bytearray(32)
        file.read_tensor("a", memoryview(out))
        assert out == DATA[:32]


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, expected in (("", "not a regular file"), ("pipe", "not a regular file"), ("none", "No such file")):
        with pytest.raises(GGUFError, match=expected):
            GGUFFile.open(tmp_path / name)
    with pytest.raises(GGUFError, match="null"):
        GGUFFile.open(str(tmp_path / "a\0b"))


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> io.FileIO:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("io.FileIO", denied)
    assert "Permission denied; check the path" in refusal(tmp_path, CONTENT)


def open_descriptors() -> int:
    """Descriptors of this process, without those that only cycles of earlier tests' objects still hold."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors in /proc")
def test_no_descriptor_outlives_its_model(tmp_path: Path) -> None:
    before = open_descriptors()
    file = opened(tmp_path, CONTENT)
    assert open_descriptors() == before + 1
    file.close()
    file.close()
    assert open_descriptors() == before
    forgotten = opened(tmp_path, CONTENT)
    del forgotten
    assert open_descriptors() == before
    refusal(tmp_path, CONTENT[:-1])
    refusal(tmp_path, model(arch=None))
    assert open_descriptors() == before
