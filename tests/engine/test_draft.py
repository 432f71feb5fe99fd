"""Drafts: how many are right, what an iteration costs in steps, and when drafting turns itself off."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from expertserve.engine.draft import TRIAL
from expertserve.engine.request import SamplingParams
from expertserve.errors import ConfigError, ExpertReadError
from expertserve.experts.trial import Trial
from expertserve.models.batch import Batch
from tests.engine.conftest import MakeRig
from tests.engine.fakes import Client, assert_got, assert_nothing_leaks, run_to_end
from tests.engine.test_batching import prompt

GREEDY = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)


@pytest.mark.parametrize("states", [0, 40])
def test_right_drafts_save_forwards_of_the_target(make_rig: MakeRig, states: int) -> None:
    rig = make_rig(parallel=2, state_slots=states, draft="mtp-always", draft_tokens=3)
    clients = [Client(str(i), prompt(i, 40), GREEDY) for i in range(2)]
    for client in clients:
        rig.engine.submit(client.request)
    run_to_end(rig.engine)
    for client in clients:
        assert_got(client, rig.oracle.expect(client.request.prompt, GREEDY))
    counts = rig.engine.snapshot()
    # The fake is wrong one time in four, so of three drafts 0.75 + 0.75^2 + 0.75^3 = 1.73 are expected to be taken.
    assert 1.4 < 3 * counts["drafts_accepted"] / counts["drafts_judged"] < 2.1
    decodes = [rows for rows, decode, _ in rig.forward.batches if decode]
    assert len(decodes) < 60 and max(decodes[1:]) == 8
    assert_nothing_leaks(rig.engine)


def test_an_iteration_is_one_step_a_draft_and_one_to_judge_them(make_rig: MakeRig) -> None:
    rig = make_rig(parallel=1, draft="mtp-always", draft_tokens=3)
    client = Client("a", prompt(1, 20), GREEDY)
    rig.engine.submit(client.request)
    rig.engine.tick()
    assert (len(rig.forward.batches), rig.forward.draft_batches) == (1, [])
    rig.engine.tick()
    assert (rig.forward.batches[1:], rig.forward.draft_batches) == ([(4, 4, 4)], [20, 1, 1])
    run_to_end(rig.engine)
    # What was accepted is given to the draft layer again, with the target's states: up to four tokens.
    assert {rows for rows in rig.forward.draft_batches[3::3]} <= {1, 2, 3, 4}


def test_a_long_prompt_fills_the_draft_layer_chunk_by_chunk(make_rig: MakeRig) -> None:
    rig = make_rig(parallel=1, chunk=32, draft="mtp-always", draft_tokens=2)
    client = Client("a", prompt(1, 100), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    rig.engine.submit(client.request)
    run_to_end(rig.engine)
    assert rig.forward.draft_batches[:4] == [32, 32, 32, 4]
    assert_got(client, rig.oracle.expect(client.request.prompt, client.request.params))


def test_no_more_is_drafted_than_an_answer_may_have(make_rig: MakeRig) -> None:
    rig = make_rig(parallel=1, draft="mtp-always", draft_tokens=4)
    for count in (1, 2, 3, 7):
        client = Client(str(count), prompt(count, 10), SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        rig.engine.submit(client.request)
        run_to_end(rig.engine)
        assert len(client.tokens) == count
        assert_got(client, rig.oracle.expect(client.request.prompt, client.request.params))


def test_sampled_tokens_are_those_without_drafts(make_rig: MakeRig) -> None:
    params = SamplingParams(temperature=0.4, top_k=12, seed=11, max_tokens=150, ignore_eos=True)
    rig = make_rig(parallel=1, draft="mtp-always", draft_tokens=3)
    client = Client("a", prompt(2, 30), params)
    rig.engine.submit(client.request)
    run_to_end(rig.engine)
    assert_got(client, rig.oracle.expect(client.request.prompt, params))
    assert rig.engine.snapshot()["drafts_accepted"] > 10


class Cycle:
    """Lets through the tokens whose remainder by 3 is the number of those before, by 3; ends after 40."""

    def __init__(self) -> None:
        self.count = 0

    def start(self) -> Cycle:
        return Cycle()

    @property
    def ended(self) -> bool:
        return self.count == 40

    def mask(self) -> NDArray[np.bool_]:
        return np.arange(97) % 3 == self.count % 3

    def accept(self, token_id: int, /) -> None:
        assert self.mask()[token_id]
        self.count += 1


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_constraint_holds_under_drafts_and_gives_the_tokens_without(make_rig: MakeRig, drafts: int) -> None:
    params = SamplingParams(temperature=0, constraint=Cycle(), ignore_eos=True, max_tokens=100)
    rig = make_rig(parallel=1, draft="mtp-always" if drafts else "off", draft_tokens=drafts)
    client = Client("a", prompt(4, 30), params)
    rig.engine.submit(client.request)
    run_to_end(rig.engine)
    expected = rig.oracle.expect(client.request.prompt, replace(params, max_tokens=40))
    assert (client.tokens, client.text) == (expected.tokens, expected.text)
    assert [token % 3 for token in client.tokens] == [i % 3 for i in range(40)]
    assert client.finish is not None and client.finish.reason == "stop"
    assert not drafts or rig.engine.snapshot()["drafts_accepted"] > 3
    assert_nothing_leaks(rig.engine)


def test_a_draft_that_fails_costs_no_token(make_rig: MakeRig) -> None:
    rig = make_rig(parallel=1, draft="mtp-always", draft_tokens=2)

    def fault(batch: Batch) -> None:
        if len(rig.forward.draft_batches) > 5 and len(batch.tokens) == 3:  # the judging of two drafts
            raise ExpertReadError("an expert could not be read")

    rig.forward.fault = fault
    client = Client("a", prompt(3, 10), GREEDY)
    rig.engine.submit(client.request)
    run_to_end(rig.engine)
    assert_got(client, rig.oracle.expect(client.request.prompt, GREEDY))
    assert_nothing_leaks(rig.engine)


@pytest.mark.parametrize(("with_drafts", "without", "active"), [(1.0, 1.5, True), (1.5, 1.0, False), (1.0, 1.0, False)])
def test_drafting_stays_on_only_where_it_wins_and_is_tried_again(
    with_drafts: float, without: float, active: bool
) -> None:
    trial = Trial("auto", TRIAL)
    seen = []
    for _ in range(12 * 7):
        seen.append(trial.active)
        trial.add(with_drafts if trial.active else without)
    assert set(seen) == {True, False}
    assert trial.active is active and trial.verdict.startswith("on, 1.50x" if active else "off, ")
    verdicts = []
    for _ in range(512 + 12 * 7):
        trial.add(with_drafts if not trial.active else without)  # now it is the other way round
        verdicts.append(trial.verdict)
    assert with_drafts == without or verdicts[-1].startswith("off" if active else "on")


def test_a_trial_that_does_not_measure_never_ends() -> None:
    trial = Trial("on", TRIAL)
    for _ in range(5000):
        trial.add(9.0)
    assert trial.active and trial.verdict == "on"


def test_more_drafts_than_a_step_has_rows_are_refused(make_rig: MakeRig) -> None:
    with pytest.raises(ConfigError, match="parallel is 16; it must be 1 to 12, the rows of one step"):
        make_rig(parallel=16, draft="mtp", draft_tokens=4)
