"""Drafters without a model: which state they keep, and for how long."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest

from paceline import LLM
from paceline.core.batch import Plan, Slice
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.draft.base import LookupDrafter, Proposal
from paceline.draft.lookahead import LookaheadDrafter
from paceline.draft.ngram import NGramDrafter
from paceline.draft.recycling import RecyclingDrafter
from paceline.draft.suffix import SuffixDrafter
from paceline.draft.text_index import Predictions

VOCAB = 50
TOKENS = [1, 2, 3, 4, 1, 2]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def drafting(seq_id: int) -> Slice:
    params = SamplingParams(max_tokens=9, prediction=(1, 2, 3))
    seq = SequenceState(seq_id, list(TOKENS), len(TOKENS), params, cached=len(TOKENS) - 1)
    return Slice(seq.view(), 1, 4)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    "made",
    [
        lambda: NGramDrafter("cpu"),
        lambda: SuffixDrafter("cpu"),
        lambda: RecyclingDrafter("cpu", VOCAB),
        lambda: LookaheadDrafter("cpu"),
        lambda: Predictions("cpu"),
    ],
)
def test_a_dropped_drafter_is_freed_at_once(made: Callable[[], LookupDrafter]) -> None:
    drafter = made()
    drafter.propose(Plan((drafting(0),)))
    assert drafter.states.keys() == {0}
    dropped = weakref.ref(drafter)
    del drafter
    assert dropped() is None


def test_forgetting_one_sequence_keeps_the_offers_of_others() -> None:
    class Counting(LookupDrafter):
        name = "counting"
        asked: list[int]

        def propose_one(self, item: Slice) -> Proposal:
            self.asked.append(item.seq.seq_id)
            return (7, 8), (-1, 0)

    drafter = Counting()
    drafter.asked = []
    drafter.lookup([drafting(0), drafting(1)])
    drafter.forget(0)
    drafter.propose(Plan((drafting(0), drafting(1))))
    assert drafter.asked == [0, 1, 0]


def test_wrong_parents_are_one_failure_and_nothing_of_them_is_kept(
    random_pair: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    class Backwards(LookupDrafter):
        name = "backwards"

        def propose_one(self, item: Slice) -> Proposal:
            return (7, 8), (1, -1)

    with LLM(random_pair[0], draft=Backwards()) as llm:
        (answer,) = llm.generate("The old house", SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(answer.token_ids) == 5 and answer.error is None
    logged = [record.getMessage() for record in caplog.records if record.levelno >= 40]
    assert any("drafting failed: a tree's parents must come before" in line for line in logged)
    assert not [line for line in logged if "forgetting" in line]
