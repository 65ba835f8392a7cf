"""Driving an engine: who is sent when, what is recorded, and what is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline import LLM, PacelineError
from paceline.core.batch import Commit
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.engine import driver
from paceline.engine.clock import PHASES
from paceline.engine.driver import Drive, DrivenStep, StandstillError, StepTotals, sequence
from support.simulated_clock import Clock
from support.tiny_models import TinyPair

PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9, 10, 11], [12, 13, 14, 15, 16], [20, 21]]


@pytest.fixture(scope="module")
def llm(tiny_pair: TinyPair) -> LLM:
    return LLM(tiny_pair.target, tiny_pair.draft, dtype="float32", draft_length=3)


def requests(tokens: int = 12) -> list[SequenceState]:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return [sequence(prompt, params) for prompt in PROMPTS]


@pytest.mark.parametrize("clients", [None, 1, 3])
def test_the_texts_are_those_of_generate(llm: LLM, clients: int | None) -> None:
    seqs = requests()
    drive = Drive(llm.engine, seqs, clients).run()
    wanted = llm.generate(PROMPTS, seqs[0].params)
    assert [seq.tokens[seq.prompt_length :] for seq in seqs] == [one.token_ids for one in wanted]
    assert drive.tokens == 48 and not drive.busy and not llm.engine.has_work
    assert max(len(step.commits) for step in drive.steps) == (clients or 4)


def test_what_was_counted_step_by_step_is_what_the_requests_counted(llm: LLM) -> None:
    drive = Drive(llm.engine, requests(), 1).run()
    every, counts = StepTotals.of(drive.steps), drive.counts
    assert (every.tokens, every.drafted, every.accepted) == (48, counts.drafted, counts.accepted)
    commits = [commit for step in drive.steps for commit in step.commits]
    positions = range(max(commit.reached for commit in commits))
    assert counts.reached_at == [sum(n < c.reached for c in commits) for n in positions]
    assert counts.accepted_at == [sum(n < len(c.path) for c in commits) for n in positions]
    assert counts.target_steps + counts.accepted == drive.tokens
    reading, decoding = (
        StepTotals.of(step for step in drive.steps if step.decodes is own) for own in (False, True)
    )
    assert reading.steps == len(PROMPTS)
    both = reading + decoding
    assert both.seconds == pytest.approx(every.seconds)
    assert replace(both, seconds=every.seconds) == every


def test_every_step_has_its_own_seconds(llm: LLM) -> None:
    clock = llm.engine.clock
    before = dict(clock.seconds)
    with Drive(llm.engine, requests(), 1) as drive:
        step = drive.step()
        drive.step()
        assert set(step.seconds) == set(PHASES) and step.seconds["target"] > 0
    spent = {phase: seconds - before[phase] for phase, seconds in clock.seconds.items()}
    assert StepTotals.of(drive.steps).seconds == pytest.approx(spent)


def test_what_is_unfinished_is_dropped(llm: LLM) -> None:
    with pytest.raises(KeyboardInterrupt), Drive(llm.engine, requests(), 2) as drive:
        drive.step()
        raise KeyboardInterrupt
    assert not drive.busy and not llm.engine.has_work
    assert llm.engine.cache.pool.available == llm.engine.cache.pool.total


def test_one_may_be_dropped_and_the_next_is_sent(llm: LLM) -> None:
    with Drive(llm.engine, requests(), 1) as drive:
        drive.step()
        drive.drop(drive.seqs[0].seq_id)
        assert drive.step().commits[0].seq_id == drive.seqs[1].seq_id


class Scripted:
    """Stands for an engine: a request needs ``steps`` steps, each of a second."""

    def __init__(self, clock: Clock, steps: int = 2) -> None:
        self.clock, self.steps, self.seqs = self, steps, dict[int, SequenceState]()
        self.time, self.diary = clock, list[tuple[float, Sequence[int]]]()
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def add(self, seq: SequenceState) -> None:
        self.seqs[seq.seq_id], seq.queued = seq, self.time.now

    def abort(self, seq_id: int) -> None:
        self.seqs.pop(seq_id, None)

    def step(self) -> list[Commit]:
        self.diary.append((self.time.now, [seq.tokens[0] for seq in self.seqs.values()]))
        self.time.now += 1
        commits = []
        for seq in list(self.seqs.values()):
            seq.tokens.append(0)
            ended = "length" if seq.generated == self.steps else None
            commits.append(Commit(seq.seq_id, (0,), scheduled=1, finish_reason=ended))
            if ended:
                self.abort(seq.seq_id)
        return commits


def test_a_client_sends_its_next_request_when_one_ends() -> None:
    engine: Any = Scripted(Clock())
    params = [SamplingParams(max_tokens=2) for _ in range(4)]
    seqs = [sequence([n], one) for n, one in enumerate(params)]
    seqs[0].tokens.append(0)  # it ends a step earlier
    assert len(Drive(engine, seqs, clients=2).run().steps) == 4
    assert [running for _, running in engine.diary] == [[0, 1], [1, 2], [2, 3], [3]]


def test_a_clock_runs_only_while_its_drive_works(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(driver.time, "perf_counter", clock)
    one, two = (Drive(Scripted(clock), [sequence([1], SamplingParams())]) for _ in range(2))  # type: ignore[arg-type]
    while one.busy or two.busy:
        one.step()
        two.step()
    assert clock.now == 4 and one.seconds == two.seconds == 2


def test_a_request_that_fails_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = Scripted(Clock())
    seq = sequence([1], SamplingParams())
    failed = Commit(seq.seq_id, (), finish_reason="error", error="no distribution")
    monkeypatch.setattr(engine, "step", lambda: [failed])
    with pytest.raises(PacelineError, match=r"nothing can be measured.*: no distribution"):
        Drive(engine, [seq]).run()
    monkeypatch.setattr(engine, "step", list)
    with pytest.raises(StandstillError, match="committed no token"):
        Drive(engine, [seq]).run()
    assert not engine.seqs, "what it had begun is dropped"


def test_who_reads_a_prompt_does_not_decode() -> None:
    decoding, reading = Commit(1, (5,), scheduled=1), Commit(2, (), scheduled=7)
    assert DrivenStep([decoding]).decodes
    assert not DrivenStep([decoding, reading]).decodes
    assert not DrivenStep([]).decodes
