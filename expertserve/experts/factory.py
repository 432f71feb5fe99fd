"""Names the concrete slot stores, and says which have a tier behind them; nothing else in the package does.

Owns the choice of store by device. Invariant: what comes back honours `ExpertSlotStore`, or the device is refused by
name.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertserve.errors import KernelUnavailableError
from expertserve.experts.host_tier import HostTier
from expertserve.experts.store import ExpertSlotStore, HostExpertSlotStore

_HOST_DEVICES = ("cpu", "reference")


def has_host_tier(device: str) -> bool:
    """Whether evicted experts of the device's slots can go to host memory instead of nowhere."""
    if device != "cuda":
        return False
    from expertserve.ops.cuda.device import open_device

    return not open_device().reads_host_memory


def reads_mapped_files(device: str) -> bool:
    """Whether the device's kernels can read an expert where the file is mapped into this process."""
    return device in _HOST_DEVICES


def make_host_tier(store: ExpertSlotStore, places: int, hotness: NDArray[np.float32]) -> HostTier | None:
    """The tier behind a store, with room for `places` experts; None where the slots are host memory themselves.

    Raises:
        CapacityError: the memory was refused.
    """
    if not places:
        return None
    from expertserve.experts.device_store import DeviceExpertSlotStore

    return HostTier(store, places, hotness) if isinstance(store, DeviceExpertSlotStore) else None


def make_slot_store(device: str, slot_count: int, slot_bytes: int, *, huge_pages: bool = True) -> ExpertSlotStore:
    """Makes the slot store of a device.

    Raises:
        KernelUnavailableError: there is no slot store for that device.
        CapacityError: the memory was refused.
    """
    if device in _HOST_DEVICES:
        return HostExpertSlotStore(slot_count, slot_bytes, huge_pages=huge_pages)
    if device == "cuda":
        from expertserve.experts.device_store import DeviceExpertSlotStore
        from expertserve.ops.cuda.device import open_device

        gpu = open_device()
        if gpu.reads_host_memory:
            return HostExpertSlotStore(slot_count, slot_bytes, huge_pages=huge_pages)
        return DeviceExpertSlotStore(gpu, slot_count, slot_bytes)
    raise KernelUnavailableError(f"no expert slot store for device {device!r}")
