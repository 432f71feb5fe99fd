"""Which backend computes on a device; alone in naming the concrete ones.

A backend's libraries are imported when it is made, so that a device that is not used costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from expertserve.errors import KernelUnavailableError
from expertserve.ops.base import Backend

DEVICES = ("cpu", "cuda", "reference")


def best_device() -> Literal["cpu", "cuda"]:
    """The GPU where one can be used, else the CPU."""
    from expertserve.ops.cuda.device import missing

    return "cpu" if missing() else "cuda"


def device_workspace(device: str, free: int) -> int | None:
    """Of that many free bytes of a device's own memory, those that are left to its backend; None on the host's memory.

    For devices that are not here, too.
    """
    if device != "cuda":
        return None
    from expertserve.ops.cuda.backend import workspace_bytes

    return workspace_bytes(free)


def make_backend(
    device: str, *, threads: int, flash_attention: bool, on_abort: Callable[[str], None] | None = None
) -> Backend:
    """The backend of `device`, without weights.

    Args:
        device: where to compute.
        threads: CPU threads.
        flash_attention: fused attention rather than a score matrix.
        on_abort: called with the message where a kernel library is about to end the process.

    Raises:
        KernelUnavailableError: nothing here computes on that device; says why.
    """
    if device == "cpu":
        from expertserve.ops.ggml.backend import GgmlBackend
        from expertserve.ops.ggml.library import call_on_abort

        if on_abort is not None:
            call_on_abort(on_abort)
        return GgmlBackend(threads=threads, flash_attention=flash_attention)
    if device == "cuda":
        from expertserve.ops.cuda.backend import CudaBackend
        from expertserve.ops.cuda.device import open_device

        return CudaBackend(open_device())
    if device == "reference":
        from expertserve.ops.reference import ReferenceBackend

        return ReferenceBackend()
    raise KernelUnavailableError(f"no kernels for device {device!r}; use --device {' or '.join(DEVICES)}")
