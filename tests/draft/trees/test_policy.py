"""The most nodes of a tree for each draft length."""

from __future__ import annotations

import pytest
import torch

from paceline.core.batch import Slice
from paceline.core.costs import CostCurve, DrafterCosts
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.draft.trees.policy import Policy
from paceline.draft.trees.shape import Shape


@pytest.mark.parametrize(
    ("nodes", "width", "sizes"),
    [(16, 4, [0, 4, 8, 12, 16, 16]), (6, 4, [0, 4, 6, 6, 6, 6]), (64, 4, [0, 8, 16, 24, 32, 40])],
)
def test_shallow_trees_have_fewer_nodes(nodes: int, width: int, sizes: list[int]) -> None:
    """Otherwise all draft lengths would cost the same in a full batch."""
    policy = Policy(nodes=nodes, width=width)
    assert [policy.max_nodes(length) for length in range(6)] == sizes
    assert policy.max_nodes(64) == nodes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_have_no_more_nodes_than_were_announced(temperature: float) -> None:
    """Drawn ones are static; of greedy ones the nodes that stay are chosen when they have grown."""
    policy = Policy(nodes=16)
    seq = SequenceState(0, [1, 2], 2, SamplingParams(temperature=temperature), cached=1)
    for length in (1, 2, 3):
        tree = policy.new_tree(Slice(seq, 1, length), torch.device("cpu"))
        size = tree.growth_size()
        nodes = size[2] if size else len(tree.shape)  # type: ignore[attr-defined]
        assert 3 * length <= nodes <= policy.max_nodes(length)


def test_chains_and_static_trees_are_cut() -> None:
    assert [Policy().max_nodes(n) for n in (0, 1, 5)] == [0, 1, 5]
    branching = Policy(Shape.branching((2, 2, 1)))
    assert [branching.max_nodes(n) for n in range(5)] == [0, 2, 6, 10, 10]


def test_sequences_that_decode_together_share_out_the_nodes() -> None:
    """Each keeps one node per level; a number of nodes that the user chose is not shared."""
    shared, chosen = Policy(nodes=8, shared=True), Policy(nodes=8)
    assert [shared.max_nodes(n) for n in (1, 2, 4)] == [4, 8, 8]
    assert [shared.max_nodes(n, 4) for n in (1, 2, 4)] == [2, 2, 4]
    assert [chosen.max_nodes(n, 4) for n in (1, 2, 4)] == [4, 8, 8]
    costs = DrafterCosts(
        (0, 4, 8, 8, 8), (0, 1, 2, 3, 4), CostCurve((1,), (1.0,)), shares_nodes=True
    )
    assert costs.for_batch(4).nodes == (0, *(shared.max_nodes(n, 4) for n in range(1, 5)))
    assert costs.for_batch(1) is costs
