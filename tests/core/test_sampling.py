"""Distributions against a plain, slow definition of each step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.params import SamplingParams
from paceline.core.sampling import (
    Rows,
    adjust_logits,
    is_argmax,
    needs_logits,
    needs_paths,
    probabilities,
)
from paceline.core.sequence import SequenceState
from paceline.core.tree import TokenTree
from support.spans import judged

VOCAB = 12


def request(tokens=(1, 2, 3), prompt=2, stop=(), **params):
    return SequenceState(0, list(tokens), prompt, SamplingParams(**params), frozenset(stop))


def slow_scores(logits, seq, path):
    """Bias, min_tokens and penalties, token by token, as the documents of vLLM define them."""
    params = seq.params
    prompt, output = seq.tokens[: seq.prompt_length], [*seq.tokens[seq.prompt_length :], *path]
    scores = []
    for token, logit in enumerate(logits):
        logit += params.logit_bias.get(token, 0.0)
        if len(output) < params.min_tokens and token in seq.stop_ids:
            logit = -math.inf
        if token in prompt or token in output:
            factor = params.repetition_penalty
            logit = logit / factor if logit > 0 else logit * factor
        count = output.count(token)
        logit -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        scores.append(logit)
    return scores


def slow_distribution(logits, seq, path=()):
    params = seq.params
    scores = slow_scores(logits, seq, path)
    if params.greedy:
        best = scores.index(max(scores))
        return [float(token == best) for token in range(len(scores))]
    top = max(scores)
    weights = [math.exp((score - top) / params.temperature) for score in scores]
    weights = [w if w >= params.min_p * max(weights) else 0.0 for w in weights]
    if params.top_k > 0:
        kth = sorted(weights, reverse=True)[min(params.top_k, len(weights)) - 1]
        weights = [w if w >= kth else 0.0 for w in weights]
    if params.top_p < 1:
        mass, needed = 0.0, params.top_p * sum(weights)
        for last in sorted(weights, reverse=True):
            mass += last
            if mass >= needed:
                break
        weights = [w if w >= last else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


PARAMS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 1.0, "top_k": 100},
    {"temperature": 0.8, "top_p": 0.75},
    {"temperature": 0.8, "top_p": 0.01},
    {"temperature": 1.5, "min_p": 0.2},
    {"temperature": 1.2, "top_k": 7, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.7},
    {"temperature": 1.0, "presence_penalty": 1.1, "frequency_penalty": -0.7},
    {"temperature": 0.9, "logit_bias": {3: 2.5, 0: -100.0}},
    {"temperature": 0.9, "min_tokens": 3, "stop": (5, 6)},
    {"temperature": 0.0, "min_tokens": 3, "stop": tuple(range(11))},
    {"repetition_penalty": 3.0, "presence_penalty": 1.0, "logit_bias": {7: 1.0}},
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_law_of_one_request(params):
    generator = torch.Generator().manual_seed(0)
    seq = request((1, 2, 3, 3, 5), **params)
    logits = torch.randn(20, VOCAB, generator=generator) * 2
    distribution = probabilities(logits, Rows((seq,) * 20, (0,) * 20))
    expected = torch.tensor([slow_distribution(row, seq) for row in logits.tolist()])
    assert torch.allclose(distribution, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mixed_batch_along_tree_paths(dtype):
    """Every kind of request in one batch, each with a tree: rows do not disturb one another."""
    generator = torch.Generator().manual_seed(1)
    parents = (-1, -1, 0, 0, 1, 2)
    checks, row = [], 0
    for index, params in enumerate(PARAMS):
        chosen = parents[: index % 7]
        tokens = torch.randint(VOCAB, (len(chosen),), generator=generator)
        seq = request((4, 2, 3, 3, 5)[: 2 + index % 4], **params)
        checks.append(judged(seq, row, TokenTree(tokens, chosen)))
        row += checks[-1].verify_rows
    logits = (torch.randn(row, VOCAB, generator=generator) * 2).to(dtype)
    before = logits.clone()
    distribution = probabilities(logits, Rows.of(checks))
    assert logits.equal(before), "the model's logits belong to the caller"
    for check in checks:
        tokens, paths = check.tree.tokens.tolist(), [[]]
        for token, parent in zip(tokens, check.tree.parents, strict=True):
            paths.append([*paths[parent + 1], token])
        for offset, path in enumerate(paths):
            expected = slow_distribution(logits[check.logit_row + offset].tolist(), check.seq, path)
            assert torch.allclose(
                distribution[check.logit_row + offset], torch.tensor(expected), atol=1e-6
            )


@settings(max_examples=60, deadline=None)
@given(
    k=st.integers(0, 9),
    p=st.floats(0.05, 1.0),
    floor=st.floats(0.0, 0.5),
    logits=st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=8, max_size=8),
)
def test_truncation_with_many_ties(k, p, floor, logits):
    """Tied tokens stay or go together, so a distribution cannot depend on the order of a sort."""
    seq = request(temperature=1.0, top_k=k, top_p=p, min_p=floor)
    (distribution,) = probabilities(torch.tensor([logits]), Rows((seq,), (0,)))
    by_logit = {}
    for logit, chance in zip(logits, distribution.tolist(), strict=True):
        by_logit.setdefault(logit, set()).add(chance)
    assert all(len(chances) == 1 for chances in by_logit.values())
    assert float(distribution.sum()) == pytest.approx(1, abs=1e-6)
    assert int((distribution > 0).sum()) >= min(k or 1, 8 if p == 1 and floor == 0 else 1)


def test_row_alone_equals_row_in_a_mixed_batch():
    """Bit for bit: a request's draws may not depend on its neighbours."""
    logits = torch.randn(len(PARAMS), 600, generator=torch.Generator().manual_seed(2)) * 3
    seqs = [request(**params) for params in PARAMS]
    together = probabilities(logits, Rows(tuple(seqs), (0,) * len(seqs)))
    for row, seq in enumerate(seqs):
        alone = probabilities(logits[row : row + 1], Rows((seq,), (0,)))
        assert alone[0].equal(together[row]), seq.params


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.8, 4.0, 8.0])
def test_nucleus_of_any_size(scale):
    """From one token to all: the short sorts and the full one agree with the definition."""
    seq = request(temperature=1.0, top_p=0.9)
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(3)) * scale
    distribution = probabilities(logits, Rows((seq,) * 3, (0,) * 3))
    ranked = torch.softmax(logits.double(), -1).sort(descending=True).values
    sizes = 1 + (ranked.cumsum(-1) < 0.9).sum(-1) if scale else torch.full((3,), 5000)
    assert ((distribution > 0).sum(-1) - sizes).abs().max() <= 1, "but for one token at the edge"
    plain = torch.softmax(logits, -1)
    kept = torch.where(distribution > 0, plain, 0.0).sum(-1)
    smallest = torch.where(distribution > 0, plain, 2.0).amin(-1)
    assert (kept >= 0.9 - 1e-5).all()
    if scale:
        assert (kept - smallest < 0.9 + 1e-5).all()
    else:
        assert (distribution > 0).all(), "all tokens tie with the last of the nucleus"


