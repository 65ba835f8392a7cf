"""A long text is indexed in parts, a bounded number of tokens per step, until it is complete."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.core.batch import Plan, Slice
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.draft.ngram import NGram, NGramDrafter
from paceline.draft.suffix import SuffixDrafter
from paceline.draft.text_index import MAX_INDEXED_PER_STEP, IndexedDrafter, Predictions

VOCAB, LONG = 500, 8 * MAX_INDEXED_PER_STEP
DRAFTERS: list[Callable[[], IndexedDrafter]] = [
    lambda: NGramDrafter("cpu"),
    lambda: NGramDrafter("cpu", NGram(source="prompt")),
    lambda: SuffixDrafter("cpu"),
]


@dataclass
class Watched(list[int]):
    """Tokens that count how many of them are read at once."""

    slices: list[int] = field(default_factory=list)

    def __init__(self, tokens: Any) -> None:
        super().__init__(tokens)
        self.slices = []

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(index, slice):
            self.slices.append(len(found))
        return found

    def most(self) -> int:
        """The largest number of tokens read at once since the last call."""
        most, self.slices = max(self.slices, default=0), []
        return most


def text(length: int, seed: int = 0) -> list[int]:
    draws = random.Random(seed)
    return [int(VOCAB * draws.random() ** 3) for _ in range(length)]


def request(tokens: list[int], seq_id: int = 0, **params: Any) -> SequenceState:
    seq = SequenceState(seq_id, tokens, len(tokens), SamplingParams(max_tokens=99, **params))
    seq.cached = len(tokens) - 1
    return seq


def propose(drafter: Any, *seqs: SequenceState, scheduled: int = 1, length: int = 8) -> list[Any]:
    trees = drafter.propose(Plan(tuple(Slice(seq, scheduled, length) for seq in seqs)))  # type: ignore[arg-type]
    return [(tree.tokens.tolist(), tree.parents) for tree in trees]


@pytest.mark.parametrize("made", DRAFTERS)
def test_a_prompt_whose_prefix_is_cached(made: Callable[[], IndexedDrafter]) -> None:
    """Nothing is prefilled, so the first lookups take it in; then drafts are those of a drafter
    that has read all of it at once."""
    drafter, whole = made(), made()
    tokens = text(LONG)
    tokens += tokens[5000:5020]  # how the middle went on is known as soon as it is in
    seq = request(Watched(tokens))
    for _ in range(-(-len(tokens) // MAX_INDEXED_PER_STEP)):
        drafts = propose(drafter, seq)
        assert seq.tokens.most() <= MAX_INDEXED_PER_STEP + 100  # type: ignore[attr-defined]
    assert drafts[0][0][:8] == tokens[5020:5028]
    for seq_id in range(1, 8):
        other = request(tokens + text(12, seq_id) + tokens[: seq_id * 900], seq_id)
        while drafter_behind(drafter, other):
            found = propose(drafter, other)
        read_at_once(whole, other)
        assert propose(drafter, other) == propose(whole, other)
        drafter.forget(seq_id), whole.forget(seq_id)
    assert found[0][0]


def drafter_behind(drafter: IndexedDrafter, seq: SequenceState) -> bool:
    return (
        len(seq.tokens) - drafter.states.get_or_make(seq.view(), drafter.new_state).open_tokens > 64
    )


def read_at_once(drafter: IndexedDrafter, seq: SequenceState) -> None:
    index = drafter.states.get_or_make(seq.view(), drafter.new_state)
    index.extend(seq.tokens[index.open_tokens :])


@pytest.mark.parametrize("made", DRAFTERS)
def test_a_prompt_is_taken_in_while_it_is_prefilled(made: Callable[[], IndexedDrafter]) -> None:
    drafter = made()
    tokens = text(LONG)
    seq = request(Watched(tokens + tokens[100:110]))
    for seq.cached in range(0, LONG - 512, 512):
        assert propose(drafter, seq, scheduled=512, length=0) == [([], ())]
        assert seq.tokens.most() <= MAX_INDEXED_PER_STEP + 100  # type: ignore[attr-defined]
    seq.cached = len(seq.tokens) - 1
    assert propose(drafter, seq)[0][0][:8] == tokens[110:118]
    unwanted = request(Watched(text(3000)), 1, drafter="none")
    for unwanted.cached in range(0, 2048, 512):
        propose(drafter, unwanted, scheduled=512, length=0)
    assert unwanted.tokens.most() <= 16  # type: ignore[attr-defined]


@pytest.mark.parametrize("made", DRAFTERS)
def test_a_long_text_holds_up_no_other(made: Callable[[], IndexedDrafter]) -> None:
    drafter = made()
    long, short = request(text(LONG)), request(text(200, 1) * 2, 1)
    drafts = propose(drafter, long, short)
    assert drafts[1][0][:8] == short.tokens[:8]


@pytest.mark.parametrize("made", DRAFTERS)
def test_a_step_takes_in_a_share_of_all_texts(made: Callable[[], IndexedDrafter]) -> None:
    """However many long texts are not indexed yet: no step indexes all of them."""
    drafter = made()
    seqs = [request(Watched(text(LONG, number)), number) for number in range(4)]
    propose(drafter, *seqs)
    assert sum(drafter.states[seq.seq_id].open_tokens for seq in seqs) == MAX_INDEXED_PER_STEP


def test_a_long_prediction_enters_in_parts() -> None:
    predictions, drafter = Predictions("cpu"), NGramDrafter("cpu")
    predicted = text(3 * MAX_INDEXED_PER_STEP)
    seq = request(predicted[-30:-10], prediction=tuple(predicted))
    plan = Plan((Slice(seq, 1, 8),))  # type: ignore[arg-type]
    for step in range(1, 4):
        (tree,) = predictions.propose_with(drafter, plan)
        assert len(predictions.states[0]) == 16 + step * MAX_INDEXED_PER_STEP
    assert tree.tokens.tolist()[:8] == predicted[-10:-2]
