"""Rows that are not a distribution, and what a request may ask for so that it makes none."""

from __future__ import annotations

import pytest
import torch

from paceline.core.draws import (
    coupled_tokens,
    draft_candidates,
    sample_by_inversion,
    sample_tokens,
    top_candidates,
)
from paceline.core.params import SamplingParams
from paceline.core.sampling import NO_TOKEN, Rows, adjust_logits, greedy_choice, scores_to_probs
from paceline.core.sequence import SequenceState
from paceline.errors import ConfigError

VOCAB = 11
NAN, INF = float("nan"), float("inf")


def request(**params: object) -> SequenceState:
    return SequenceState(0, [1, 2, 3, 3], 2, SamplingParams(**params))  # type: ignore[arg-type]


def hopeless(kind: str) -> torch.Tensor:
    """Scores [VOCAB] that no distribution can be made of."""
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    if kind == "one is not a number":
        row[4] = NAN
    elif kind == "one is infinite":
        row[4] = INF
    else:
        row[:] = NAN if kind == "all are not numbers" else -INF
    return row


KINDS = ("one is not a number", "all are not numbers", "one is infinite", "all are forbidden")
KINDS_OF_REQUEST = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "truncated": {"temperature": 0.7, "top_k": 3, "top_p": 0.8, "min_p": 0.05},
    "seeded": {"temperature": 1.0, "seed": 4},
}


@pytest.mark.parametrize(
    "row", [[NAN, 0.5, 0.5], [0.0, 0.0, 0.0], [INF, 0.1, 0.1], [0.5, NAN, 0.0]]
)
@pytest.mark.parametrize("uniform", [0.0, 0.3, 1 - 2**-53])
def test_pick_takes_no_token_where_there_is_no_distribution(row, uniform):
    probs = torch.tensor([row, [0.0, 1.0, 0.0]])
    chosen = sample_by_inversion(probs, torch.full((2,), uniform, dtype=torch.float64))
    assert chosen.tolist() == [NO_TOKEN, 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", KINDS_OF_REQUEST)
def test_a_choice_is_flagged_and_its_neighbours_are_untouched(kind, name):
    generator = torch.Generator().manual_seed(3)
    scores = torch.stack([torch.randn(VOCAB, generator=generator), hopeless(kind)])
    seqs = tuple(request(**KINDS_OF_REQUEST[name]) for _ in scores)
    rows = Rows(seqs, (0, 0))
    params = [seq.params for seq in seqs]
    probs = scores_to_probs(scores, params)
    chosen = sample_tokens(probs, rows, torch.Generator().manual_seed(0))
    assert chosen[1] == NO_TOKEN and 0 <= chosen[0] < VOCAB
    assert probs[0].equal(scores_to_probs(scores[:1], params[:1])[0])
    if name == "greedy":
        assert greedy_choice(scores).tolist() == [int(scores[0].argmax()), NO_TOKEN]
    if name == "seeded":
        assert coupled_tokens(probs, rows)[1] == NO_TOKEN


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 3])
def test_a_draft_from_no_distribution_is_a_token_that_is_always_refused(kind, k):
    """In the vocabulary, as it will be embedded, and of probability zero in a distribution of
    zeros."""
    generator = torch.Generator().manual_seed(3)
    sound = torch.randn(VOCAB, generator=generator)
    for name, params in KINDS_OF_REQUEST.items():
        seqs = (request(**params), request(**params), request(temperature=1.0))
        logits = torch.stack([sound, hopeless(kind), sound])
        drafted = draft_candidates(
            logits, Rows(seqs, (0, 0, 0)), k, torch.Generator().manual_seed(0)
        )
        assert drafted.tokens.shape == (3, k), name
        assert ((drafted.tokens >= 0) & (drafted.tokens < VOCAB)).all(), name
        assert drafted.q is not None
        assert not drafted.q[1].any(), name
        assert drafted.q[[0, 2]].sum(-1).sub(1).abs().max() < 1e-5, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", KINDS_OF_REQUEST)
def test_nothing_is_likely_where_there_is_no_distribution(kind, name):
    seqs = (request(**KINDS_OF_REQUEST[name]), request(**KINDS_OF_REQUEST[name]))
    logits = torch.stack([torch.randn(VOCAB), hopeless(kind)])
    tokens, values = top_candidates(logits, Rows(seqs, (0, 0)), 3)
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
    assert values[1].eq(-INF).all() and values[0, 0] > -INF


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-45},
        {"temperature": 1e-300},
        {"temperature": 1e-30, "repetition_penalty": 0.01, "logit_bias": {5: 100.0}},
        {"temperature": 1e-30, "repetition_penalty": 100.0, "logit_bias": {5: -100.0}},
        {"temperature": 100.0, "repetition_penalty": 0.01, "frequency_penalty": -2.0},
        {"temperature": 1e-8, "presence_penalty": 2.0, "top_p": 1e-300, "min_p": 1.0},
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_no_valid_request_makes_a_distribution_that_is_none(params, scale):
    """Whatever the parameters, finite scores give a distribution; so cold a one is the argmax."""
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)) * scale
    warm = request(temperature=0.9)
    seqs = (request(**params), warm, request(**params), warm)
    rows = Rows(seqs, (0,) * 4)
    scores = adjust_logits(logits, rows)
    probs = scores_to_probs(scores, [seq.params for seq in seqs])
    assert not scores.isnan().any() and not probs.isnan().any()
    assert probs.sum(-1).sub(1).abs().max() < 1e-5
    if params["temperature"] < 1e-20:
        assert probs[::2].argmax(-1).equal(scores[::2].argmax(-1))
    plain = scores_to_probs(
        adjust_logits(logits[1::2], Rows((warm, warm), (0, 0))), [warm.params] * 2
    )
    assert probs[1::2].equal(plain), "a neighbour's temperature changed a law"


@pytest.mark.parametrize(
    ("params", "bounds"),
    [
        ({"temperature": 1e6}, "from 0 .greedy. to 100"),
        ({"temperature": -0.1}, "from 0 .greedy. to 100"),
        ({"temperature": NAN}, "finite"),
        ({"repetition_penalty": 1e-40}, "from 0.01 to 100"),
        ({"repetition_penalty": 1e-8}, "from 0.01 to 100"),
        ({"repetition_penalty": 101.0}, "from 0.01 to 100"),
        ({"logit_bias": {5: NAN}}, "token 5 is nan; it must be a number from -100 to 100"),
        ({"logit_bias": {5: INF}}, "from -100 to 100"),
        ({"logit_bias": {5: 1e39}}, "from -100 to 100"),
        ({"logit_bias": {5: -100.5}}, "from -100 to 100"),
    ],
)
def test_what_a_request_may_ask_is_bounded_and_the_bounds_are_said(params, bounds):
    with pytest.raises(ConfigError, match=bounds) as caught:
        SamplingParams(**params)
    assert "\n" not in str(caught.value)
