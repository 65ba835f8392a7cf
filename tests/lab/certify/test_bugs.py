"""Planted bugs of a drafter, the rule and the cache: each must be found, and named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.core.batch import Plan, Span, Verdict
from paceline.core.draws import sample_by_inversion
from paceline.core.params import SamplingParams
from paceline.core.sampling import Rows
from paceline.core.tree import Draw, TokenTree, chain_parents, depths_of
from paceline.lab.certify.certificate import Certificate
from paceline.lab.certify.effort import Effort
from paceline.lab.certify.run import Certifier
from paceline.llm import LLM
from paceline.verify.rules import RuleProbabilities, pad_to_same_width
from paceline.verify.verifier import DeviceDecisions, Verifier

Named = Sequence[tuple[str, Sequence[int]]]
SMALL = Effort(num_prompts=2, max_tokens=16, prefixes=1, samples=600)
WARM = SamplingParams(temperature=1.0)
COOL = SamplingParams(temperature=0.5)  # sharper distributions, which differ more


def parts(certificate: Certificate) -> set[str]:
    assert not certificate.lossless
    assert certificate.verdict.startswith("NOT LOSSLESS: ")
    return {problem.part for problem in certificate.problems}


def outcome(llm: LLM, prompts: Named, params: SamplingParams = WARM) -> Certificate:
    certifier = Certifier(llm, prompts, params, SMALL)
    certifier.run()
    return certifier.certificate()


# -- the drafter ----------------------------------------------------------------------------------


class Altered:
    """A drafter whose sampled chains are changed before they are returned."""

    def __init__(self, drafter, change: Callable[[TokenTree], TokenTree]) -> None:
        self._drafter, self._change = drafter, change

    def propose(self, plan: Plan) -> list[TokenTree]:
        trees = self._drafter.propose(plan)
        return [self._change(t) if t.draw is Draw.IID and len(t) else t for t in trees]

    def __getattr__(self, name: str):
        return getattr(self._drafter, name)


def temperature_forgotten(tree: TokenTree) -> TokenTree:
    """Declares the distribution at temperature 1, but samples at 0.5."""
    warm = tree.q.sqrt()
    return replace(tree, q=warm / warm.sum(-1, keepdim=True))


def argmax_with_softmax(tree: TokenTree) -> TokenTree:
    """A chosen token that is declared as sampled."""
    return TokenTree(tree.q[:1].argmax(-1), (-1,), Draw.IID, tree.q[:1])


def pruned_by_its_chance(tree: TokenTree) -> TokenTree:
    """Drops a node because of its own probability."""
    likely = tree.q.gather(1, tree.tokens[:, None])[:, 0] >= 0.1
    keep = int(likely.cumprod(0).sum())
    if not keep:
        return TokenTree.empty()
    return TokenTree(tree.tokens[:keep], chain_parents(keep), Draw.IID, tree.q[:keep])


@pytest.mark.parametrize(
    ("change", "params"),
    [
        (temperature_forgotten, COOL),
        (argmax_with_softmax, WARM),
        (pruned_by_its_chance, COOL),
    ],
)
def test_a_drafter_with_a_wrong_declared_distribution(
    llm: LLM, prompts: Named, change, params: SamplingParams
) -> None:
    llm.engine.drafter = Altered(llm.engine.drafter, change)
    faulty = parts(outcome(llm, prompts, params))
    assert {"drafter", "sampling"} <= faulty
    assert not faulty & {"greedy", "seeded", "rule"}


# -- the rule -------------------------------------------------------------------------------------


class NoResidual(Verifier):
    """Rejected drafts are replaced by samples from p itself."""

    def rule_probabilities(
        self, probs: torch.Tensor, spans: Sequence[Span]
    ) -> RuleProbabilities | None:
        rule = super().rule_probabilities(probs, spans)
        return (
            None
            if rule is None
            else RuleProbabilities(rule.accept, pad_to_same_width(probs, rule.stop)[0])
        )


class Lenient(Verifier):
    """Accepts arbitrary tokens every other time."""

    def _decide(self, scores: torch.Tensor, rows: Rows, checks: Sequence[Span]) -> DeviceDecisions:
        decisions = super()._decide(scores, rows, checks)
        if decisions.accepted is None:
            return decisions
        liked = torch.rand(len(decisions.accepted), generator=self.generator) < 0.5
        return DeviceDecisions(decisions.choices, decisions.accepted | liked)


class NoBonus(Verifier):
    """Nothing after a fully accepted draft."""

    def __call__(self, logits: torch.Tensor, checks: Sequence[Span], *rest: Any) -> list[Verdict]:
        verdicts = super().__call__(logits, checks, *rest)
        return [
            replace(verdict, tokens=verdict.tokens[:-1])
            if check.verify_rows > 1 and len(verdict.path) == check.verify_rows - 1
            else verdict
            for check, verdict in zip(checks, verdicts, strict=True)
        ]


@pytest.mark.parametrize(
    ("kind", "expected"), [(NoResidual, {"rule"}), (Lenient, {"rule", "sampling"})]
)
def test_a_wrong_rule(llm: LLM, prompts: Named, kind: type[Verifier], expected: set[str]) -> None:
    """A missing residual is too small a bias for so few samples; the enumeration sees any."""
    llm.engine.verifier = kind("auto", torch.Generator())
    faulty = parts(outcome(llm, prompts, COOL))
    assert expected <= faulty <= {"rule", "sampling"}


def test_a_missing_bonus_token(llm: LLM, prompts: Named) -> None:
    llm.engine.verifier = NoBonus("auto", torch.Generator())
    certificate = outcome(llm, prompts)
    assert "rule" in parts(certificate)
    assert any(check.distance == 1.0 for check in certificate.rows("exact"))


def test_an_ignored_seed(llm: LLM, prompts: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)

    def unseeded(distributions: torch.Tensor, rows: Rows) -> torch.Tensor:
        return sample_by_inversion(
            distributions, torch.rand(len(distributions), generator=generator)
        )

    monkeypatch.setattr("paceline.verify.verifier.can_use_kernels", lambda *_: False)
    monkeypatch.setattr("paceline.verify.verifier.coupled_tokens", unseeded)
    assert parts(outcome(llm, prompts)) == {"seeded"}


# -- cache and positions --------------------------------------------------------------------------


def test_a_cache_row_off_by_one(llm: LLM, prompts: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted tokens keep the keys and values of the row before theirs."""

    def shifted(seq_id: int, base: int, path: Sequence[int]) -> list[tuple[int, int, int]]:
        return [(seq_id, base + node - 1, base + rank) for rank, node in enumerate(path)]

    monkeypatch.setattr("paceline.engine.engine.path_moves", shifted)
    certificate = outcome(llm, prompts)
    assert {"greedy", "seeded"} <= parts(certificate)
    assert all(item.difference.gap > 1e-3 for item in certificate.rows("divergences"))


def test_positions_off_by_one(
    on_reference: LLM, prompts: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(span: Span) -> list[int]:
        base = span.context + span.pending
        depths = depths_of(span.parents)[span.first_new :]
        return [*range(span.context, base), *(base + depth for depth in depths)]

    monkeypatch.setattr(Span, "positions", property(shifted))
    assert {"greedy", "seeded", "sampling"} <= parts(outcome(on_reference, prompts))
