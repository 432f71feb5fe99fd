"""What this machine could compute on, for a report.

Finds out by trying, in the way the backends do; chooses nothing. Nothing here raises: what is missing is said.
"""

from __future__ import annotations

from importlib.util import find_spec

from expertserve.errors import ExpertServeError
from expertserve.ops.factory import DEVICES, make_backend


def device_reports() -> dict[str, tuple[bool, str]]:
    """By device: whether its kernels work here, and one line about them."""
    found = {device: _kernels(device) for device in DEVICES}
    found["gpu"] = _gpu()
    return found


def _kernels(device: str) -> tuple[bool, str]:
    try:
        backend = make_backend(device, threads=1, flash_attention=True)
    except (ExpertServeError, ImportError, OSError) as error:
        return False, " ".join(str(error).split())
    backend.close()
    return True, f"kernels of {type(backend).__name__} load"


def _gpu() -> tuple[bool, str]:
    if find_spec("cupy") is None:
        return False, "none is used: the package cupy is not installed"
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        names = [cupy.cuda.runtime.getDeviceProperties(index)["name"].decode() for index in range(count)]
    except Exception as error:  # a driver that is missing or too old raises the library's own errors
        return False, f"none can be used: {' '.join(str(error).split())}"
    return bool(names), ", ".join(names) or "none is there"
