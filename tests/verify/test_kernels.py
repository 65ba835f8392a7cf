"""What the kernels decide of sampled drafts is what torch decides."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from paceline.core.params import SamplingParams
from paceline.core.sampling import Rows, probabilities
from paceline.core.sequence import SequenceState
from paceline.core.tree import Draw, TokenTree, chain_parents
from paceline.kernels.library import INSTRUCTIONS, choose, instructions
from paceline.verify import verifier as verifier_module
from paceline.verify.verifier import Verifier, rule_for
from support.spans import judged

BRANCHING = (-1, -1, 0, 0, 1)
PARAMS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 1e-9},
    "hot": {"temperature": 3.0},
    "top_k": {"temperature": 0.8, "top_k": 5},
    "top_p": {"temperature": 0.9, "top_p": 0.8},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "all": {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
}


class Told(Verifier):
    """A verifier that is told its uniforms."""

    told: torch.Tensor

    def uniforms(self, count: int, device: torch.device) -> torch.Tensor:
        return self.told[:count]


@pytest.fixture(params=[None, "portable"])
def kernels(request: pytest.FixtureRequest) -> Any:
    before = instructions()
    assert request.param in (None, *INSTRUCTIONS)
    assert request.param is None or choose(request.param)
    yield
    choose(before)


def decided(
    verifier: Verifier, logits: torch.Tensor, spans: list[Any], quick: bool
) -> list[tuple[Any, ...]]:
    """Path, tokens and error of each span, in the kernels or without."""
    with pytest.MonkeyPatch.context() as patch:
        if not quick:
            patch.setattr(verifier_module, "can_use_kernels", lambda *_: False)
        return [(v.path, v.tokens, v.error) for v in verifier(logits, spans)]


def spans_of(generator: torch.Generator, width: int, params: dict[str, Any], dtype: torch.dtype):
    """A drawn chain whose q is narrower than the rows, a chosen tree, and nothing at all; likely
    drafts, and a few ties."""
    seq = SequenceState(0, [1, 2, 3, 3], 2, SamplingParams(**params), frozenset({4}))
    rows = 4 + 6 + 1
    logits = (3 * torch.randn(rows, width, generator=generator)).to(dtype)
    logits[:, width // 2 : width // 2 + 3] = logits[:, :1]
    narrow = max(2, width - 5)
    q = torch.softmax(logits[:3, :narrow].float() + 0.3, -1).roll(1, 0)
    q = 0.5 * q + 0.5 * torch.softmax(logits[:3, :narrow].float(), -1)
    drawn = torch.multinomial(q, 1, generator=generator)[:, 0]
    chain = TokenTree(drawn, chain_parents(3), Draw.IID, q)
    tokens = torch.randint(width, (5,), generator=generator)
    for node, parent in enumerate(BRANCHING):
        row = logits[4 + parent + 1]
        row[tokens[node]] = row.max() + 2
    for row, token in zip(logits, drawn.tolist(), strict=False):
        row[token] = row.max() + 2
    chosen = TokenTree(tokens, BRANCHING)
    trees = (chain, chosen, TokenTree.empty())
    firsts = (0, 4, 10)
    return logits, [judged(seq, row, tree) for row, tree in zip(firsts, trees, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [7, 130, 5000])
@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("name", PARAMS)
def test_the_same_as_torch(
    kernels: None, name: str, seeded: bool, width: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(width)
    same = total = paths = 0
    for seed in range(8):
        params = {**PARAMS[name], **({"seed": seed} if seeded else {})}
        logits, spans = spans_of(generator, width, params, dtype)
        verifier = Told()
        verifier.told = torch.rand(64, dtype=torch.float64, generator=generator)
        quick, slow = (decided(verifier, logits, spans, quick) for quick in (True, False))
        same += sum(one == other for one, other in zip(quick, slow, strict=True))
        total += len(spans)
        paths += sum(len(path) for path, _, _ in quick)
    assert paths > 6 or name == "hot"
    # A uniform between two tokens' shares may fall to either, as sums are rounded otherwise.
    assert same >= total - 1


def test_threads_decide_alike() -> None:
    """Spans side by side, and, where blocks are fewer than threads, one after another."""
    before, generator = torch.get_num_threads(), torch.Generator().manual_seed(0)
    logits, spans = spans_of(generator, 5000, {"temperature": 1.0}, torch.float32)
    verifier = Told()
    verifier.told = torch.rand(64, dtype=torch.float64, generator=generator)
    told = []
    try:
        for threads in (1, 2, 8):
            torch.set_num_threads(threads)
            told.append([decided(verifier, logits, some, True) for some in (spans, spans[1:])])
    finally:
        torch.set_num_threads(before)
    assert told[0] == told[1] == told[2]


ADJUSTED: dict[str, dict[str, Any]] = {
    "penalty": {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {3: 4.0, 5: -100.0}},
    "min_tokens": {"min_tokens": 4},
    "greedy penalty": {"frequency_penalty": 2.0, "temperature": 0.0, "seed": None},
}


@pytest.mark.parametrize("apart", range(3))
@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("name", ADJUSTED)
def test_adjusted_rows_are_decided_in_the_kernels(
    kernels: None, name: str, seeded: bool, apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request with a bias, penalties or min_tokens sent all rows of a step to torch."""
    generator = torch.Generator().manual_seed(apart)
    same = total = 0
    for seed in range(24):
        params = {"temperature": 1.0, **({"seed": seed} if seeded else {})}
        logits, spans = spans_of(generator, 130, params, torch.float32)
        adjusted = SamplingParams(**{**params, **ADJUSTED[name]})
        seq = SequenceState(1, [1, 2, 3, 3], 2, adjusted, frozenset({4}))
        spans[apart] = judged(seq, spans[apart].logit_row, spans[apart].tree)
        verifier = Told()
        verifier.told = torch.rand(64, dtype=torch.float64, generator=generator)
        slow = decided(verifier, logits, spans, False)
        with monkeypatch.context() as patch:
            patch.setattr(Verifier, "_verify_in_torch", None)
            verdicts = verifier(logits, spans, logits.argmax(-1).tolist())
        quick = [(v.path, v.tokens, v.error) for v in verdicts]
        same += sum(one == other for one, other in zip(quick, slow, strict=True))
        total += len(spans)
    assert same >= total - 1


