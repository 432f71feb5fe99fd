"""A ggml graph made ready to run by one call.

Owns the plan and its work buffer's address; the graph and its context belong to whoever built them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from expertserve.errors import KernelUnavailableError
from expertserve.ops.ggml.library import GRAPH_COMPUTE, ggml


class GraphPlan:
    """A graph, its plan and where its kernels work."""

    def __init__(self, graph: Any, threads: int, work: Callable[[int], int]) -> None:
        """`work` gives the address of at least as many bytes as it is asked for, good for the life of the plan."""
        self._plan = ggml.ggml_graph_plan(graph, threads, None)
        if self._plan.work_size:
            self._plan.work_data = ctypes.cast(work(self._plan.work_size), ctypes.POINTER(ctypes.c_uint8))
        self._args = (ctypes.addressof(graph.contents), ctypes.addressof(self._plan))

    def run(self) -> None:
        """Computes the graph.

        Raises:
            KernelUnavailableError: ggml could not.
        """
        status = GRAPH_COMPUTE(*self._args)
        if status != 0:
            raise KernelUnavailableError(f"ggml could not compute a graph (status {status})")
