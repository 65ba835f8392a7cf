"""A row without a distribution ends its own request, and nobody else's; where it is not reached,
none."""

from __future__ import annotations

import pytest
import torch

from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.core.tree import Draw, TokenTree, chain_parents
from paceline.verify.rules import block, siblings
from paceline.verify.verifier import Verifier
from support.spans import judged

VOCAB = 8
NAN = float("nan")
REQUESTS = {
    "greedy": {},
    "greedy with a penalty": {"repetition_penalty": 1.2},
    "sampled": {"temperature": 1.0},
    "sampled with logprobs": {"temperature": 1.0, "logprobs": 2},
    "seeded": {"temperature": 1.0, "seed": 3},
    "seeded with logprobs": {"temperature": 1.0, "seed": 3, "logprobs": 2},
}
WITHOUT = Draw.WITHOUT_REPLACEMENT


def request(seq_id: int, params: dict) -> SequenceState:
    return SequenceState(seq_id, [1, 2, 3], 2, SamplingParams(**params))


def tree(draw: Draw, parents: tuple[int, ...]) -> TokenTree:
    """Tokens 0, 1, 2, ...; drawn from uniform distributions where they were drawn."""
    n = len(parents)
    q = None if draw is Draw.POINT else torch.full((n, VOCAB), 1 / VOCAB)
    return TokenTree(torch.arange(n), parents, draw, q)


def one_hot_logits(tokens: list[int]) -> torch.Tensor:
    """Rows that leave no doubt about their token."""
    return torch.full((len(tokens), VOCAB), -30.0).scatter(1, torch.tensor([tokens]).T, 30.0)


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("draw", [Draw.POINT, Draw.IID, WITHOUT], ids=str)
@pytest.mark.parametrize("name", REQUESTS)
def test_the_one_request_fails_and_the_others_go_on(name, draw, bad):
    trees = [TokenTree.empty(), tree(draw, chain_parents(2)), TokenTree.empty(), TokenTree.empty()]
    params = [REQUESTS[name], REQUESTS[name], REQUESTS[name], {"temperature": 0.7}]
    checks, row = [], 0
    for place, (own, asked) in enumerate(zip(trees, params, strict=True)):
        checks.append(judged(request(place, asked), row, own))
        row += checks[-1].verify_rows
    logits = one_hot_logits([5, 0, 1, 6, 7, 4])
    whole = Verifier(generator=torch.Generator().manual_seed(0))(logits, checks)
    assert [v.tokens for v in whole] == [(5,), (0, 1, 6), (7,), (4,)]
    logits[4] = bad
    got = Verifier(generator=torch.Generator().manual_seed(0))(logits, checks)
    assert got[2].error is not None and "\n" not in got[2].error
    assert got[2].tokens == () and got[2].path == ()
    assert [*got[:2], got[3]] == [*whole[:2], whole[3]]


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("draw", [Draw.POINT, Draw.IID, WITHOUT], ids=str)
def test_a_row_that_is_not_reached_does_not_matter(name, draw):
    check = judged(request(0, REQUESTS[name]), 0, tree(draw, chain_parents(3)))
    logits = one_hot_logits([0, 6, 2, 3])  # node 0 holds, node 1 does not
    logits[2:] = NAN
    (verdict,) = Verifier(generator=torch.Generator().manual_seed(0))(logits, [check])
    assert verdict.error is None
    assert (verdict.path, verdict.tokens) == ((0,), (0, 6))
    assert all(choice >= 0 for choice in verdict.choices), "drafters read them"


@pytest.mark.parametrize("draw", [Draw.POINT, Draw.IID, WITHOUT], ids=str)
def test_a_row_that_is_reached_ends_the_request_behind_a_draft_too(draw):
    check = judged(request(0, {"temperature": 1.0}), 0, tree(draw, chain_parents(2)))
    logits = one_hot_logits([0, 1, 2])
    logits[2] = NAN
    (verdict,) = Verifier(generator=torch.Generator().manual_seed(0))(logits, [check])
    assert verdict.error is not None


def test_block_verification_does_not_look_at_a_distribution_that_is_none():
    """Chances above such a row are those of a chain with any other distribution there, never
    NaN."""
    generator = torch.Generator().manual_seed(0)
    q = torch.softmax(torch.randn(2, VOCAB, generator=generator), -1)
    logits = torch.randn(3, VOCAB, generator=generator)
    logits[0] = q[0].log()
    logits[0, 2] -= 0.7
    logits[1] = NAN
    own = TokenTree(torch.tensor([2, 4]), (-1, 0), Draw.IID, q)
    check = judged(request(0, {"temperature": 1.0}), 0, own)
    by_failure = {True: 0, False: 0}
    for seed in range(60):
        (verdict,) = Verifier(generator=torch.Generator().manual_seed(seed))(logits, [check])
        by_failure[verdict.error is not None] += 1
    assert min(by_failure.values()) > 5, "node 0 must be accepted now and then, and refused"


# --- an empty draft distribution is no draft ------------------------------------------------------


def probs_of(rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(2 * torch.randn(rows, VOCAB, generator=generator), -1)


@pytest.mark.parametrize(("length", "empty"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_a_chain_with_an_empty_distribution_is_judged_as_one_that_ends_there(length, empty):
    p, q = probs_of(length + 1, 1), probs_of(length, 2)
    q[empty] = 0.0
    tokens = torch.tensor([3, 0, 5])[:length]
    whole = block(p, q, tokens, (chain_parents(length),))
    assert not whole.accept[empty:].any() and not whole.accept.isnan().any()
    assert not whole.stop.isnan().any()
    if empty:
        cut = block(p[: empty + 1], q[:empty], tokens[:empty], (chain_parents(empty),))
        assert torch.allclose(whole.accept[:empty], cut.accept, atol=1e-6)
        assert torch.allclose(whole.stop[: empty + 1], cut.stop, atol=1e-6)
    else:
        assert torch.allclose(whole.stop[0], p[0], atol=1e-6)


def test_siblings_with_an_empty_distribution_are_refused_and_leave_the_targets():
    parents = (-1, -1, 0, 0, 1)
    p, q = probs_of(6, 1), probs_of(5, 2)
    q[1], q[2:4] = q[0], 0.0  # below node 0 there was nothing to propose
    outcome = siblings(p, q, torch.tensor([3, 1, 0, 1, 2]), (parents,))
    assert not outcome.accept[2:4].any()
    assert torch.allclose(outcome.stop[1], p[1], atol=1e-6)
    assert not outcome.stop.isnan().any()
