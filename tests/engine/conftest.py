"""Engines without a thread: a test steps them itself, so that every interleaving can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from expertserve.engine.draft import DraftMode, scratch_cells
from expertserve.engine.engine import Engine
from expertserve.kv.cache import KVCells
from tests.engine.fakes import HashForward, Oracle, PieceTokenizer


@dataclass
class Rig:
    """An engine with what it runs on and what it must compute."""

    engine: Engine
    forward: HashForward
    oracle: Oracle


MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig() -> MakeRig:
    def make(
        *,
        parallel: int = 8,
        context: int = 256,
        chunk: int = 32,
        cells: int = 2048,
        max_rows: int = 64,
        max_outputs: int | None = None,
        state_slots: int = 0,
        draft: DraftMode = "off",
        draft_tokens: int = 0,
        slowdown: float = 0.0,
    ) -> Rig:
        forward = HashForward(
            max_rows=max_rows,
            kv_cells=cells + scratch_cells(parallel, draft_tokens),
            max_outputs=max_outputs,
            state_slots=state_slots,
        )
        tokenizer = PieceTokenizer()
        engine = Engine(
            forward,
            tokenizer,
            parallel=parallel,
            context=context,
            chunk=chunk,
            kv_cells=KVCells(cells),
            draft=draft,
            draft_tokens=draft_tokens,
            slowdown=slowdown,
        )
        return Rig(engine, forward, Oracle(tokenizer, engine.context, recurrent=state_slots > 0))

    return make
