"""Honest draws follow what they declare in every kind of tree; others do not."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from paceline.core.tree import Draw, TokenTree
from paceline.lab.certify.chisquare import RankCounts
from paceline.lab.certify.draws import Examples, record

DISTRIBUTION = torch.softmax(torch.arange(8) / 2.0, -1)


class OneSlice:
    slices = (SimpleNamespace(seq=SimpleNamespace(tokens=[1, 2])),)


PLAN: Any = OneSlice()


def samples(
    count: int, drawn: torch.Tensor, declared: torch.Tensor, siblings: int
) -> Iterator[TokenTree]:
    """Trees of siblings without replacement, or of one token, from the distribution ``drawn``,
    which declare another one."""
    generator = torch.Generator().manual_seed(0)
    draw = Draw.IID if siblings == 1 else Draw.WITHOUT_REPLACEMENT
    for _ in range(count):
        tokens = torch.multinomial(drawn, siblings, generator=generator)
        yield TokenTree(tokens, (-1,) * siblings, draw, declared.repeat(siblings, 1))


def recorded(drawn: torch.Tensor, declared: torch.Tensor, siblings: int) -> RankCounts:
    ranks = RankCounts()
    for tree in samples(600, drawn, declared, siblings):
        record(ranks, {}, PLAN, [tree])
    assert ranks.total == 600 * siblings
    return ranks


def test_correct_draws_pass() -> None:
    for siblings in (1, 2, 3):
        assert recorded(DISTRIBUTION, DISTRIBUTION, siblings).test().p_value > 1e-3


def test_draws_at_another_temperature_fail() -> None:
    for siblings in (1, 2):
        ranks = recorded(DISTRIBUTION.square(), DISTRIBUTION, siblings)
        assert ranks.test().p_value < 1e-6


def test_impossible_draws_are_counted() -> None:
    declared = DISTRIBUTION.clone()
    declared[7] = 0.0
    assert recorded(DISTRIBUTION, declared / declared.sum(), 1).impossible > 100


def test_siblings_that_used_up_the_distribution_are_not_counted() -> None:
    ranks, certain = RankCounts(), torch.zeros(2, 8)
    certain[:, 3] = 1.0
    record(
        ranks,
        {},
        PLAN,
        [TokenTree(torch.tensor([3, 5]), (-1, -1), Draw.WITHOUT_REPLACEMENT, certain)],
    )
    assert ranks.total == 1 and ranks.impossible == 0


def test_chosen_drafts_have_nothing_to_test() -> None:
    ranks, examples = RankCounts(), Examples()
    record(ranks, examples, PLAN, [TokenTree(torch.tensor([3]), (-1,))])
    assert ranks.total == 0 and set(examples) == {Draw.POINT}


def test_the_largest_tree_of_each_kind_is_kept() -> None:
    ranks, examples = RankCounts(), Examples()
    (tree,) = samples(1, DISTRIBUTION, DISTRIBUTION.clone(), 1)
    record(ranks, examples, PLAN, [tree])
    assert tree.q is not None
    tree.q.zero_()  # drafters use their memory again
    for siblings in (3, 2):
        record(ranks, examples, PLAN, list(samples(1, DISTRIBUTION, DISTRIBUTION, siblings)))
    assert set(examples) == {Draw.IID, Draw.WITHOUT_REPLACEMENT}
    tokens, tree = examples[Draw.IID]
    assert tokens == (1, 2) and tree.q is not None
    assert torch.equal(tree.q[0], DISTRIBUTION)
    assert len(examples[Draw.WITHOUT_REPLACEMENT][1]) == 3
