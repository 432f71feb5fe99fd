"""No forward escapes the clock: every kind of forward of every registered family opens exactly one step."""

from __future__ import annotations

import pytest

from expertserve.experts.stats import ExpertStats
from expertserve.experts.step import StepError
from expertserve.gguf.file import GGUFFile
from expertserve.models.registry import architectures, load_model
from tests.models.build import make_batch, open_forward
from tests.parity.oracle import ORACLE
from tests.parity.test_keystone import joint_batch

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not ORACLE.is_dir(), reason="needs the oracle fixtures beside the checkout"),
]


def fixture_of(architecture: str) -> str:
    """A file of that architecture, found by what the files say of themselves."""
    for path in sorted(ORACLE.glob("*/model-*.gguf")):
        if GGUFFile.open(path).architecture == architecture:
            return str(path.relative_to(ORACLE))
    raise AssertionError(f"no fixture of {architecture}: every family that is served needs one")


@pytest.mark.parametrize("budget", ["auto", "50%"])
@pytest.mark.parametrize("architecture", architectures())
def test_every_forward_is_one_step(architecture: str, budget: str) -> None:
    path = ORACLE / fixture_of(architecture)
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
