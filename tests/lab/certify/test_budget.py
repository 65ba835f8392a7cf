"""A certification that ends early: in a fair order, with an honest verdict."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from paceline.core.batch import Batch
from paceline.core.params import SamplingParams
from paceline.lab.certify.decoding import Scorer, Start
from paceline.lab.certify.effort import Effort
from paceline.lab.certify.run import Certifier
from paceline.llm import LLM
from paceline.model.paged.cache import PagedCache
from support.engine_models import reference_logits
from support.simulated_clock import SecondEach

InterruptAt = Callable[[int], Callable[[str], None]]
Named = Sequence[tuple[str, Sequence[int]]]
SMALL = Effort(num_prompts=2, max_tokens=16, prefixes=2, samples=600)


# -- the order ------------------------------------------------------------------------------------


def test_any_beginning_of_a_run_covers_all_tests(llm: LLM, prompts: Named) -> None:
    certifier = Certifier(llm, prompts, None, replace(SMALL, num_prompts=3))
    seen: list[tuple[int, list[int]]] = []  # texts compared, samples of each prefix

    def advance(shown: str) -> None:
        drawn = [len(prefix.drawn) for prefix in certifier.evidence.prefixes]
        state = certifier.num_compared, drawn
        if not seen or state != seen[-1]:
            seen.append(state)

    certifier.run(advance)
    texts = [max(compared for compared, drawn in seen if sum(drawn) <= n) for n in (0, 180, 300)]
    assert texts == [1, 2, 3]
    assert [drawn for _, drawn in seen if len(drawn) == 1][-1] == [600], "one prefix at a time"


# -- what a part of it is worth -------------------------------------------------------------------


@pytest.fixture(autouse=True)
def exact_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.lab.budget._CAUTION", 1.0)


def ended_after(
    llm: LLM,
    prompts: Named,
    seconds: float,
    effort: Effort = SMALL,
) -> tuple[Certifier, list[str]]:
    """A run in which every task takes a second, and its progress messages."""
    budget = SecondEach(seconds)
    certifier = Certifier(llm, prompts, None, effort, budget=budget)
    certifier.evidence.tokens = effort.max_tokens
    said: list[str] = []
    certifier.run(said.append)
    return certifier, said


@pytest.mark.parametrize(
    ("seconds", "lack"),
    [(0.5, "no greedy text"), (6.5, "no seeded text"), (8.5, "no prefix has enough samples")],
)
def test_too_little_evidence_certifies_nothing(
    llm: LLM, prompts: Named, seconds: float, lack: str
) -> None:
    certifier, said = ended_after(llm, prompts, seconds)
    assert said
    certificate = certifier.certificate()
    assert not certificate.lossless and not certificate.problems and not certificate.enough
    assert certificate.verdict.startswith("NOT ENOUGH: "), certificate.verdict
    assert lack in certificate.verdict
    assert "completed" in certificate.verdict
    lines = [block.text for block in certificate.report().sections[-1].blocks]  # type: ignore[union-attr]
    assert sum("completed" in text for text in lines) == 1


def test_few_samples_are_not_enough_however_well_they_fit(
    llm: LLM, prompts: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "paceline.lab.certify.certificate.MAX_BIAS", 0.2
    )  # these distributions have few cells
    effort = Effort(num_prompts=2, max_tokens=16, prefixes=2, samples=340)
    certifier, _ = ended_after(llm, prompts, 17.9, effort=effort)
    certificate = certifier.certificate()
    (prefix,) = certifier.evidence.prefixes
    assert len(prefix.drawn) == 102
    assert certificate.record()["budget"]["prefixes"] == 0, "it has not all its samples"
    assert certificate.facts["smallest_bias"] > 0.2
    assert f"only a bias of {certificate.facts['smallest_bias']:.0%} or more" in certificate.verdict
    assert not certificate.lossless


@pytest.fixture(scope="module")
def whole(loaded: LLM, prompts: Named) -> tuple[Certifier, list[str]]:
    """A run without a time limit, and its progress messages."""
    certifier = Certifier(loaded, prompts, None, SMALL)
    said: list[str] = []
    certifier.run(said.append)
    return certifier, said


@pytest.fixture
def complete(whole: tuple[Certifier, list[str]]) -> Certifier:
    """The same run with a copy of the evidence, from which a test may remove parts."""
    certifier = copy.copy(whole[0])
    certifier.evidence = copy.deepcopy(certifier.evidence)
    assert certifier.certificate().lossless
    return certifier


def test_texts_that_no_setting_finished_certify_nothing(complete: Certifier) -> None:
    """It said CERTIFIED beside "0 of 8 texts": each setting had seen some other text."""
    certifier = complete
    for number in range(certifier.num_texts):
        certifier.evidence.compared[number] -= 1
    certificate = certifier.certificate()
    assert certificate.verdict.startswith("NOT ENOUGH: whole texts compared: 0, not 2")


def test_no_whole_prefix_and_no_rule_certify_nothing(complete: Certifier) -> None:
    """It said CERTIFIED beside "0 of 4 prefixes" and "0 of 8000 samples"."""
    certifier = complete
    unchecked = copy.deepcopy(certifier.evidence)
    for prefix in certifier.evidence.prefixes:
        prefix.exact.clear()
    assert "the rule was not enumerated" in certifier.certificate().verdict
    certifier.evidence = unchecked
    for prefix in certifier.evidence.prefixes:
        del prefix.drawn[-1]
    assert "0 prefixes have all their samples, not 1" in certifier.certificate().verdict
    certifier.evidence.prefixes.clear()
    certificate = certifier.certificate()
    assert certificate.facts["budget"]["samples"] == 0
    assert certificate.verdict.startswith("NOT ENOUGH: ") and not certificate.lossless


def test_a_certificate_states_the_detectable_bias(llm: LLM, prompts: Named) -> None:
    certifier, said = ended_after(llm, prompts, 34)
    assert said[0].startswith("greedy") and any(": sampling" in what for what in said)
    certificate = certifier.certificate()
    assert certifier.budget.spent <= 34
    assert certificate.lossless and not certificate.facts["complete"], certificate.verdict
    record = certificate.record()
    # The second prefix would have had a few samples only: it was not begun.
    assert record["enough"] and record["budget"]["prefixes"] == 1
    assert record["missing_evidence"] == ()
    assert 0 < record["smallest_bias"] <= 0.25
    last = certificate.report().sections[-1]
    lines = [block.text for block in last.blocks]  # type: ignore[union-attr]
    assert any("1 of 2 prefixes" in text and "smallest bias" in text for text in lines)
    assert any("more --seconds test the rest" in text for text in lines)


def test_a_prefix_is_begun_if_all_of_it_fits(llm: LLM, prompts: Named) -> None:
    certifier, _ = ended_after(llm, prompts, 70)
    assert [len(prefix.drawn) for prefix in certifier.evidence.prefixes] == [600, 600]
    assert certifier.certificate().facts["complete"]


def test_without_an_end_everything_is_tested(whole: tuple[Certifier, list[str]]) -> None:
    certifier, said = whole
    assert len(said) == certifier.num_tasks
    certificate = certifier.certificate()
    assert certificate.facts["complete"] and certificate.lossless
    assert certificate.facts["budget"]["texts"] == certificate.facts["budget"]["texts_wanted"] == 2
    assert certificate.facts["budget"]["samples"] == 2 * 600


def test_an_interruption_leaves_whole_pieces(
    llm: LLM, prompts: Named, interrupt_at: InterruptAt
) -> None:
    certifier = Certifier(llm, prompts, None, SMALL)
    with pytest.raises(KeyboardInterrupt):
        certifier.run(interrupt_at(6))
    assert certifier.evidence.compared[0] == 3 and len(certifier.evidence.plain) == 2
    assert certifier.certificate().verdict.startswith("NOT CERTIFIED: interrupted")


@pytest.mark.parametrize("given", [3, 16, 17, 40])
def test_distributions_equal_those_of_one_forward(llm: LLM, given: int) -> None:
    start = Start(tuple(range(1, given + 1)), SamplingParams(temperature=1.0), (5, 6))
    scorer = Scorer(llm.target, start)
    strings = [(), (7,), (8, 9), (7, 7, 7)]
    for distributions in (scorer.at_once(strings), scorer.stepwise(strings)):
        for string, distribution in zip(strings, distributions, strict=True):
            (*_, last) = reference_logits(llm.target, [*start.tokens, *string])
            assert torch.allclose(distribution, last.softmax(-1), atol=1e-5), string


def test_the_common_beginning_is_prefilled_once(llm: LLM) -> None:
    """64 texts behind 100 tokens are not 6,400 rows, as they were."""
    rows: list[int] = []

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(llm.target, name)

        def __call__(self, batch: Batch, cache: PagedCache) -> object:
            rows.append(len(batch.input_ids))
            return llm.target(batch, cache)

    start = Start(tuple(range(1, 101)), SamplingParams(temperature=1.0))
    scorer = Scorer(Counting(), start)  # type: ignore[arg-type]
    strings = [(n,) for n in range(64)]
    scorer.at_once(strings)
    scorer.stepwise(strings)
    begun = sum(rows)
    rows.clear()
    scorer.at_once(strings)
    scorer.stepwise(strings)
    assert sum(rows) <= 2 * 64 * 6
    assert begun <= 2048 + 96 + 2 * 64 * 6


def test_plain_decoding_has_a_cache_for_its_texts_alone(llm: LLM, prompts: Named) -> None:
    """With one for full contexts beside the other, starting took half a minute of 30 seconds."""
    certifier = Certifier(llm, prompts, None, SMALL)
    given, plain = llm.engine.cache, certifier.plain.cache
    batch = certifier.plain.scheduler.config.max_batch_size
    longest = max(len(prompt) for _, prompt in prompts) + SMALL.max_tokens
    assert batch * (longest // given.block_size + 1) <= plain.num_blocks < given.num_blocks
