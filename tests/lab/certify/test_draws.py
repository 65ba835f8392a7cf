"""Honest draws pass the recorder's test in every kind of tree; others do not."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from paceline.core.batch import Plan
from paceline.core.tree import Draw, TokenTree
from paceline.lab.certify.draws import DrawCounts, RecordingDrafter

DISTRIBUTION = torch.softmax(torch.arange(8) / 2.0, -1)


class Sampler:
    """Two siblings without replacement, or one token, from a fixed distribution; declares another
    one."""

    name = "sampler"
    features: tuple[int, ...] = ()

    def __init__(self, drawn: torch.Tensor, declared: torch.Tensor, siblings: int) -> None:
        self._drawn, self._declared, self._siblings = drawn, declared, siblings
        self._generator = torch.Generator().manual_seed(0)

    def propose(self, plan: Plan) -> list[TokenTree]:
        n = self._siblings
        tokens = torch.multinomial(self._drawn, n, generator=self._generator)
        draw = Draw.IID if n == 1 else Draw.WITHOUT_REPLACEMENT
        return [TokenTree(tokens, (-1,) * n, draw, self._declared.repeat(n, 1))]


class OneSlice:
    slices = (SimpleNamespace(seq=SimpleNamespace(tokens=[1, 2])),)


def p_value(drawn: torch.Tensor, declared: torch.Tensor, siblings: int) -> float:
    draws = DrawCounts()
    recorder = RecordingDrafter(Sampler(drawn, declared, siblings), draws)
    for _ in range(600):
        recorder.propose(OneSlice())
    assert draws.total == 600 * siblings
    outcome = draws.test()
    assert outcome is not None
    return outcome.p_value


def test_correct_draws_pass() -> None:
    for siblings in (1, 2, 3):
        assert p_value(DISTRIBUTION, DISTRIBUTION, siblings) > 1e-3


def test_draws_at_another_temperature_fail() -> None:
    for siblings in (1, 2):
        assert p_value(DISTRIBUTION.square(), DISTRIBUTION, siblings) < 1e-6


def test_impossible_draws_are_counted() -> None:
    declared = DISTRIBUTION.clone()
    declared[7] = 0.0
    draws = DrawCounts()
    recorder = RecordingDrafter(Sampler(DISTRIBUTION, declared / declared.sum(), 1), draws)
    for _ in range(100):
        recorder.propose(OneSlice())
    assert draws.impossible > 10


def test_deterministic_drafts_have_nothing_to_test() -> None:
    assert DrawCounts().test() is None


def test_the_largest_tree_of_each_kind_is_kept() -> None:
    declared = DISTRIBUTION.clone()
    recorder = RecordingDrafter(Sampler(DISTRIBUTION, declared, 1), DrawCounts())
    recorder.propose(OneSlice())
    declared.zero_()  # drafters use their memory again
    recorder._drafter = Sampler(DISTRIBUTION, DISTRIBUTION, 3)
    recorder.propose(OneSlice())
    recorder._drafter = Sampler(DISTRIBUTION, DISTRIBUTION, 2)
    recorder.propose(OneSlice())
    assert set(recorder.examples) == {Draw.IID, Draw.WITHOUT_REPLACEMENT}
    tokens, tree = recorder.examples[Draw.IID]
    assert tokens == (1, 2) and tree.q is not None
    assert torch.equal(tree.q[0], DISTRIBUTION)
    assert len(recorder.examples[Draw.WITHOUT_REPLACEMENT][1]) == 3
