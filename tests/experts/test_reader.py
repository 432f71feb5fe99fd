"""Readers: the right bytes at awkward offsets in every mode, alignment, and faults by name."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertserve.errors import ConfigError, ExpertReadError
from expertserve.experts import disk as disk_module
from expertserve.experts.disk import FileDisk, direct_alignment
from expertserve.experts.layout import SHIFT_ALIGN, SlotLayout
from expertserve.experts.pool import Fill, ReaderPool, _reads
from expertserve.experts.reader import BufferedReader, DirectReader, FileReader, SliceReads, open_reader
from expertserve.gguf.spans import Span
from tests.experts.worlds import FakeDisk, make_world, write_files

MODES = ("direct", "buffered", "mmap")


def fill_with(reader: FileReader, span: Span) -> tuple[Fill, memoryview]:
    """Reads one slice as the lane does; returns the fill and the slot's buffer."""
    layout = SlotLayout.plan([span.nbytes], reader.align)
    buffer = memoryview(mmap.mmap(-1, layout.slot_bytes))
    pool = ReaderPool(reader, 1)
    fill = Fill(0, 0, SliceReads([span], layout, reader), lambda fill: None)
    pool.submit(fill, buffer, urgent=True)
    assert pool.collect(wait=True) == [fill]
    assert _reads.reads_close(pool._pool, 5.0) == 0  # but not the reader, which the test reads with again
    pool._pool = None
    return fill, buffer


def read(reader: FileReader, span: Span) -> bytes:
    fill, buffer = fill_with(reader, span)
    if fill.error is not None:
        raise fill.error
    (shift,) = fill.reads.shifts
    assert shift % SHIFT_ALIGN == 0
    assert fill.asked >= span.nbytes
    return bytes(buffer[shift : shift + span.nbytes])


@pytest.fixture(scope="module")
def two_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[bytes]]:
    folder = tmp_path_factory.mktemp("split")
    rng = np.random.default_rng(5)
    contents = [rng.bytes(70_001), rng.bytes(50_033)]
    paths = []
    for index, data in enumerate(contents):
        paths.append(folder / f"part-{index}.gguf")
        paths[-1].write_bytes(data)
    return paths, contents


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("offset", [0, 32, 511, 512, 1792, 2816, 4095, 4096, 4097, 31_999])
@pytest.mark.parametrize("nbytes", [1, 33, 512, 4096, 18_001])
def test_the_bytes_are_those_of_the_span_in_the_right_file(
    mode: str, offset: int, nbytes: int, two_files: tuple[list[Path], list[bytes]]
) -> None:
    paths, contents = two_files
    reader = open_reader(mode, paths)
    try:
        for index, data in enumerate(contents):
            assert read(reader, Span(index, offset, nbytes)) == data[offset : offset + nbytes]
    finally:
        reader.close()


@pytest.mark.parametrize("mode", MODES)
def test_the_last_bytes_of_a_file_can_be_read(mode: str, two_files: tuple[list[Path], list[bytes]]) -> None:
    paths, contents = two_files
    reader = open_reader(mode, paths)
    size = len(contents[0])
    assert read(reader, Span(0, size - 700, 700)) == contents[0][-700:]
    with pytest.raises(ExpertReadError, match=r"part-0\.gguf.*byte 69302.*short read"):
        read(reader, Span(0, size - 699, 700))
    reader.close()


@settings(max_examples=80, deadline=None)
@given(
    align=st.sampled_from([32, 512, 4096]),
    offset=st.integers(0, 9000),
    nbytes=st.integers(1, 9000),
    most=st.integers(1, 20),
)
def test_reads_that_come_in_pieces_are_put_together(align: int, offset: int, nbytes: int, most: int) -> None:
    data = np.random.default_rng(1).bytes(20_000)
    disk = FakeDisk([data])
    disk.fault = lambda file_index, at, length: most * align
    for reader in (DirectReader(disk, align), BufferedReader(disk)):
        assert read(reader, Span(0, offset, nbytes)) == data[offset : offset + nbytes]


def test_direct_reads_are_aligned_and_land_without_a_copy_where_kernels_allow_it() -> None:
    data = np.random.default_rng(1).bytes(20_000)
    disk = FakeDisk([data])
    reader = DirectReader(disk, 512)
    fill, _ = fill_with(reader, Span(0, 1792, 3000))
    assert fill.reads.shifts == (1792 % 512,)
    fill, buffer = fill_with(reader, Span(0, 1792 + 7, 3000))
    assert fill.reads.shifts == (0,)  # by the bounce buffer
    assert bytes(buffer[:3000]) == data[1799:4799]
    assert all(offset % 512 == 0 and length % 512 == 0 for _, offset, length in disk.reads)


