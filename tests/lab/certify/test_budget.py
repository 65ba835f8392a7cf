"""A certification that ends early: in a fair order, with an honest verdict."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch

from paceline.core.params import SamplingParams
from paceline.lab.budget import Budget
from paceline.lab.certify.decoding import Start, next_probabilities
from paceline.lab.certify.effort import Effort
from paceline.lab.certify.run import Certifier
from paceline.llm import LLM
from support.engine_models import reference_logits
from support.simulated_clock import Clock

InterruptAt = Callable[[int], Callable[[str], None]]
Named = Sequence[tuple[str, Sequence[int]]]
SMALL = Effort(num_prompts=2, max_tokens=16, prefixes=2, samples=600)
TEXTS = 2 * 3  # tasks for each prompt: two kinds in three settings
PREFIX = 10 + 1


def ended_after(llm: LLM, prompts: Named, seconds: float) -> Certifier:
    """A run in which every task takes a second."""
    clock = Clock()

    def advance(shown: str) -> None:
        clock.now += 1

    certifier = Certifier(llm, prompts, None, SMALL, Budget(seconds, clock))
    certifier.run(advance)
    return certifier


@pytest.mark.parametrize(
    ("seconds", "lack"),
    [
        (1, "whole texts compared: 0"),
        (TEXTS + 5, "no prefix has all its 600 samples"),
        (TEXTS + PREFIX - 1, "the rule was not enumerated"),
        (TEXTS + PREFIX, "whole texts compared: 1"),
    ],
)
def test_too_little_evidence_certifies_nothing(
    llm: LLM, prompts: Named, seconds: float, lack: str
) -> None:
    certificate = ended_after(llm, prompts, seconds).certificate()
    assert not certificate.lossless and not certificate.problems
    assert certificate.verdict.startswith("NOT ENOUGH: "), certificate.verdict
    assert lack in certificate.verdict
    assert "more --seconds test the rest" in certificate.completed


def test_two_texts_and_a_prefix_are_enough(llm: LLM, prompts: Named) -> None:
    certificate = ended_after(llm, prompts, 2 * TEXTS + PREFIX).certificate()
    assert certificate.lossless, certificate.verdict
    assert not certificate.facts["complete"]
    assert "2 of 2 texts and the samples of 1 of 2 prefixes" in certificate.completed


@pytest.fixture(scope="module")
def whole(loaded: LLM, prompts: Named) -> tuple[Certifier, list[str]]:
    """A run without a time limit, and its progress messages."""
    certifier = Certifier(loaded, prompts, None, SMALL)
    said: list[str] = []
    certifier.run(said.append)
    return certifier, said


def test_without_an_end_everything_is_tested(whole: tuple[Certifier, list[str]]) -> None:
    certifier, said = whole
    assert len(said) == len(list(certifier.tasks())) == 2 * (TEXTS + PREFIX)
    certificate = certifier.certificate()
    assert certificate.facts["complete"] and certificate.lossless
    assert [len(prefix.drawn) for prefix in certifier.prefixes] == [600, 600]


def test_samples_that_see_little_certify_nothing(
    whole: tuple[Certifier, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = whole[0].certificate()
    bias = certificate.facts["smallest_bias"]
    assert 0 < bias < 0.25
    monkeypatch.setattr("paceline.lab.certify.certificate.MAX_BIAS", bias / 2)
    lack = f"NOT ENOUGH: only a bias of {bias:.0%} or more would have been detected"
    assert whole[0].certificate().verdict.startswith(lack)


def test_no_whole_prefix_and_no_rule_certify_nothing(whole: tuple[Certifier, list[str]]) -> None:
    """It said CERTIFIED beside "0 of 4 prefixes" and "0 of 8000 samples"."""
    certifier = copy.copy(whole[0])
    certifier.exact = []
    assert "the rule was not enumerated" in certifier.certificate().verdict
    certifier.prefixes = []
    certificate = certifier.certificate()
    assert "no prefix has all its 600 samples" in certificate.verdict
    assert certificate.verdict.startswith("NOT ENOUGH: ") and not certificate.lossless


def test_an_interruption_leaves_whole_tasks(
    llm: LLM, prompts: Named, interrupt_at: InterruptAt
) -> None:
    certifier = Certifier(llm, prompts, None, SMALL)
    with pytest.raises(KeyboardInterrupt):
        certifier.run(interrupt_at(4))
    assert sum(check.texts for check in certifier.checks.values()) == 3
    assert certifier.certificate().verdict.startswith("NOT ENOUGH: ")
    assert not llm.engine.has_work


@pytest.mark.parametrize("given", [3, 16, 17, 40])
def test_distributions_equal_those_of_one_forward(llm: LLM, given: int) -> None:
    start = Start(tuple(range(1, given + 1)), SamplingParams(temperature=1.0), (5, 6))
    strings = [(), (7,), (8, 9), (7, 7, 7)]
    for string, probs in zip(strings, next_probabilities(llm.target, start, strings), strict=True):
        (*_, last) = reference_logits(llm.target, [*start.tokens, *string])
        assert torch.allclose(probs, last.softmax(-1), atol=1e-5), string


def test_plain_decoding_has_a_cache_for_its_texts_alone(llm: LLM, prompts: Named) -> None:
    """With one for full contexts beside the other, starting took half a minute of 30 seconds."""
    certifier = Certifier(llm, prompts, None, SMALL)
    given, plain = llm.engine.cache, certifier.plain.cache
    batch = certifier.plain.scheduler.config.max_batch_size
    longest = max(len(prompt) for _, prompt in prompts) + SMALL.max_tokens
    assert batch * (longest // given.block_size + 1) <= plain.num_blocks < given.num_blocks
