"""After a near tie the comparison goes on from the plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.core.params import SamplingParams
from paceline.core.sequence import DraftCounts
from paceline.engine.driver import StandstillError
from paceline.lab.certify.certificate import Evidence
from paceline.lab.certify.decoding import Difference, Start, decode, first_difference
from paceline.lab.certify.draws import DraftRecorder
from paceline.lab.certify.run import Certifier
from paceline.lab.report.document import table_of
from paceline.llm import LLM
from paceline.model.backends.base import NATIVE

Named = Sequence[tuple[str, Sequence[int]]]
PARAMS = SamplingParams(max_tokens=12)


def difference(at: int, gap: float) -> Difference:
    return Difference(at, 1, 2, gap, 0.1, False, (1.0, 1.0 + gap))


@pytest.fixture
def text(prompts: Named) -> Start:
    return Start(tuple(prompts[0][1]), PARAMS, name="one")


@pytest.mark.parametrize(("second", "ties", "bugs"), [(None, 1, 0), (0.05, 2, 0), (3.0, 1, 1)])
def test_text_after_a_tie_is_compared(
    on_reference: LLM,
    prompts: Named,
    text: Start,
    monkeypatch: pytest.MonkeyPatch,
    second: float | None,
    ties: int,
    bugs: int,
) -> None:
    """The first text differs at token 2 by a tie; later texts are given by ``second``."""
    llm = on_reference
    subject = Certifier(llm, prompts, PARAMS)
    ((plain, _),) = decode(llm.engine, [text], 0)
    given: list[tuple[int, ...]] = []

    def faked(
        engine, starts, draft_length=None, max_new_tokens=None
    ) -> list[tuple[Sequence[int], DraftCounts]]:
        given.extend(start.output for start in starts)
        tokens = list(plain)
        at = {0: 2, 3: 7}.get(len(starts[0].output))
        if at is not None and (at == 2 or second is not None):
            tokens[at] += 1
        return [(tuple(tokens), DraftCounts(drafted=8, accepted=4))]

    def explained(model, prompt, left, right, params) -> Difference | None:
        at = first_difference(left, right)
        if at is None:
            return None
        return difference(at, 0.0 if at == 2 else second or 0.0)

    monkeypatch.setattr("paceline.lab.certify.texts.decode", faked)
    monkeypatch.setattr("paceline.lab.certify.texts.explain", explained)
    check = subject.check_text("greedy", subject.mixed, text, plain)
    assert (len(check.ties), len(check.bugs)) == (ties, bugs)
    assert given[:2] == [(), plain[:3]]


def test_decoding_continues_given_output(llm: LLM, text: Start) -> None:
    """With penalties on the output: given tokens count as output, not as prompt."""
    params = SamplingParams(max_tokens=12, frequency_penalty=1.5)
    text = replace(text, params=params)
    ((whole, counts),) = decode(llm.engine, [text], 2)
    assert counts.drafted >= counts.accepted
    assert decode(llm.engine, [replace(text, output=whole[:5])], 0)[0][0] == whole
    assert decode(llm.engine, [text], 2, max_new_tokens=3)[0][0] == whole[:3]
    assert not llm.engine.has_work


def test_a_standstill_is_an_error(llm: LLM, text: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine, "step", list)
    with pytest.raises(StandstillError, match="committed no token"):
        decode(llm.engine, [text], 2)


def test_equal_rows_have_no_ties(
    llm: LLM, prompts: Named, text: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the native backend a row's bits depend on it alone, so that any difference is a bug."""
    if llm.target.backend.name != NATIVE:
        pytest.skip("the kernels are not in use")
    subject = Certifier(llm, prompts, PARAMS)
    ((plain, _),) = decode(llm.engine, [text], 0)
    other = (*plain[:-1], plain[-1] + 1), DraftCounts(drafted=8, accepted=4)
    at = len(plain) - 1
    monkeypatch.setattr("paceline.lab.certify.texts.decode", lambda *_: [other])
    monkeypatch.setattr("paceline.lab.certify.texts.explain", lambda *_: difference(at, 0.0))
    check = subject.check_text("greedy", subject.mixed, text, plain)
    assert (len(check.ties), len(check.bugs)) == (0, 1)
    evidence = Evidence(DraftRecorder())
    evidence.add(check)
    _, divergences, *_ = evidence.tables(())
    (row,) = table_of(divergences.rows, divergences.columns).rows
    assert row[-1] == "BUG", "it was a tie in the table, but a bug in the verdict"
