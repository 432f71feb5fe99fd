"""The GPU check's own kernels and model runs, on the emulated device, and that it fails where something is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from expertserve.ops.cuda import source
from tests.cuda.emulator import available
from tests.cuda.fake_device import FakeDevice, installed
from tools.gpu_check import kernels, rates
from tools.gpu_check.kernels import World, check_kernels, random
from tools.gpu_check.report import Report
from tools.gpu_check.serving import check_serving

pytestmark = pytest.mark.skipif(not available, reason="needs g++")


def test_every_kernel_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FORMATS", ("F16", "Q4_K", "IQ3_S"))
    report = Report()
    check_kernels(FakeDevice(), report)
    assert report.failed == 0, report.table()
    named = {row[0].split(",")[0] for row in report.rows}
    assert {"product Q4_K", "routed experts IQ3_S", "rope NEOX", "recurrence 128 x 128", "selective scan"} <= named
    assert set(kernels.FORMATS) < set(source.FORMATS)


def test_the_embedded_model_passes() -> None:
    report = Report()
    with installed(FakeDevice()) as fake:
        check_serving(fake, report, prompt=4, decode=2)
    assert report.failed == 0, report.table()


def test_rates_are_of_checked_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the clock, which only a real device has."""
    for name, value in {"HIDDEN": 256, "FFN": 256, "ROTATED_BYTES": 3 << 20, "BAR": 0.0}.items():
        monkeypatch.setattr(rates, name, value)

    def timed(device: FakeDevice, queue: Callable[[], None], times: int) -> tuple[float, float]:
        for _ in range(3):
            queue()
        device.compute.synchronize()
        return 1.0, 0.5

    monkeypatch.setattr(rates, "timed", timed)
    fake, report = FakeDevice(), Report()
    report.check("experts", rates.decode_experts, fake, 1e9, report)
    assert report.failed == 0 and "of a copy" in report.rows[-1][1], report.table()
    assert "of the link" in rates.store_rate(fake, 1e9)
    assert fake.used_bytes == 0


def test_a_wrong_answer_is_a_failed_row() -> None:
    report = Report()
    report.check("wrong", lambda: World(random(2, 8)).agrees(FakeDevice(), lambda g: g.scale(g.load("x"), 0.5), -1.0))
    report.check("raises", lambda: (1 // 0 > 0, ""))
    report.note("a figure", "1")
    assert report.figure("measured", lambda: 2.0, shown="{:.1f} GB/s".format) == 2.0
    assert report.figure("cannot be measured", lambda: 1 // 0, shown=str) is None
    assert report.failed == 3 and report.table().count("FAILED") == 3 and "2.0 GB/s" in report.table()
