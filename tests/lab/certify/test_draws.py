"""Honest draws pass the recorder's test in every kind of tree; others do not."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from paceline.core.tree import Draw, TokenTree
from paceline.lab.certify.draws import DraftRecorder, Examples

DISTRIBUTION = torch.softmax(torch.arange(8) / 2.0, -1)


class OneSlice:
    slices = (SimpleNamespace(seq=SimpleNamespace(tokens=[1, 2])),)


PLAN: Any = OneSlice()


def samples(
    count: int, drawn: torch.Tensor, declared: torch.Tensor, siblings: int
) -> Iterator[TokenTree]:
    """Trees of siblings without replacement, or of one token, from the distribution ``drawn``,
    which declare another one."""
    generator = torch.Generator().manual_seed(0)
    draw = Draw.IID if siblings == 1 else Draw.WITHOUT_REPLACEMENT
    for _ in range(count):
        tokens = torch.multinomial(drawn, siblings, generator=generator)
        yield TokenTree(tokens, (-1,) * siblings, draw, declared.repeat(siblings, 1))


def p_value(drawn: torch.Tensor, declared: torch.Tensor, siblings: int) -> float:
    recorder = DraftRecorder()
    for tree in samples(600, drawn, declared, siblings):
        recorder.record({}, PLAN, [tree])
    assert recorder.total == 600 * siblings
    outcome = recorder.test()
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
    recorder = DraftRecorder()
    for tree in samples(100, DISTRIBUTION, declared / declared.sum(), 1):
        recorder.record({}, PLAN, [tree])
    assert recorder.impossible > 10


def test_deterministic_drafts_have_nothing_to_test() -> None:
    assert DraftRecorder().test() is None


def test_the_largest_tree_of_each_kind_is_kept() -> None:
    declared = DISTRIBUTION.clone()
    recorder, examples = DraftRecorder(), Examples()
    (tree,) = samples(1, DISTRIBUTION, declared, 1)
    recorder.record(examples, PLAN, [tree])
    assert tree.q is not None
    tree.q.zero_()  # drafters use their memory again
    for siblings in (3, 2):
        recorder.record(examples, PLAN, list(samples(1, DISTRIBUTION, DISTRIBUTION, siblings)))
    assert set(examples) == {Draw.IID, Draw.WITHOUT_REPLACEMENT}
    tokens, tree = examples[Draw.IID]
    assert tokens == (1, 2) and tree.q is not None
    assert torch.equal(tree.q[0], DISTRIBUTION)
    assert len(examples[Draw.WITHOUT_REPLACEMENT][1]) == 3
