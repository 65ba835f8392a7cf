"""Sampling tokens from distributions, for drafters and verifier. Nothing waits for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from paceline.core.noise import exponential_race, noise_keys, random_keys
from paceline.core.params import SamplingParams
from paceline.core.ranking import param_column, row_max, top_k_indices
from paceline.core.sampling import NO_TOKEN, Rows, adjust_logits, greedy_tokens, scores_to_probs
from paceline.core.sequence import SequenceView
from paceline.core.transfer import to_device
from paceline.core.tree import Draw

_BELOW_ONE = 1.0 - 2.0**-50  # keeps uniform * mass below the mass in spite of rounding


def is_coupled(params: SamplingParams) -> bool:
    """Whether the request samples with noise of (seed, position) alone (the coupled rule)."""
    return params.seed is not None and not params.greedy


def draws_unseeded(params: SamplingParams) -> bool:
    """Whether the request samples with the engine's generator, as it has no seed."""
    return params.seed is None and not params.greedy


def sample_by_inversion(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """int64 [R]: one token from each distribution [R, V] by inversion of the cumulative sum, given
    uniforms [R] in [0, 1).

    A token of probability zero is never sampled, so a one-hot distribution gives its token. Rows
    need not sum to one. Sums are float64, so that rounding loses no probability. NO_TOKEN where a
    row is not a distribution: its sum is zero, infinite or NaN."""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    mass = cumulative[:, -1:]
    points = mass * (uniforms.to(torch.float64).unsqueeze(1) * _BELOW_ONE)
    drawn = torch.searchsorted(cumulative, points, right=True).clamp_(max=probs.shape[1] - 1)
    return torch.where((mass > 0) & (mass < torch.inf), drawn, NO_TOKEN).squeeze(1)


def _seeded_rows(rows: Rows) -> list[int]:
    """Indices of the rows whose request has a seed."""
    return [row for row, seq in enumerate(rows.seqs) if is_coupled(seq.params)]


def _noise_keys(rows: Rows, device: torch.device) -> torch.Tensor:
    """int64 [R, 1]: noise keys of rows whose requests have a seed."""
    return noise_keys([seq.params.seed or 0 for seq in rows.seqs], rows.positions, device)


def coupled_tokens(probs: torch.Tensor, rows: Rows) -> torch.Tensor:
    """int64 [R]: Gumbel-max samples argmax_x log p(x) + gumbel(seed, position, x) of rows whose
    requests have a seed; position: index of the predicted token. NO_TOKEN: no distribution."""
    best, tokens = row_max(exponential_race(probs, _noise_keys(rows, probs.device)))
    return torch.where(best > 0, tokens, NO_TOKEN)  # false for NaN


def sample_tokens(
    probs: torch.Tensor, rows: Rows, generator: torch.Generator | None
) -> torch.Tensor:
    """int64 [R]: one token per row: the coupled sample with a seed, the argmax if greedy, else a
    sample by ``generator``. NO_TOKEN where a row is not a distribution."""
    if len(_seeded_rows(rows)) == len(rows):
        return coupled_tokens(probs, rows)
    uniforms = torch.rand(len(rows), dtype=torch.float64, device=probs.device, generator=generator)
    return sample_stop_tokens(probs, probs, rows, uniforms)


def sample_stop_tokens(
    probs: torch.Tensor, stop: torch.Tensor, rows: Rows, uniforms: torch.Tensor
) -> torch.Tensor:
    """int64 [R]: the token that ends the step at each row: a sample of the row's ``stop``
    distribution, given uniforms [R]; for a request with a seed, the coupled sample of the row's
    ``probs``. Greedy rows are one-hot, so a sample is the argmax."""
    choices = sample_by_inversion(stop, uniforms)
    if coupled := _seeded_rows(rows):
        index = to_device(coupled, probs.device)
        choices[index] = coupled_tokens(probs.index_select(0, index), rows.select(coupled))
    return choices


def draw_kind(seq: SequenceView, siblings: bool = False) -> Draw:
    """TokenTree's ``draw`` for candidates of ``draft_candidates``: POINT for greedy and seeded
    requests, whose candidates are determined by the context; else WITHOUT_REPLACEMENT if there are
    ``siblings``, IID for a chain."""
    if not draws_unseeded(seq.params):
        return Draw.POINT
    return Draw.WITHOUT_REPLACEMENT if siblings else Draw.IID


class DraftedTokens(NamedTuple):
    """``tokens`` int64 ``[R, k]``: siblings in drawing order. ``q`` float32 ``[R, V]``: the
    distributions they were drawn from, None if no row needs it. A row without a draft distribution
    (all allowed tokens are outside the draft vocabulary) is zero, so the verifier rejects its
    tokens."""

    tokens: torch.Tensor
    q: torch.Tensor | None


def draft_candidates(
    logits: torch.Tensor, rows: Rows, k: int = 1, generator: torch.Generator | None = None
) -> DraftedTokens:
    """k candidates (at most V) after each row of a draft model's logits [R, V]. Greedy requests get
    the k largest; requests with a seed the k largest of log q + gumbel with the noise that the
    verifier uses at that position; others samples of q by ``generator``, without replacement if
    k > 1 (the k largest of log q + fresh Gumbel noise; Kool, van Hoof and Welling 2019, arXiv
    1903.06059)."""
    params = [seq.params for seq in rows.seqs]
    greedy = all(p.greedy for p in params)
    if greedy and k == 1:
        return DraftedTokens(greedy_tokens(logits, rows).clamp(min=0).unsqueeze(1), None)
    scores = adjust_logits(logits, rows)
    if greedy:
        return DraftedTokens(scores.topk(k, dim=-1).indices, None)
    q = scores_to_probs(scores, params)
    if k == 1:
        chosen = sample_tokens(q, rows, generator)
        return DraftedTokens(chosen.clamp(min=0).unsqueeze(1), _zero_invalid_rows(q, chosen >= 0))
    best = _race_scores(q, scores, rows, generator).topk(k, dim=-1)
    first = best.values[:, 0]
    return DraftedTokens(best.indices, _zero_invalid_rows(q, (first > 0) & (first < torch.inf)))


def _zero_invalid_rows(q: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Zero the rows of q [R, V] that are not ``valid`` [R]. On a CPU q itself if all are."""
    if q.device.type == "cpu" and bool(valid.all()):
        return q
    return torch.where(valid.unsqueeze(1), q, 0.0)


# A greedy target accepts the draft's first choice more often than the draft's distribution says, so
# trees for greedy requests are built from a sharpened distribution. Tokens per step with trees of 8
# nodes (embedded target, mean of five suites) at sharpness 1, 1.5, 2 and 3: draft model 4.16, 4.70,
# 4.69, 4.66 (a chain of 8: 4.39); EAGLE-3 3.88, 4.18, 4.18, 4.09 (a chain: 3.92).
GREEDY_SHARPNESS = 1.75


def top_candidates(logits: torch.Tensor, rows: Rows, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k likeliest candidates after each row of a draft model's logits [R, V], for POINT trees:
    tokens int64 ``[R, k]`` and log-probabilities float32 ``[R, k]`` in descending order; minus
    infinity where there is no candidate.

    Distributions of greedy requests are sharpened (GREEDY_SHARPNESS). For requests with a seed the
    log-probability is that of being the verifier's Gumbel-max choice: a softmax of log q + gumbel
    with the noise of that position."""
    scores = adjust_logits(logits, rows)
    params = [seq.params for seq in rows.seqs]
    if all(p.greedy for p in params):
        log_probs = torch.log_softmax(GREEDY_SHARPNESS * scores, dim=-1)
    else:
        probs = scores_to_probs(scores, params)
        if coupled := _seeded_rows(rows):
            index = to_device(coupled, probs.device)
            keys = _noise_keys(rows.select(coupled), probs.device)
            scored = exponential_race(probs.index_select(0, index), keys)
            probs = probs.index_copy(0, index, scored / scored.sum(-1, keepdim=True))
        log_probs = probs.log()
        if any(p.greedy for p in params):
            sharpened = torch.log_softmax(GREEDY_SHARPNESS * scores, dim=-1)
            greedy = param_column(params, lambda p: p.greedy, scores.device, torch.bool)
            log_probs = torch.where(greedy, sharpened, log_probs)
    tokens = top_k_indices(log_probs, k)
    values = log_probs.gather(1, tokens)
    # A row that is not a distribution has no candidate.
    return tokens, torch.where(values.isnan(), -torch.inf, values)


def _race_scores(
    q: torch.Tensor, scores: torch.Tensor, rows: Rows, generator: torch.Generator | None
) -> torch.Tensor:
    """float32 [R, V]: scores whose k largest entries are the row's candidates in drawing order."""
    keys = random_keys(len(rows), q.device, generator)
    if coupled := _seeded_rows(rows):
        keys[to_device(coupled, q.device)] = _noise_keys(rows.select(coupled), q.device)
    race_scores, params = exponential_race(q, keys), [seq.params for seq in rows.seqs]
    if any(p.greedy for p in params):
        greedy = param_column(params, lambda p: p.greedy, q.device, torch.bool)
        race_scores = torch.where(greedy, torch.softmax(scores, dim=-1), race_scores)
    return race_scores
