"""Which backend computes on a device; alone in naming the concrete ones.

A backend's libraries are imported when it is made, so that a device that is not used costs nothing.
"""

from __future__ import annotations

from expertserve.errors import KernelUnavailableError
from expertserve.ops.base import Backend

DEVICES = ("cpu", "reference")


def make_backend(device: str, *, threads: int, flash_attention: bool) -> Backend:
    """The backend of `device`, without weights.

    Raises:
        KernelUnavailableError: nothing here computes on that device.
    """
    if device in ("cpu", "auto"):
        from expertserve.ops.ggml.backend import GgmlBackend

        return GgmlBackend(threads=threads, flash_attention=flash_attention)
    if device == "reference":
        from expertserve.ops.reference import ReferenceBackend

        return ReferenceBackend()
    raise KernelUnavailableError(
        f"no kernels for device {device!r} in this version; use --device {' or '.join(DEVICES)}"
    )
