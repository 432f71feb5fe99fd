"""The command `doctor`, on this machine and where something is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from expertserve import doctor
from expertserve.cli import main
from expertserve.experts.memory import AvailableMemory


def lines(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]


def test_a_machine_that_runs_these_tests_is_fit(
    tiny_moe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_TRIAL_S", 0.05)
    assert main(["doctor", str(tiny_moe)]) == 0
    found = lines(capsys)
    assert {"program", "package", "processor", "device", "memory", "model", "disk"} <= {
        subject for _, subject, _ in found
    }
    assert "FAIL" not in {verdict for verdict, _, _ in found}
    texts = {subject: text for _, subject, text in found}
    assert "qwen3moe" in texts["model"] and "GB/s" in texts["disk"]


def test_what_is_in_the_way_is_named_and_the_rest_still_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", ("numpy", "no-such-package"))
    monkeypatch.setattr(doctor, "available_memory", lambda: AvailableMemory(3 << 30, "a test"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    assert main(["doctor", str(broken)]) == 1
    failed = {subject: text for verdict, subject, text in lines(capsys) if verdict == "FAIL"}
    assert "no-such-package" in failed["package"] and "broken.gguf" in failed["model"]


def test_memory_is_named_with_what_limits_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_TRIAL_S", 0.0)
    monkeypatch.setattr(doctor, "available_memory", lambda: AvailableMemory(3 << 30, "a test"))
    main(["doctor"])
    assert ["ok", "memory", "3.00 GiB to be had, by a test"] in lines(capsys)
