"""The enumeration, on small cases with known answers, in torch and in the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from paceline.core.tree import Draw, TokenTree, chain_parents
from paceline.kernels.lookup import functions
from paceline.lab.certify.exact import _PARAMS, ExactCheck, SmallStep, enumerate_step
from paceline.verify.kernels import SampledSpan, decide_in_kernels
from paceline.verify.rules import RuleProbabilities
from paceline.verify.verifier import Verifier
from support.wrong_rules import without_residual

CPU = torch.device("cpu")
Strings = Sequence[tuple[int, ...]]


def softmax(*shape: int, seed: int) -> torch.Tensor:
    scores = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return torch.softmax(1.5 * scores.double(), -1)


def step(parents: tuple[int, ...], draw: Draw, depth: int, width: int = 4) -> SmallStep:
    strings = [s for length in range(depth + 1) for s in product(range(width), repeat=length)]
    target = dict(zip(strings, softmax(len(strings), width, seed=0), strict=True))
    q = softmax(len(parents), width, seed=1)[[parents.index(parent) for parent in parents]]
    tokens = tuple(node % width for node in range(len(parents)))
    return SmallStep(parents, draw, target, *((None, tokens) if draw is Draw.POINT else (q,)))


STEPS = {
    "chain": step(chain_parents(2), Draw.IID, 2),
    "long chain": step(chain_parents(3), Draw.IID, 3),
    "siblings": step((-1, -1), Draw.WITHOUT_REPLACEMENT, 1),
    "all siblings": step((-1, -1, -1), Draw.WITHOUT_REPLACEMENT, 1, width=3),
    "sampled tree": step((-1, -1, 0, 0), Draw.WITHOUT_REPLACEMENT, 2),
    "chosen tree": step((-1, -1, 0), Draw.POINT, 2),
}


def distances(verifier: Verifier, over: SmallStep) -> list[float]:
    """With the kernels if they can decide and with torch, at both ends of the intervals."""
    found = [over.distance(verifier, *way) for way in product(_PARAMS, (False, True))]
    assert min(outcomes for _, outcomes in found) > 10
    return [distance for distance, _ in found]


@pytest.mark.parametrize("name", STEPS)
def test_the_rule_is_exact(name: str) -> None:
    assert max(distances(Verifier(), STEPS[name])) < 1e-7


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_every_rule_is_exact_on_chains(rule: str) -> None:
    assert max(distances(Verifier(rule), STEPS["chain"])) < 1e-7


@pytest.mark.parametrize("name", [name for name in STEPS if name != "chosen tree"])
def test_drafts_are_a_distribution(name: str) -> None:
    listed = list(STEPS[name].drafts())
    assert sum(weight for _, weight in listed) == pytest.approx(1.0)
    assert len({tokens for tokens, _ in listed}) == len(listed)


def test_a_wrong_draft_distribution_is_detected() -> None:
    """The verifier gets another distribution than that from which the drafts were sampled."""

    class Misled(Verifier):
        def __call__(self, logits, spans, greedy=None):
            flat = torch.full_like(spans[0].tree.q, 1 / spans[0].tree.q.shape[1])
            spans = [replace(s, tree=replace(s.tree, q=flat)) for s in spans]
            return super().__call__(logits, spans)

    assert min(distances(Misled(), STEPS["chain"])) > 0.01


# -- faults of one way to decide alone ------------------------------------------------------------


def a_little_lenient(questions: Sequence[SampledSpan], uniforms: torch.Tensor) -> list[Any]:
    """The kernels with thresholds that are a hundredth too low: far from the intervals' middles."""
    lowered = uniforms.clone()
    first = min(question.node for question in questions if question.node is not None)
    lowered[first:] -= 0.01
    return decide_in_kernels(questions, lowered)


@pytest.mark.skipif(functions() is None, reason="the kernels are not there")
@pytest.mark.parametrize("fault", [without_residual, a_little_lenient])
def test_an_error_of_the_kernels_is_detected(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.verify.verifier.decide_in_kernels", fault)
    lower, upper, *of_torch = distances(Verifier(), STEPS["chain"])
    assert max(lower, upper) > 1e-3 and max(of_torch) < 1e-7


def test_an_error_of_torch_is_detected_beside_correct_kernels() -> None:
    class Late(Verifier):
        """Accepts a little more than its own chances say."""

        def uniforms(self, count: int, device: torch.device) -> torch.Tensor:
            raise AssertionError("they are scripted")

        def _decide(self, scores, rows, spans):
            decisions = super()._decide(scores, rows, spans)
            return decisions._replace(accepted=torch.ones_like(decisions.accepted))

    assert min(distances(Late(), STEPS["chain"])) > 0.01


# -- from a drafter's tree to a small case --------------------------------------------------------


def checked(tree: TokenTree, vocab: int = 50, rule: str = "auto") -> ExactCheck:
    root = softmax(vocab, seed=3).float()

    def target(strings: Strings) -> torch.Tensor:
        return torch.stack([root.roll(sum(string)) for string in strings])

    return enumerate_step(Verifier(rule), tree, target, "here", CPU)


def sampled(parents: tuple[int, ...], draw: Draw, vocab: int = 50) -> TokenTree:
    q = softmax(1, vocab, seed=4).float().repeat(len(parents), 1)
    return TokenTree(torch.arange(len(parents)), parents, draw, q)


@pytest.mark.parametrize("rule", ["auto", pytest.param("coupled", marks=pytest.mark.slow)])
def test_large_trees_are_truncated(rule: str) -> None:
    wide = (-1,) * 4 + (0,) * 4 + (1,) * 4
    for tree in (
        TokenTree(torch.arange(12), wide),
        sampled(wide, Draw.WITHOUT_REPLACEMENT),
        sampled(chain_parents(12), Draw.IID),
    ):
        check = checked(tree, rule=rule)
        assert check.passed, check
        assert check.nodes <= 4 and check.tokens <= 3 and check.outcomes > 50
    assert checked(sampled(wide, Draw.WITHOUT_REPLACEMENT)).nodes == 4


@pytest.mark.parametrize("vocab", [20, 60])
def test_a_draft_may_have_another_vocabulary(vocab: int) -> None:
    assert checked(sampled(chain_parents(2), Draw.IID, vocab)).passed


def test_a_small_vocabulary_is_enumerated_completely() -> None:
    check = checked(sampled(chain_parents(2), Draw.IID, 4), vocab=4)
    assert check.passed and check.vocabulary == 4


def test_a_draft_that_has_run_out_of_tokens() -> None:
    q = torch.zeros(2, 50)
    q[:, 7] = 1.0
    assert checked(TokenTree(torch.tensor([7, 8]), (-1, -1), Draw.WITHOUT_REPLACEMENT, q)).passed


def test_a_missing_residual_is_detected() -> None:
    """The token after a rejected draft is sampled from p itself."""

    class NoResidual(Verifier):
        def rule_probabilities(self, probs, spans):
            rule = super().rule_probabilities(probs, spans)
            return None if rule is None else RuleProbabilities(rule.accept, probs)

    for name in ("chain", "siblings", "sampled tree"):
        assert min(distances(NoResidual(), STEPS[name])) > 0.01