@pytest.mark.parametrize("name", PARAMS)
def test_every_share_of_the_uniforms_is_a_tokens_probability(kernels: None, name: str) -> None:
    """Plain decoding, by uniforms that lie evenly."""
    seq = SequenceState(0, [1, 2, 3], 2, SamplingParams(**PARAMS[name]))
    logits = 2 * torch.randn(1, 37, generator=torch.Generator().manual_seed(3))
    (wanted,) = probabilities(logits, Rows((seq,), (0,)))
    counts, verifier, number = Counter[int](), Told(), 2000
    for index in range(number):
        verifier.told = torch.tensor([(index + 0.5) / number], dtype=torch.float64)
        ((_, (token,), _),) = decided(verifier, logits, [judged(seq, 0, TokenTree.empty())], True)
        counts[token] += 1
    for token, share in enumerate(wanted.tolist()):
        assert abs(counts[token] - number * share) <= 1.01


def test_a_row_is_decided_alike_whatever_stands_beside_it(kernels: None) -> None:
    """So a seed's text is the same with and without drafts."""
    generator = torch.Generator().manual_seed(1)
    params = SamplingParams(temperature=1.0, seed=7)
    logits = 3 * torch.randn(40, 3000, generator=generator)
    tokens = [1, 2, 3]
    verifier = Verifier()
    for row in range(40):
        seq = SequenceState(0, tokens, 2, params)
        ((_, (token,), _),) = decided(verifier, logits, [judged(seq, row, TokenTree.empty())], True)
        tokens = [*tokens, token]
    seq = SequenceState(0, [1, 2, 3], 2, params)
    tree = TokenTree.chain(tokens[3:-1])
    ((path, accepted, _),) = decided(verifier, logits, [judged(seq, 0, tree)], True)
    assert path == tuple(range(39)) and list(accepted) == tokens[3:]


def test_a_drafter_that_learns_from_all_rows_gets_all_choices(kernels: None) -> None:
    generator = torch.Generator().manual_seed(2)
    seq = SequenceState(0, [1, 2], 1, SamplingParams(temperature=1.0, seed=3))
    logits = torch.randn(6, 50, generator=generator)
    tree = TokenTree(torch.tensor([3, 1, 4, 1, 5]), BRANCHING, wants_choices=True)
    (quick,) = Verifier()(logits, [judged(seq, 0, tree)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifier_module, "can_use_kernels", lambda *_: False)
        (slow,) = Verifier()(logits, [judged(seq, 0, tree)])
    assert quick.choices == slow.choices and min(quick.choices) >= 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 1.0, "seed": 1}])
def test_a_row_that_is_no_distribution_ends_the_request(
    kernels: None, params: dict[str, Any], value: float
) -> None:
    seq = SequenceState(0, [1, 2], 1, SamplingParams(**params))
    logits = torch.zeros(1, 100)
    logits[0, 70] = value
    ((_, tokens, error),) = decided(
        Verifier(), logits, [judged(seq, 0, TokenTree.empty())], quick=True
    )
    assert not tokens and error
    logits[0, 70] = -torch.inf
    ((_, tokens, error),) = decided(
        Verifier(), logits, [judged(seq, 0, TokenTree.empty())], quick=True
    )
    assert tokens and not error


def test_the_token_rule_and_siblings_are_torchs() -> None:
    q = torch.full((2, 4), 0.25)
    seq = SequenceState(0, [1], 1, SamplingParams(temperature=1.0))
    chain = judged(seq, 0, TokenTree(torch.tensor([0, 1]), chain_parents(2), Draw.IID, q))
    siblings = judged(
        seq, 0, TokenTree(torch.tensor([0, 1]), (-1, -1), Draw.WITHOUT_REPLACEMENT, q)
    )
    assert rule_for(chain, "token") == rule_for(siblings) == "siblings"
    for rule, span in (("token", chain), ("auto", siblings)):
        assert not Verifier(rule)._can_use_kernels([span], torch.zeros(3, 4), None)
    assert Verifier()._can_use_kernels([chain], torch.zeros(3, 4), None)
