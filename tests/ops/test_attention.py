"""Our attention kernel against plain arithmetic in float64, and what its result may not depend on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from expertserve.ops.base import Graph, HostAccess, KVLayout, KVType
from expertserve.ops.ggml.backend import GgmlBackend
from expertserve.ops.ggml.library import attention_fits

pytestmark = pytest.mark.skipif(not attention_fits(64, 64), reason="this processor has no kernel of ours")

SCALE = 0.31


class Case:
    """Rows of queries, keys and values, the cells they go to, and which of those each row sees."""

    def __init__(self, rows: int, heads: int, kv_heads: int, k_dim: int, v_dim: int, n_kv: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.layout = KVLayout(0, kv_heads, k_dim, v_dim)
        self.q = rng.standard_normal((rows, heads, k_dim), np.float32)
        self.k = rng.standard_normal((rows, kv_heads, k_dim), np.float32)
        self.v = rng.standard_normal((rows, kv_heads, v_dim), np.float32)
        self.cells = rng.permutation(n_kv)[:rows]
        self.visible = rng.random((rows, n_kv)) < 0.7
        self.visible &= np.isin(np.arange(n_kv), self.cells)
        self.visible[np.arange(rows), self.cells] = True
        self.visible[0] = np.arange(n_kv) == self.cells[0]

    def run(self, *, threads: int = 2, rows: slice = slice(None), n_kv: int | None = None) -> np.ndarray:
        """All keys and values are stored first, then the attention of `rows` is computed; twice, for the counters."""
        backend = GgmlBackend(threads=threads, flash_attention=True)
        try:
            n_kv = n_kv or self.visible.shape[1]
            backend.allocate_kv([self.layout], n_kv, KVType.F16)
            shapes = {"q": self.q.shape, "k": self.k.shape, "v": self.v.shape}
            most = len(self.q)
            for name, shape in shapes.items():
                backend.allocate_buffer(name, shape, np.float32, HostAccess.NONE)
            backend.allocate_buffer("out", (most, self.q.shape[1] * self.layout.v_dim), np.float32, HostAccess.NONE)
            backend.allocate_buffer("cells", (most,), np.int64, HostAccess.NONE)
            backend.allocate_buffer("mask", (most * n_kv,), np.float16, HostAccess.NONE)
            mask = np.full((most, n_kv), -np.inf, np.float16)
            mask[:, : self.visible.shape[1]][self.visible] = 0
            self._step(backend, slice(None), mask)
            backend.host("out")[:] = np.nan
            return self._step(backend, rows, mask)
        finally:
            backend.close()

    def _step(self, backend: GgmlBackend, rows: slice, mask: np.ndarray) -> np.ndarray:
        count = len(self.q[rows])
        for name, values in (("q", self.q), ("k", self.k), ("v", self.v), ("cells", self.cells)):
            backend.host(name)[:count] = values[rows]
        backend.begin_batch(count, mask[rows], 1)

        def build(g: Graph) -> None:
            q, k, v = (g.load(name) for name in ("q", "k", "v"))
            g.store("out", g.attention(q, k, v, self.layout, SCALE))

        backend.compile("attention", build).run()
        return np.array(backend.host("out")[:count])

    def exact(self) -> np.ndarray:
        rows, heads, _ = self.q.shape
        out = np.zeros((rows, heads, self.layout.v_dim))
        cell_of = {int(cell): row for row, cell in enumerate(self.cells)}
        for row in range(rows):
            seen = [cell_of[int(cell)] for cell in np.flatnonzero(self.visible[row])]
            for head in range(heads):
                kv_head = head // (heads // self.layout.num_heads)
                keys, values = (_half(x[seen, kv_head]) for x in (self.k, self.v))
                scores = SCALE * keys @ self.q[row, head].astype(np.float64)
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ values / weights.sum()
        return out.reshape(rows, -1)


def _half(x: np.ndarray) -> Any:
    return x.astype(np.float16).astype(np.float64)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (8, 2), (6, 2), (5, 5), (14, 2)])
@pytest.mark.parametrize(("k_dim", "v_dim"), [(64, 64), (128, 128), (24, 16)])
def test_attention_is_exact_but_for_the_cache_in_halves(heads: int, kv_heads: int, k_dim: int, v_dim: int) -> None:
    case = Case(13, heads, kv_heads, k_dim, v_dim, 256)
    assert np.abs(case.run() - case.exact()).max() < 5e-6


def test_a_token_is_the_same_in_any_batch_cache_and_number_of_threads() -> None:
    case = Case(21, 8, 2, 64, 64, 256)
    whole = case.run()
    for threads in (1, 3):
        assert (case.run(threads=threads) == whole).all()
    assert (case.run(n_kv=512) == whole).all()
    for row in (0, 7, 20):
        assert (case.run(rows=slice(row, row + 1)) == whole[row]).all()


def test_a_row_that_sees_nothing_is_zero() -> None:
    case = Case(5, 8, 2, 64, 64, 256)
    case.visible[2] = False
    out = case.run()
    assert (out[2] == 0).all() and (out[[0, 1, 3, 4]] != 0).all()
