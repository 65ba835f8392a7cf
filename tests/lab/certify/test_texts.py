"""Texts are compared with plain decoding's up to their first difference, a near tie or a bug."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.core.params import SamplingParams
from paceline.core.sequence import DraftCounts
from paceline.engine.driver import StandstillError
from paceline.lab.certify.decoding import Difference, Start, decode
from paceline.lab.certify.run import Certifier
from paceline.llm import LLM
from paceline.model.backends.base import NATIVE

Named = Sequence[tuple[str, Sequence[int]]]
PARAMS = SamplingParams(max_tokens=12)


@pytest.fixture
def text(prompts: Named) -> Start:
    return Start(tuple(prompts[0][1]), PARAMS, name="one")


def compared(
    llm: LLM, prompts: Named, monkeypatch: pytest.MonkeyPatch, gap: float
) -> tuple[int, int, str]:
    """Ties, bugs and verdict for one text whose last token differs by this gap."""
    subject = Certifier(llm, prompts, PARAMS)
    plain = subject._plain_text("greedy", 0)
    other = (*plain[:-1], plain[-1] + 1), DraftCounts(drafted=8, accepted=4)
    found = Difference(len(plain) - 1, plain[-1], plain[-1] + 1, gap, 0.1)
    monkeypatch.setattr("paceline.lab.certify.run.decode", lambda *_: [other])
    monkeypatch.setattr("paceline.lab.certify.run.explain", lambda *_: found)
    subject.compare_text("greedy", 0, subject.mixed)
    check = subject.checks["greedy", subject.mixed]
    certificate = subject.certificate()
    (row,) = certificate.rows("divergences")
    assert row.is_bug == bool(check.bugs)
    assert (check.texts, check.tokens, check.drafted) == (1, len(plain) - 1, 8)
    return check.ties, check.bugs, certificate.verdict


def test_a_near_tie_is_counted_and_a_larger_gap_is_a_bug(
    on_reference: LLM, prompts: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    ties, bugs, verdict = compared(on_reference, prompts, monkeypatch, 0.05)
    assert (ties, bugs) == (1, 0) and verdict.startswith("NOT ENOUGH: ")
    monkeypatch.undo()
    ties, bugs, verdict = compared(on_reference, prompts, monkeypatch, 3.0)
    assert (ties, bugs) == (0, 1)
    assert verdict.startswith("NOT LOSSLESS: greedy: BUG: draft length 2, mixed batch: ")


def test_equal_rows_have_no_ties(llm: LLM, prompts: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the native backend a row's bits depend on it alone, so that any difference is a bug."""
    if llm.target.backend.name != NATIVE:
        pytest.skip("the kernels are not in use")
    assert compared(llm, prompts, monkeypatch, 0.0)[:2] == (0, 1)


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
