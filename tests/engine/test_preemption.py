"""Sequences that give up their blocks: the same text with every drafter, and drafts begin anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.control.adaptive import AdaptiveController
from paceline.control.cost import CostModel
from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.costs import CostCurve, TargetCosts
from paceline.core.tree import TokenTree
from paceline.draft.base import LookupDrafter, with_members
from paceline.draft.model import ModelDrafter
from paceline.engine.driver import Drive, sequence
from support.every_drafter import SPECS, WEIGHTS

PARAMS = SamplingParams(max_tokens=36, ignore_eos=True)
BLOCKS = 6
PROMPTS = ["Once upon a time there was", "def add(a, b):\n    return", "What is 12 + 30? What is"]
HYBRID = "hybrid:suffix+model:{draft}".format(**WEIGHTS)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("paceline/tiny", draft="none", dtype="float32", prefix_sharing=False)


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[list[int]]:
    return [list(one.token_ids) for one in plain.generate(PROMPTS, PARAMS)]


def tight(plain: LLM, spec: str | list[str], length: int | str = 4) -> LLM:
    """Six blocks for three sequences that grow to three each."""
    llm = plain.with_draft(spec, draft_length=length, max_batch_size=3, prefix_sharing=False)
    pool = llm.engine.cache.pool
    pool.allocate(pool.available - BLOCKS)
    return llm


class Steady(AdaptiveController):
    """Every step takes a second, a pass of the drafter next to nothing."""

    def observe(
        self, commits: Sequence[Commit], seconds: float, drafting: float | None = None
    ) -> None:
        super().observe(commits, 1.0, 0.001)


def steady(known: AdaptiveController) -> Steady:
    """In place of one that measures: the same drafters, at a thousandth of a step."""
    target = TargetCosts((1,), (CostCurve((1, 101), (1.0, 1.1)),))
    pass_seconds = CostCurve((1,), (0.001,))
    drafters = {
        name: replace(profile, seconds=pass_seconds)
        for name, profile in known.cost.drafters.items()
    }
    return Steady(CostModel(target, drafters), known.members, known._lookups.drafters)


def holders(llm: LLM) -> list[object]:
    """Whatever may know something of a sequence for drafting."""
    keepers = [*with_members(llm.engine.drafter), llm.engine.predictions, llm.engine.controller]
    if isinstance(llm.engine.controller, AdaptiveController):
        control = llm.engine.controller
        decided = SimpleNamespace(**control._batch_decision._asdict())
        keepers += [control._lookups, control.learner, decided, control.cost.acceptance]
    return keepers


def knows(llm: LLM, seq_id: int) -> set[str]:
    return {
        f"{type(owner).__name__}.{name}"
        for owner in holders(llm)
        for name, value in vars(owner).items()
        if isinstance(value, dict) and seq_id in value
    }


def decode(llm: LLM) -> tuple[list[list[int]], set[str]]:
    """Texts, and what was still known of sequences right after they had been preempted."""
    engine, stale = llm.engine, set()
    seqs = [sequence(llm.tokenizer.encode(prompt), PARAMS) for prompt in PROMPTS]
    plan, propose = engine.scheduler.plan, engine.drafter.propose
    victims: list[int] = []

    def planned(*args: Any) -> Plan:
        try:
            return plan(*args)
        finally:
            victims[:] = engine.scheduler.preempted

    def proposed(part: Plan) -> list[TokenTree]:
        for seq_id in victims:
            stale.update(knows(llm, seq_id))
        return propose(part)

    engine.scheduler.plan = planned  # type: ignore[method-assign]
    engine.drafter.propose = proposed  # type: ignore[method-assign]
    drive = Drive(engine, seqs).run()
    assert engine.scheduler.preemptions > 0 and drive.counts.target_steps > 0
    for seq in seqs:
        assert not knows(llm, seq.seq_id)
    assert engine.cache.pool.available == BLOCKS
    return [seq.tokens for seq in seqs], stale


@pytest.mark.broad
@pytest.mark.parametrize("name", [*SPECS, "hybrid of a model", "a list"])
def test_the_same_text_and_nothing_stale(plain: LLM, expected: list[list[int]], name: str) -> None:
    spec = {"hybrid of a model": HYBRID, "a list": [SPECS["model"], "ngram"]}.get(name) or SPECS[
        name
    ]
    llm = tight(plain, spec)
    texts, stale = decode(llm)
    given = [len(llm.tokenizer.encode(prompt)) for prompt in PROMPTS]
    assert [own[n:] for own, n in zip(texts, given, strict=True)] == expected
    assert not stale


@pytest.mark.parametrize("team", [False, True])
def test_the_controller_begins_anew_with_every_drafter(plain: LLM, team: bool) -> None:
    """Not only with a hybrid's: a model's cache is gone, so it has to read again."""
    llm = tight(plain, HYBRID if team else SPECS["model"], "auto")
    engine, known = llm.engine, llm.engine.controller
    assert isinstance(known, AdaptiveController)
    engine.controller = steady(known)
    (model,) = (own for own in with_members(engine.drafter) if isinstance(own, ModelDrafter))
    (name,) = (own for own, entry in known.cost.drafters.items() if entry.needs_prefill)
    observe, drafted = model.observe, []

    def observed(commits: Sequence[Commit], out: ModelOutput) -> None:
        observe(commits, out)
        drafted.extend(commits)
        for seq_id, read in engine.controller.learner._read.items():  # type: ignore[attr-defined]
            state = model._rows.get(seq_id)
            assert read.get(name, 0) <= (state.cached + 5 if state else 0)

    model.observe = observed  # type: ignore[method-assign]
    _, stale = decode(llm)
    assert not stale and any(commit.drafted for commit in drafted)


def test_the_engine_asks_the_drafter_that_it_has_now(plain: LLM, expected: list[list[int]]) -> None:
    """Another one may be put in its place: blocks are reserved for its drafts, it is told who has
    been preempted, and predictions leave it where it is."""

    class Wide(LookupDrafter):
        name = "wide"

        def __init__(self) -> None:
            super().__init__(plain.engine.cache.device)
            self.forgotten: list[int] = []
            self.asked: set[int] = set()

        def max_nodes(self, length: int) -> int:
            self.asked.add(length)
            return 3 * length

        def propose_one(self, item: Slice) -> tuple[Sequence[int], Sequence[int]]:
            return [1, 2, 3] * item.draft_length, [-1] * (3 * item.draft_length)

        def forget(self, seq_id: int) -> None:
            self.forgotten.append(seq_id)

    llm = tight(plain, "ngram", 1)
    other = llm.engine.drafter = Wide()
    told = replace(PARAMS, prediction=tuple(expected[0]))
    completions = llm.generate(PROMPTS, [told, PARAMS, PARAMS])
    assert [list(c.token_ids) for c in completions] == expected
    assert llm.engine.drafter is other and other.asked
    assert len(other.forgotten) == llm.engine.scheduler.preemptions + len(PROMPTS)
