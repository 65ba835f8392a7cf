"""Drafters with nothing to draft do almost no work: no new tensors, no top-k, no tree growth."""

import pytest
import torch

from paceline.core.batch import Plan, Slice
from paceline.draft.base import Drafter
from paceline.draft.ngram import NGramDrafter
from paceline.draft.recycling import Recycling, RecyclingDrafter
from paceline.draft.suffix import SuffixDrafter
from support.draft_steps import request, run_step

VOCAB = 16


def counting(tokens: list[int]) -> torch.Tensor:
    """The next token is the last one plus one."""
    return torch.nn.functional.one_hot(torch.tensor((tokens[-1] + 1) % VOCAB), VOCAB).float()


@pytest.mark.parametrize("drafter", [NGramDrafter("cpu"), SuffixDrafter("cpu")])
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
