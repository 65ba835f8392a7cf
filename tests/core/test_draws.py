"""From distributions to tokens: thresholds checked with placed uniforms, and drafts of every
kind."""

import pytest
import torch

from paceline.core.draws import (
    coupled_tokens,
    draft_candidates,
    draw_kind,
    sample_by_inversion,
    sample_tokens,
)
from paceline.core.noise import gumbel
from paceline.core.params import SamplingParams
from paceline.core.sampling import Rows, probabilities
from paceline.core.sequence import SequenceState
from paceline.core.tree import Draw


def request(**params):
    return SequenceState(0, [1, 2, 3], 2, SamplingParams(**params))


FREE, SEEDED, GREEDY = request(temperature=1.0), request(temperature=1.0, seed=3), request()


def test_pick_changes_at_the_cumulative_sums():
    """A grid of uniforms reproduces the distribution: no token is favoured at an end."""
    distribution = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    tokens = sample_by_inversion(distribution.expand(1000, 6), grid)
    assert torch.bincount(tokens, minlength=6).tolist() == [0, 250, 0, 500, 250, 0]
    assert tokens.equal(tokens.sort().values)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2.0**-53])
def test_pick_never_takes_an_impossible_token(uniform):
    probs = torch.eye(7) * torch.linspace(0.1, 3.3, 7).unsqueeze(1)  # of any mass
    assert sample_by_inversion(
        probs, torch.full((7,), uniform, dtype=torch.float64)
    ).tolist() == list(range(7))


def test_pick_reaches_rare_tokens():
    """1e-9 is below the step of a float32 sum near one."""
    distribution = torch.tensor([[1.0, 1e-9, 0.0]])
    assert (
        sample_by_inversion(distribution, torch.tensor([1 - 1e-10], dtype=torch.float64)).item()
        == 1
    )
    assert (
        sample_by_inversion(distribution, torch.tensor([1 - 1e-8], dtype=torch.float64)).item() == 0
    )


def test_coupled_choice_is_the_argmax_of_log_p_plus_gumbel():
    logits = torch.randn(200, 30, generator=torch.Generator().manual_seed(0))
    seqs = tuple(request(temperature=1.0, seed=seed, top_k=9) for seed in range(200))
    rows = Rows(seqs, tuple(range(200)))
    probs = probabilities(logits, rows)
    noise = gumbel(range(200), [3 + depth for depth in range(200)], 30)
    assert coupled_tokens(probs, rows).equal((probs.log() + noise).argmax(-1))


def test_choose_serves_each_row_as_its_request_asks():
    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    seqs = (FREE, SEEDED, GREEDY, request(temperature=0.5, seed=4)) * 10
    rows = Rows(seqs, (0, 1, 2, 3) * 10)
    probs = probabilities(logits, rows)
    first, again, other = (
        sample_tokens(probs, rows, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert first.equal(again)
    assert (first != other)[0::4].any() and first[1::2].equal(other[1::2])
    assert first[2::4].equal(logits[2::4].argmax(-1))
    assert first[2::4].equal(other[2::4])
    alone = Rows((SEEDED,) * 10, (1,) * 10)
    assert first[1::4].equal(coupled_tokens(probs[1::4], alone))


@pytest.mark.parametrize("k", [1, 3])
def test_draft_of_a_mixed_batch(k):
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    seqs = (FREE, SEEDED, GREEDY, request(temperature=0.5))
    drafted = draft_candidates(logits, Rows(seqs, (0,) * 4), k, torch.Generator().manual_seed(1))
    assert drafted.tokens.shape == (4, k)
    assert all(len(set(row)) == k for row in drafted.tokens.tolist())
    assert drafted.tokens[2].equal(logits[2].topk(k).indices)
    assert drafted.q.equal(probabilities(logits, Rows(seqs, (0,) * 4)))
    alone = draft_candidates(logits[1:2], Rows((SEEDED,), (0,)), k)
    assert drafted.tokens[1].equal(alone.tokens[0])
    best = (drafted.q[1].log() + gumbel([3], [3], 30)[0]).topk(k).indices
    assert drafted.tokens[1].equal(best)


def test_greedy_drafts_need_no_distribution():
    logits = torch.randn(2, 30)
    drafted = draft_candidates(logits, Rows((GREEDY,) * 2, (0, 0)), 4)
    assert drafted.q is None and drafted.tokens.equal(logits.topk(4).indices)


def test_siblings_run_out_of_distribution_before_they_repeat():
    """top_k 2 and three siblings: the third cannot have been drawn, and is no repetition."""
    seq = request(temperature=1.0, top_k=2)
    logits = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    drafted = draft_candidates(
        logits, Rows((seq,) * 50, (0,) * 50), 3, torch.Generator().manual_seed(1)
    )
    chances = drafted.q.gather(1, drafted.tokens)
    assert (chances[:, :2] > 0).all() and (chances[:, 2] == 0).all()
    assert all(len(set(row)) == 3 for row in drafted.tokens.tolist())


def test_what_a_draft_is_called():
    assert (
        draw_kind(FREE) is Draw.IID and draw_kind(FREE, siblings=True) is Draw.WITHOUT_REPLACEMENT
    )
    for seq in (SEEDED, GREEDY, request(seed=3)):
        assert draw_kind(seq) is draw_kind(seq, siblings=True) is Draw.POINT
