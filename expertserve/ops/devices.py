"""What this machine could compute on, for a report.

Finds out by trying, in the way the backends do; chooses nothing. Nothing here raises: what is missing is said.
"""

from __future__ import annotations

from expertserve.errors import ExpertServeError
from expertserve.ops.factory import DEVICES, make_backend


def device_reports() -> dict[str, tuple[bool, str]]:
    """By device: whether its kernels work here, and one line about them."""
    return {device: _kernels(device) for device in DEVICES}


def _kernels(device: str) -> tuple[bool, str]:
    try:
        backend = make_backend(device, threads=1, flash_attention=True)
    except (ExpertServeError, ImportError, OSError) as error:
        return False, " ".join(str(error).split())
    backend.close()
    where = ""
    if device == "cuda":
        from expertserve.ops.cuda.device import open_device

        where = f" on {open_device().name}"
    return True, f"kernels of {type(backend).__name__} load{where}"
