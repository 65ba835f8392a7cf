"""Drafters asked for nothing do next to nothing: no new tensors, no ranking, no growing."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.core.batch import Plan, Slice
from paceline.draft.base import Drafter
from paceline.draft.ngram import NGramDrafter
from paceline.draft.recycling import Recycling, RecyclingDrafter
from paceline.draft.suffix import Suffix, SuffixDrafter
from support.draft_steps import request, run_step

VOCAB = 16


def counting(tokens: list[int]) -> torch.Tensor:
    """The next token is the last one plus one."""
    return torch.nn.functional.one_hot(torch.tensor((tokens[-1] + 1) % VOCAB), VOCAB).float()


@pytest.mark.parametrize("drafter", [NGramDrafter("cpu"), SuffixDrafter("cpu", VOCAB)])
def test_empty_trees_are_one_object(drafter: Drafter) -> None:
    seqs = [request([1, 2, 3], n) for n in range(3)]
    trees = drafter.propose(Plan(tuple(Slice(seq, 1, 0) for seq in seqs)))
    trees += drafter.propose(Plan((Slice(seqs[0], 1, 4),)))  # nothing is known of "3"
    assert [len(tree) for tree in trees] == [0] * 4
    assert len({id(tree) for tree in trees}) == 1


def test_recycling_ranks_seldom_while_nothing_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = RecyclingDrafter("cpu", VOCAB, Recycling(k=2))
    ranked: list[int] = []
    best = RecyclingDrafter._best

    def counted(self: RecyclingDrafter, logits: torch.Tensor) -> torch.Tensor:
        ranked.append(len(logits))
        return best(self, logits)

    monkeypatch.setattr(RecyclingDrafter, "_best", counted)
    seq = request([7])
    for _ in range(80):
        run_step(drafter, counting, [seq], [0])
    assert 8 <= len(ranked) <= 20
    ranked.clear()
    lengths = [len(run_step(drafter, counting, [seq], [3])[0].tree) for _ in range(10)]
    assert len(ranked) == 10 and lengths[-1] > 0, "what drafts learns from every step"


def test_suffix_takes_finished_outputs_in_when_it_is_asked() -> None:
    drafter = SuffixDrafter("cpu", VOCAB)
    seq = request([1, 2, 3])
    for _ in range(6):
        step = run_step(drafter, counting, [seq], [0])[0]
    out: Any = None
    drafter.observe([replace(step.commit, tokens=(), finish_reason="stop")], out)
    drafter.forget(0)
    assert len(drafter.memory().index) == 0, "nobody has asked"
    tree = drafter.propose(Plan((Slice(request([9, 3, 4], 1), 1, 3),)))[0]
    assert tree.tokens.tolist() == [5, 6, 7]
    assert drafter.stored_tokens == 9


def test_what_waits_to_be_taken_in_is_bounded() -> None:
    drafter = SuffixDrafter("cpu", VOCAB, Suffix(max_tokens=100))
    out: Any = None
    for number in range(640):
        seq = request([1, 2, 3], number)
        step = run_step(drafter, counting, [seq], [0])[0]
        drafter.observe([replace(step.commit, tokens=(), finish_reason="stop")], out)
        drafter.forget(number)
    assert sum(map(len, drafter.memory().waiting)) <= 100 + 64 * 4
    assert 90 <= drafter.stored_tokens <= 100
