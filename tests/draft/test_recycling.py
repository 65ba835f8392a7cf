"""The matrix stores the target's latest top-k of every row, and trees are read from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.draft.recycling import Recycling, RecyclingDrafter
from paceline.draft.trees.shape import Shape
from paceline.drafters import parse_draft
from paceline.errors import ConfigError
from support.draft_steps import paths_of, request, run_step

VOCAB = 53
TABLE = torch.rand(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))


def markov(tokens: list[int]) -> torch.Tensor:
    """Logits that depend only on the last token."""
    return TABLE[tokens[-1]]


def candidates(token: int, k: int) -> list[int]:
    return TABLE[token].topk(k).indices.tolist()


def shared(drafter: RecyclingDrafter) -> Any:
    """The matrix of requests without an adapter."""
    return drafter._matrix(None)


def test_a_tree_is_the_lists_of_its_tokens() -> None:
    drafter = RecyclingDrafter("cpu", VOCAB, Recycling(k=3, nodes=12))
    matrix = shared(drafter)
    for token in range(VOCAB):
        matrix.candidates[token] = torch.tensor(candidates(token, 3))
    matrix.known_tokens.update(range(VOCAB))
    seq = request([7])
    tree = run_step(drafter, markov, [seq], [8])[0].tree
    shape = drafter._shape
    assert tree.parents == shape.parents and len(tree) == 12 == drafter.max_nodes(8)
    paths = [[7, *path] for path in paths_of(tree)]
    for path, rank in zip(paths, shape.ranks, strict=True):
        assert path[-1] == candidates(path[-2], 3)[rank]
    assert shape.branches and shape.depth > 3, "imbalanced: likely branches are longer"


def test_rejected_nodes_are_learnt_from() -> None:
    """Top-k lists of all nodes are stored, also of nodes off the accepted path."""
    drafter = RecyclingDrafter("cpu", VOCAB, Recycling(k=2, nodes=2))
    drafter._shape = Shape.branching((2,))
    seq = request([7])
    run_step(drafter, markov, [seq], [1])
    seq.tokens[-1] = 7  # known by now; its two candidates are in the next tree
    step = run_step(drafter, markov, [seq], [1])[0]
    assert step.tree.tokens.tolist() == candidates(7, 2)
    matrix = shared(drafter)
    for token in (7, *candidates(7, 2)):
        assert matrix.candidates[token].tolist() == candidates(token, 2)


def test_nothing_is_proposed_below_an_unknown_token() -> None:
    drafter = RecyclingDrafter("cpu", VOCAB)
    seq = request([7])
    first = run_step(drafter, markov, [seq], [4])[0]
    assert len(first.tree) == 0
    seq.tokens[-1] = 7
    assert len(run_step(drafter, markov, [seq], [4])[0].tree) > 0
    seq.tokens[-1] = 7
    assert len(run_step(drafter, markov, [seq], [0])[0].tree) == 0, "plain decoding when asked to"


def test_a_known_text_is_accepted_whole() -> None:
    """Where the next token depends on the last one alone, rank 0 is right once it was seen."""
    drafter = RecyclingDrafter("cpu", VOCAB, Recycling(k=2, nodes=6))
    seq = request([7])
    lengths = [len(run_step(drafter, markov, [seq], [3])[0].commit.tokens) for _ in range(60)]
    assert lengths[0] == 1 and lengths[-20:] == [4] * 20


def test_lengths_of_a_batch_cut_the_same_shape() -> None:
    drafter = RecyclingDrafter("cpu", VOCAB, Recycling(k=4, nodes=16))
    seqs = [request([7], n) for n in range(5)]
    for _ in range(3):
        for seq in seqs:
            seq.tokens[-1] = 7
        steps = run_step(drafter, markov, seqs, [0, 1, 2, 5, 9])
    sizes = [len(step.tree) for step in steps]
    assert sizes == [drafter.max_nodes(n) for n in (0, 1, 2, 5, 9)]
    assert sizes == sorted(sizes) and sizes[0] == 0 and sizes[-1] == 16
    assert [max(step.tree.depths, default=0) for step in steps][:4] == [0, 1, 2, 5]


@pytest.mark.parametrize("share", [True, False])
def test_a_request_starts_warm_only_if_the_matrix_is_shared(share: bool) -> None:
    drafter = RecyclingDrafter("cpu", VOCAB, Recycling(share=share))
    run_step(drafter, markov, [request([7], 0)], [4])
    tree = run_step(drafter, markov, [request([7], 1)], [4])[0].tree
    assert (len(tree) > 0) is share
    drafter.forget(0)
    drafter.forget(5)
    again = run_step(drafter, markov, [request([7], 0)], [4])[0].tree
    assert (len(again) > 0) is share


def test_own_matrices_in_one_batch() -> None:
    """Each sequence learns from its own rows, whatever stands beside it."""
    drafter = RecyclingDrafter("cpu", VOCAB, Recycling(k=2, share=False))
    alone = RecyclingDrafter("cpu", VOCAB, Recycling(k=2, share=False))
    seqs, lonely = [request([7], 0), request([9], 1)], request([9], 1)
    for _ in range(30):
        together = run_step(drafter, markov, seqs, [3, 4])[1]
        single = run_step(alone, markov, [lonely], [4])[0]
        assert together.tree.tokens.tolist() == single.tree.tokens.tolist()
        assert together.commit.tokens == single.commit.tokens


def test_prompt_chunks_and_trees_of_others() -> None:
    """A chunk has no logits; of a tree that is not ours only the last token's row is learnt."""
    drafter = RecyclingDrafter("cpu", VOCAB, Recycling(k=2))
    matrix = shared(drafter)
    seq = request([1, 2, 3, 4])
    seq.cached = 0
    assert len(drafter.propose(Plan((Slice(seq, 2, 4),)))[0]) == 0
    drafter.observe([Commit(0, (), scheduled=2)], ModelOutput(torch.zeros(0, VOCAB)))
    assert not matrix.known_tokens
    seq.cached = 3
    drafter.propose(Plan((Slice(seq, 1, 4),)))
    logits = torch.stack([TABLE[4], TABLE[5], TABLE[6]])
    commit = Commit(0, (9,), drafted=2, scheduled=1, last=4, position=3, choices=(9, 9, 9))
    drafter.observe([commit], ModelOutput(logits))
    assert matrix.known_tokens == {4}
    assert matrix.candidates[4].tolist() == candidates(4, 2)


def test_rehearsal_leaves_no_trace() -> None:
    drafter = RecyclingDrafter("cpu", VOCAB)
    matrix = shared(drafter)
    before = matrix.candidates.clone()
    drafter.warm_up(3)
    assert matrix.candidates.equal(before) and not matrix.known_tokens
    assert (drafter.passes(0), drafter.passes(3)) == (0, 1)


@pytest.mark.parametrize("k, nodes", [(0, 8), (8, 0)])
def test_sizes_that_make_no_tree(k: int, nodes: int) -> None:
    with pytest.raises(ConfigError, match="recycling"):
        RecyclingDrafter("cpu", VOCAB, Recycling(k=k, nodes=nodes))


@pytest.mark.parametrize("options", ["share=2", "k=many", "size=3"])
def test_options_that_make_no_sense(options: str) -> None:
    with pytest.raises(ConfigError, match=options.partition("=")[0]):
        parse_draft(f"recycling:{options}")
