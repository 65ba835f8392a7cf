"""Plan, Batch, Verdict and Commit are plain data: they survive a trip to another process."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

import pytest
import torch

from paceline import LLM, Grammar, SamplingParams
from paceline.core.batch import Batch, Commit, Plan, Verdict
from paceline.core.sequence import TokenView
from support.every_drafter import SPECS

PROMPTS = ["Once upon a time there was a", "def add(a, b):\n    return", "one two one two one two"]
PARAMS = [
    SamplingParams(max_tokens=5, repetition_penalty=1.2, stop=("zz",), ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=0.8, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=5, grammar=Grammar("regex", "[a-z ]{3,40}"), temperature=1.0, seed=4),
]
PLAIN = (int, float, str, bool, bytes, type(None), Enum, torch.Tensor)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    llm = LLM("paceline/tiny", draft="none", dtype="float32")
    yield llm
    llm.close()


def check_plain(value: Any) -> None:
    """Nothing but numbers, texts, tensors and frozen records of them."""
    if is_dataclass(value):
        assert value.__dataclass_params__.frozen, type(value)  # type: ignore[attr-defined]
        for field in fields(value):
            check_plain(getattr(value, field.name))
    elif isinstance(value, dict):
        check_plain([*value, *value.values()])
    elif isinstance(value, (tuple, list, frozenset, TokenView)):
        for item in value:
            check_plain(item)
    else:
        assert isinstance(value, PLAIN), type(value)


def sent(value: Any) -> Any:
    """As another process receives it."""
    again = pickle.loads(pickle.dumps(value))
    check_plain(again)
    assert type(again) is type(value)
    return again


@pytest.mark.broad
@pytest.mark.parametrize("name", SPECS)
def test_a_drafter_drafts_from_what_was_sent(plain: LLM, name: str) -> None:
    """All four cross a border in every step, and the texts are those of a run without one."""
    alone, llm = (plain.with_draft(SPECS[name], draft_length=3, seed=1) for _ in range(2))
    for one in (alone, llm):
        scheduler = one.engine.scheduler
        scheduler.config = replace(scheduler.config, prefill_chunk=4)
    expected = alone.generate(PROMPTS, PARAMS)
    engine, seen = llm.engine, set()
    propose, observe = engine.drafter.propose, engine.drafter.observe
    target, verifier = engine.target, engine.verifier

    def received(value: Any) -> Any:
        seen.add(type(value))
        return sent(value)

    class Target:
        def __call__(self, batch: Batch, *rest: Any) -> Any:
            return target(received(batch), *rest)

        def __getattr__(self, attribute: str) -> Any:
            return getattr(target, attribute)

    def verify(*args: Any) -> list[Verdict]:
        return [received(verdict) for verdict in verifier(*args)]

    def planned(plan: Plan) -> Plan:
        """A grammar does not travel: each process has its own of a request."""
        slices = zip(received(plan).slices, plan.slices, strict=True)
        return Plan(
            tuple(
                replace(item, seq=replace(item.seq, constraint=own.seq.constraint))
                for item, own in slices
            )
        )

    engine.drafter.propose = lambda plan: propose(planned(plan))  # type: ignore[method-assign]
    engine.drafter.observe = lambda commits, out: observe(  # type: ignore[method-assign]
        [received(commit) for commit in commits], out
    )
    engine.target, engine.verifier = Target(), verify  # type: ignore[assignment]
    done = llm.generate(PROMPTS, PARAMS)
    assert seen == {Plan, Batch, Verdict, Commit}
    for one, other in zip(done, expected, strict=True):
        assert one.error is None and one.token_ids == other.token_ids
        assert one.stats.drafted_tokens == other.stats.drafted_tokens


def test_a_view_of_tokens_stays_what_it_was() -> None:
    tokens = [1, 2, 3]
    view = TokenView(tokens, len(tokens))
    tokens += [4, 5]
    assert list(view) == view[:] == [1, 2, 3] and len(view) == 3
    assert (view[-1], view[0], view[1:], view[-2:], view[:-1]) == (3, 1, [2, 3], [2, 3], [1, 2])
    assert pickle.loads(pickle.dumps(view)) == view == [1, 2, 3]
    for part in (slice(None, None, -1), slice(None, -9, -1), slice(9, 0, -2), slice(-9, 9, 2)):
        assert view[part] == [1, 2, 3][part] and TokenView(tokens, 0)[part] == []
    with pytest.raises(IndexError):
        view[3]
