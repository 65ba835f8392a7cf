"""Engines on tiny random models: the right text, and what is counted beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.core.params import SamplingParams
from paceline.lab.bench.engines import EngineFactory, Paceline, parse_method
from paceline.lab.bench.runner import BenchRequest, Method, TimedRun
from paceline.llm import LLM
from support.tiny_models import TinyPair

PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9, 10, 11], [12, 13, 14, 15, 16], [20, 21]]


@pytest.fixture(scope="module")
def llm(tiny_pair: TinyPair) -> Iterator[LLM]:
    yield LLM(tiny_pair.target, draft="none", dtype="float32")


@pytest.fixture(scope="module")
def factory(llm: LLM) -> EngineFactory:
    return EngineFactory(llm)


def requests(tokens: int = 12, **options: Any) -> list[BenchRequest]:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, **options)
    return [BenchRequest(tuple(prompt), params) for prompt in PROMPTS]


def texts(outcome: TimedRun) -> list[list[int]]:
    return [list(answer.tokens) for answer in outcome.answers]


def check(outcome: TimedRun, tokens: int = 12) -> None:
    """What holds of every run to the end of all answers."""
    assert outcome.tokens == tokens * len(outcome.answers)
    for answer in outcome.answers:
        times = [time for time, _ in answer.arrivals]
        assert times[0] > 0 and times == sorted(times) and times[-1] <= outcome.seconds
        assert sum(count for _, count in answer.arrivals) == len(answer.tokens)
    assert outcome.counts.target_steps == sum(len(answer.arrivals) for answer in outcome.answers)


@pytest.mark.parametrize("clients", [1, 3])
def test_the_texts_are_those_of_generate(llm: LLM, factory: EngineFactory, clients: int) -> None:
    wanted = llm.generate(PROMPTS, requests()[0].params)
    for text in ("plain", "ngram@3"):
        outcome = factory.create(parse_method(text, None), clients).run(requests())
        check(outcome)
        assert texts(outcome) == [completion.token_ids for completion in wanted]


def test_plain_decoding_drafts_nothing(factory: EngineFactory) -> None:
    outcome = factory.create(parse_method("plain", None), 1).run(requests())
    assert (outcome.counts.drafted, outcome.counts.accepted) == (0, 0)
    assert outcome.counts.target_steps == outcome.tokens
    # The step that reads a prompt yields its first token and is not one that only decodes.
    assert outcome.decoding.steps == 11 * len(PROMPTS)
    assert 0 < outcome.decoding.whole < outcome.seconds


def test_a_prompt_is_computed_anew(factory: EngineFactory) -> None:
    opened = factory.create(parse_method("plain", None), 1)
    assert isinstance(opened, Paceline)
    scheduled: list[int] = []
    inner = opened.llm.engine.batch

    def watched(plan: Any, trees: Any) -> Any:
        scheduled.append(max(item.scheduled for item in plan.slices))
        return inner(plan, trees)

    opened.llm.engine.batch = watched  # type: ignore[method-assign]
    request = BenchRequest(tuple(range(1, 41)), SamplingParams(max_tokens=4, ignore_eos=True))
    opened.run([request])
    opened.run([request])
    assert scheduled.count(40) == 2


def test_clients_wait_for_their_answer(factory: EngineFactory) -> None:
    opened = factory.create(parse_method("plain", None), 2)
    assert isinstance(opened, Paceline)
    engine, sizes = opened.llm.engine, list[int]()
    step = engine.step

    def counted() -> Any:
        commits = step()
        sizes.append(len(commits))
        return commits

    engine.step = counted  # type: ignore[method-assign]
    outcome = opened.run(requests())
    check(outcome)
    assert max(sizes) == 2
    # The third request is sent when one of the first two is answered: its clock starts then.
    assert outcome.answers[2].arrivals[-1][0] < 0.9 * outcome.seconds


def test_positions_are_counted(factory: EngineFactory) -> None:
    outcome = factory.create(parse_method("ngram@3", None), 1).run(requests(40))
    assert outcome.counts.drafted and outcome.counts.reached_at[0] > 0
    assert sum(outcome.counts.accepted_at) == outcome.counts.accepted
    assert outcome.tokens == outcome.counts.target_steps + outcome.counts.accepted


def test_ctrl_c_leaves_an_engine_that_can_go_on(factory: EngineFactory) -> None:
    opened = factory.create(parse_method("ngram@3", None), 1)
    assert isinstance(opened, Paceline)
    engine, calls = opened.llm.engine, [0]
    step = engine.step

    def interrupted() -> Any:
        calls[0] += 1
        if calls[0] == 5:
            raise KeyboardInterrupt
        return step()

    engine.step = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        opened.run(requests())
    assert not engine.has_work
    check(opened.run(requests()))


def test_a_round_starts_without_memory_of_the_last(factory: EngineFactory) -> None:
    opened = factory.create(Method("suffix", "suffix", 4), 1)
    first = opened.run(requests(24))
    second = opened.run(requests(24))
    opened.refresh()
    third = opened.run(requests(24))
    assert second.counts.accepted > first.counts.accepted, "it remembers what it wrote"
    assert (third.counts.drafted, third.counts.accepted) == (
        first.counts.drafted,
        first.counts.accepted,
    )
    assert texts(first) == texts(second) == texts(third)


def test_the_end_token_ends_texts_if_that_is_asked_for(llm: LLM, factory: EngineFactory) -> None:
    """The end token is forced by a bias: what ends there has one token."""
    end = llm.tokenizer.eos_token_id
    assert isinstance(end, int)
    for ignore, length in ((False, 1), (True, 6)):
        params = SamplingParams(max_tokens=6, ignore_eos=ignore, logit_bias={end: 100.0})
        outcome = factory.create(parse_method("plain", None), 1).run([BenchRequest((5, 6), params)])
        assert len(outcome.answers[0].tokens) == length
