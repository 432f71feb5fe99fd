"""One command for a machine with a GPU: all kernels beside the reference, streaming, rates, a table at the end.

    python -m tools.gpu_check [--table FILE]

It needs NumPy, the gguf package, CuPy and the compiled reader threads (`python setup.py build_ext --inplace`), nothing
of the server, and takes a few minutes, most of them to compile kernels. The exit status is the number of failed rows.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter

from expertserve.ops.cuda.device import open_device
from tools.gpu_check.kernels import check_kernels
from tools.gpu_check.rates import measure_rates
from tools.gpu_check.report import Report
from tools.gpu_check.serving import check_serving


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--table", type=Path, help="a file that gets the table")
    table_file = parser.parse_args().table
    device, report, began = open_device(), Report(), perf_counter()
    report.note("device", f"{device.name}, {device.free_bytes() >> 20} MiB free")
    check_kernels(device, report)
    check_serving(device, report, prompt=96, decode=48)
    measure_rates(device, report)
    report.note("all of this", f"{perf_counter() - began:.0f} s, {report.failed} failed")
    print(report.table())
    if table_file is not None:
        table_file.write_text(report.table() + "\n")
    return report.failed


if __name__ == "__main__":
    raise SystemExit(main())
