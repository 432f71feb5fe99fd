"""What only a real GPU can answer."""

from __future__ import annotations

import pytest

from expertserve.ops.cuda.device import missing, open_device
from tools.gpu_check.kernels import check_kernels
from tools.gpu_check.report import Report
from tools.gpu_check.serving import check_serving


@pytest.mark.gpu
@pytest.mark.skipif(missing() is not None, reason="needs a CUDA device")
def test_kernels_and_streaming_on_a_real_device() -> None:
    report = Report()
    check_kernels(open_device(), report)
    check_serving(open_device(), report, prompt=96, decode=48)
    assert report.failed == 0, report.table()
