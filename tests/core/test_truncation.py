"""Truncation without a sort is truncation with one, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.params import SamplingParams
from paceline.core.ranking import truncate

PARAMS = [
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 0.9999999},
    {"top_p": 1e-6},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 300},
    {"min_p": 0.05},
    {"min_p": 0.9, "top_p": 0.9},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.01},
    {},
]


def by_sorting(probs, params):
    """Each row alone, all of it sorted: the former way, without its short cuts."""
    cut = []
    for distribution, p in zip(probs, params, strict=True):
        ranked = distribution.sort(descending=True).values
        threshold = (
            distribution.amax() * torch.tensor(p.min_p) if p.min_p > 0 else torch.tensor(0.0)
        )
        if 0 < p.top_k < len(distribution):
            threshold = torch.maximum(threshold, ranked[p.top_k - 1])
        kept = distribution * (distribution >= threshold)
        mass = kept.unsqueeze(0).sum(dim=-1)[0]
        if p.top_p < 1:
            ranked = ranked * (ranked >= threshold)
            before = ranked.cumsum(-1) - ranked
            size = int((before < torch.tensor(p.top_p) * mass).sum().clamp(min=1))
            kept = kept * (kept >= ranked[size - 1])
            mass = kept.unsqueeze(0).sum(dim=-1)[0]
        cut.append(kept / mass if p.truncates else kept)
    return torch.stack(cut)


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("width", [12, 500, 4096, 49152])
def test_every_kind_of_request(width, sharpness):
    """Flat distributions (all tied), ordinary ones and peaked ones, each request alone and all
    together."""
    generator = torch.Generator().manual_seed(width)
    params = [SamplingParams(temperature=1.0, **asked) for asked in PARAMS]
    probs = torch.softmax(torch.randn(len(PARAMS), width, generator=generator) * sharpness, -1)
    wanted = by_sorting(probs, params)
    assert torch.equal(truncate(probs.clone(), params), wanted)
    for row, p in enumerate(params):
        if p.truncates:
            alone = truncate(probs[row : row + 1].clone(), [p])
            assert torch.equal(alone[0], wanted[row])


@settings(max_examples=80, deadline=None)
@given(
    levels=st.lists(st.integers(0, 12), min_size=2, max_size=700),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.1, 1e-4]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 699]),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_ties_stay_together(levels, top_p, top_k, min_p):
    """Distributions of few different values: whoever is as likely as the last that stays, stays
    too."""
    scores = torch.tensor([levels], dtype=torch.float32)
    probs = torch.softmax(scores, -1)
    p = SamplingParams(temperature=1.0, top_p=top_p, top_k=top_k, min_p=min_p)
    if p.truncates:
        distribution = truncate(probs.clone(), [p])
        assert torch.equal(distribution, by_sorting(probs, [p]))
        assert all(len(distribution[scores == level].unique()) == 1 for level in set(levels))


@pytest.mark.parametrize("asked", PARAMS[:-1], ids=str)
def test_a_row_that_is_no_distribution_stays_none(asked):
    probs = torch.full((2, 1000), float("nan"))
    probs[1] = 1e-3
    p = SamplingParams(temperature=1.0, **asked)
    distribution = truncate(probs, [p, p])
    assert distribution[0].isnan().all() and distribution[1].isfinite().all()