def test_greedy_takes_the_lowest_id_on_ties():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    assert probabilities(logits, Rows((request(),), (0,))).tolist() == [[0, 1, 0, 0]]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_tiny_temperature_is_nearly_greedy(temperature):
    logits = torch.tensor([[1.0, 90.0, -80.0, 0.0]])
    distribution = probabilities(logits, Rows((request(temperature=temperature),), (0,)))
    assert distribution.tolist() == [[0, 1, 0, 0]]


def test_bias_on_ids_that_a_narrower_model_lacks():
    seq = request(temperature=1.0, logit_bias={50: 5.0}, repetition_penalty=2.0, tokens=(1, 50))
    distribution = probabilities(torch.zeros(1, 4), Rows((seq,), (0,)))
    assert distribution.tolist() == [[0.25] * 4]


def test_logprobs_are_before_temperature_and_truncation():
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4))
    seq = request(temperature=0.5, top_k=2, logit_bias={0: 1.0}, frequency_penalty=0.5)
    expected = torch.tensor([slow_scores(logits[0].tolist(), seq, [])]).log_softmax(-1)
    logprobs = torch.log_softmax(adjust_logits(logits, Rows((seq,), (0,))), dim=-1)
    assert torch.allclose(logprobs, expected, atol=1e-6)


def test_adjusted_leaves_plain_logits_alone():
    logits = torch.randn(2, VOCAB)
    seq = request(temperature=0.5, top_k=3)
    assert adjust_logits(logits, Rows((seq,) * 2, (0, 0))) is logits


def test_what_needs_what():
    assert is_argmax(request()) and not needs_logits([request(), request()])
    for params in (
        {"temperature": 1.0},
        {"logit_bias": {1: 1.0}},
        {"frequency_penalty": 0.1},
        {"min_tokens": 2},
    ):
        assert needs_logits([request(), request(**params)])
        assert needs_paths([request(**params)]) == ("frequency_penalty" in params)
    assert is_argmax(request((1, 2, 3, 4), min_tokens=2)), "two have been generated"


def test_positions_are_absolute():
    assert Rows((request(), request((1, 2, 3, 4))), (0, 3)).positions == [3, 7]