@pytest.mark.parametrize("direct", [True, False])
def test_an_io_error_is_named_with_file_and_offset(direct: bool) -> None:
    disk = FakeDisk([bytes(9000)])
    disk.fault = lambda file_index, offset, length: OSError(errno.EIO, "Input/output error")
    reader = DirectReader(disk, 512) if direct else BufferedReader(disk)
    with pytest.raises(ExpertReadError, match=r"fake-0\.gguf.*1000 bytes at byte 640.*Input/output error"):
        read(reader, Span(0, 640, 1000))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("most", [0, 100])
def test_a_read_that_stays_short_is_an_error_and_never_zeros(direct: bool, most: int) -> None:
    disk = FakeDisk([bytes(1500)])
    disk.fault = lambda file_index, offset, length: most if offset < 1000 else 0
    reader = DirectReader(disk, 512) if direct else BufferedReader(disk)
    with pytest.raises(ExpertReadError, match="short read"):
        read(reader, Span(0, 640, 800))


@pytest.mark.parametrize("mode", MODES)
def test_a_file_cut_after_opening_is_a_named_error(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(np.random.default_rng(1).bytes(64 * 1024))
    reader = open_reader(mode, [path])
    os.truncate(path, 10_000)
    with pytest.raises(ExpertReadError, match=r"model\.gguf.*short read"):
        read(reader, Span(0, 8000, 30_000))
    with pytest.raises(ExpertReadError, match="changed on disk"):
        reader.disk.check_unchanged(0)
    reader.close()


def test_a_file_rewritten_in_place_is_noticed_though_its_size_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(1000))
    os.utime(path, ns=(1, 1))
    disk = FileDisk([path], direct=False)
    disk.check_unchanged(0)
    with open(path, "r+b") as file:
        file.write(b"other")
    with pytest.raises(ExpertReadError, match=r"model\.gguf.*changed on disk.*restart"):
        disk.check_unchanged(0)
    disk.close()


def test_read_ahead_hints_are_page_aligned_and_accepted(two_files: tuple[list[Path], list[bytes]]) -> None:
    paths, _ = two_files
    reader = open_reader("mmap", paths)
    for offset in (0, 1792, 4095, 5000):
        assert fill_with(reader, Span(0, offset, 6000))[0].advised
    reader.close()


def test_only_the_mapped_mode_hints(two_files: tuple[list[Path], list[bytes]]) -> None:
    paths, _ = two_files
    for mode in ("direct", "buffered"):
        reader = open_reader(mode, paths)
        assert not fill_with(reader, Span(0, 4096, 600))[0].advised
        reader.close()


def test_auto_reads_around_the_page_cache_only_when_the_files_do_not_fit_it(
    two_files: tuple[list[Path], list[bytes]],
) -> None:
    paths, contents = two_files
    total = sum(map(len, contents))
    expected = {total - 1: "direct", total: "buffered", None: "direct"}
    for cacheable, mode in expected.items():
        reader = open_reader("auto", paths, cacheable_bytes=cacheable)
        assert reader.mode == mode
        reader.close()


def test_without_direct_reads_auto_is_buffered_and_direct_is_refused(
    two_files: tuple[list[Path], list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, _ = two_files
    monkeypatch.setattr(disk_module, "_reads_at", lambda fd, align: False)
    assert direct_alignment(paths) is None
    reader = open_reader("auto", paths, cacheable_bytes=0)
    assert reader.mode == "buffered"
    reader.close()
    with pytest.raises(ConfigError, match="buffered or auto"):
        open_reader("direct", paths)
    with pytest.raises(ConfigError, match="telepathy"):
        open_reader("telepathy", paths)


def test_a_file_system_that_reports_no_alignment_is_probed(
    two_files: tuple[list[Path], list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, _ = two_files
    tried = []

    def only_4096(fd: int, align: int) -> bool:
        tried.append(align)
        return align == 4096

    monkeypatch.setattr(disk_module, "_reported_alignment", lambda fd: None)
    monkeypatch.setattr(disk_module, "_reads_at", only_4096)
    assert direct_alignment(paths) == 4096
    assert tried == [512, 4096] * 2


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ExpertReadError, match=r"nowhere\.gguf"):
        FileDisk(["nowhere.gguf"], direct=False)


def test_a_disk_knows_whether_its_files_are_those_of_a_header(tmp_path: Path) -> None:
    paths = write_files(make_world(), tmp_path)
    disk = FileDisk(paths, direct=False)
    status = [os.stat(path) for path in paths]
    fingerprint = [(str(p), s.st_size, s.st_mtime_ns, s.st_ino) for p, s in zip(paths, status, strict=True)]
    assert disk.matches(fingerprint)
    assert not disk.matches([(name, size + 1, *rest) for name, size, *rest in fingerprint])  # type: ignore[misc]
    disk.close()
