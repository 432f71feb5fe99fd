"""No forward escapes the clock: every kind of forward of every registered family opens exactly one step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from expertserve.experts.stats import ExpertStats
from expertserve.experts.step import StepError
from expertserve.gguf.file import GGUFFile
from expertserve.models.registry import architectures, load_model
from tests.made import MADE
from tests.models.build import make_batch, open_forward
from tests.parity.test_keystone import joint_batch

FAMILIES = [pytest.param(name, marks=() if name in MADE else pytest.mark.shared, id=name) for name in architectures()]


@pytest.fixture
def path_of(made: Callable[[str, str], Path], request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """A file of an architecture: a made-up model, or a fixture, found by what the files say of themselves."""

    def find(architecture: str) -> Path:
        if architecture in MADE:
            return made(architecture, "q8_0")
        oracle_dir: Path = request.getfixturevalue("oracle_dir")
        for path in sorted(oracle_dir.glob("*/model-*.gguf")):
            if GGUFFile.open(path).architecture == architecture:
                return path
        raise AssertionError(f"no model of {architecture}: every family that is served needs one")

    return find


@pytest.mark.parametrize("budget", ["auto", "50%"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_forward_is_one_step(architecture: str, budget: str, path_of: Callable[[str], Path]) -> None:
    path = path_of(architecture)
    drafts = load_model(GGUFFile.open(path)).drafts
    stats = ExpertStats(every=0, emit=lambda line: None)
    with open_forward(path, budget=budget, draft=drafts, cells=1536, stats=stats) as forward:
        lane = forward._lane
        tokens = [7, 8, 9, 10, 11, 12]
        forwards = {
            "prefill": lambda: forward(make_batch(tokens)),
            "prefill without outputs": lambda: forward(make_batch(tokens, all_outputs=False)),
            "decode": lambda: forward(make_batch([13], 6)),
            "verify": lambda: forward(make_batch([13, 14, 15], 6)),
            "replay": lambda: forward(make_batch(tokens[3:], 3)),
            "mixed": lambda: forward(joint_batch([6, 0], [[13], tokens])),
        }
        if drafts:
            forwards["draft"] = lambda: forward.draft(make_batch([8, 9], ahead=1), forward.hidden[:2].copy())
        for kind, run in forwards.items():
            before, target = lane.clock.steps, lane.clock.target_steps
            run()
            assert lane.clock.steps == before + 1 == stats.steps, kind
            assert lane.clock.target_steps == target + (kind != "draft"), kind
            with lane.step(decode_rows=1, prefill_rows=0), pytest.raises(StepError, match="a step was opened inside"):
                run()
            assert lane.clock.steps == before + 2, kind
            assert stats.draft_steps == lane.clock.steps - lane.clock.target_steps
