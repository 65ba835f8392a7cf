"""The enumeration, on small cases with known answers."""

from __future__ import annotations

import pytest
import torch

from paceline.core.tree import Draw, chain_parents
from paceline.lab.certify.steps import Case, TooManyOutcomes, drafts, step_error
from paceline.verify.verifier import Verifier


def distributions(width: int, depth: int, seed: int) -> dict[tuple[int, ...], torch.Tensor]:
    import itertools

    generator = torch.Generator().manual_seed(seed)
    return {
        string: torch.softmax(1.5 * torch.randn(width, generator=generator).double(), -1)
        for length in range(depth + 1)
        for string in itertools.product(range(width), repeat=length)
    }


def case(parents: tuple[int, ...], draw: Draw, depth: int, width: int = 3) -> Case:
    tokens = tuple(i % width for i in range(len(parents)))
    target = distributions(width, depth, 0)
    return Case(parents, draw, target, distributions(width, depth, 1), tokens)


CASES = {
    "chain": case(chain_parents(2), Draw.IID, 2),
    "siblings": case((-1, -1), Draw.WITHOUT_REPLACEMENT, 1),
    "all siblings": case((-1, -1, -1), Draw.WITHOUT_REPLACEMENT, 1),
    "chosen tree": case((-1, -1, 0), Draw.POINT, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rule_is_exact(name: str) -> None:
    distance, outcomes = step_error(Verifier(), CASES[name])
    assert distance < 1e-7
    assert outcomes > 10


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_every_rule_is_exact_on_chains(rule: str) -> None:
    assert step_error(Verifier(rule), CASES["chain"])[0] < 1e-7


@pytest.mark.parametrize("name", ["chain", "siblings", "all siblings"])
def test_drafts_are_a_distribution(name: str) -> None:
    listed = list(drafts(CASES[name]))
    assert sum(weight for _, weight in listed) == pytest.approx(1.0)
    assert len({tokens for tokens, _ in listed}) == len(listed)


def test_a_wrong_draft_distribution_shows() -> None:
    """The verifier is told another distribution than the drafts were drawn from."""
    honest = CASES["chain"]

    class Misled(Verifier):
        def __call__(self, logits, checks, greedy=None):
            from dataclasses import replace

            flat = torch.full_like(checks[0].tree.q, 1 / 3)
            checks = [replace(c, tree=replace(c.tree, q=flat)) for c in checks]
            return super().__call__(logits, checks)

    assert step_error(Misled(), honest)[0] > 0.01


def test_too_many_outcomes_are_refused() -> None:
    wide = case((-1,) * 4 + (0,) * 4 + (1,) * 4, Draw.POINT, 2, width=4)
    with pytest.raises(TooManyOutcomes):
        step_error(Verifier(), wide)
