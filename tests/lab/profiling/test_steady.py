"""Steady decoding: only steps in which all decode, the same ones each time, traced by phase."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline import LLM, ConfigError
from paceline.control.controller import MEASURING, NOT_WORTH_IT, NOTHING_FOUND
from paceline.lab.profiling import steady
from support.tiny_models import TinyPair

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]


@pytest.fixture(scope="module")
def llm(tiny_pair: TinyPair) -> LLM:
    return LLM(tiny_pair.target, tiny_pair.draft, dtype="float32", draft_length=2, max_batch_size=2)


def test_a_context_manager_is_entered_in_each_phase(llm: LLM) -> None:
    entered: Counter[str] = Counter()

    @contextmanager
    def around(phase: str) -> Iterator[None]:
        entered[phase] += 1
        yield

    members = set(vars(llm.engine))
    stretch = steady.run(llm, PROMPTS, 6, around).sums
    assert stretch.steps == 6
    assert entered == {"step": 6, "target": 6, "verify": 6, "draft": 12}
    assert members == set(vars(llm.engine))
    assert stretch.drafted == 6 * 2 * 2
    assert stretch.tokens == 6 * 2 + stretch.accepted
    assert set(stretch.seconds) == {"draft", "target", "verify", "other"}
    assert not llm.engine.has_work


def test_a_drafter_does_not_remember_the_call_before() -> None:
    """Not even one whose memory outlives requests: it would know the text."""
    with LLM("paceline/tiny", draft="hybrid:recycling+ngram", draft_length=4) as toy:
        prompts = [toy.tokenizer.encode("7 + 5 = 12, so Tom has")]
        runs = [steady.run(toy, prompts, 20).sums for _ in range(3)]
    assert runs[0].accepted and len({run.accepted for run in runs}) == 1


def test_the_same_steps_each_time(llm: LLM) -> None:
    first, second = steady.run(llm, PROMPTS, 6), steady.run(llm, PROMPTS, 6)
    assert (first.sums.tokens, first.sums.accepted) == (second.sums.tokens, second.sums.accepted)
    assert first.sums.context == second.sums.context
    assert first.sums.context / first.sums.sequences > 3 + steady.WARM_UP


def test_drafters_and_reasons_without_drafts_are_counted(llm: LLM) -> None:
    drafted = steady.run(llm, PROMPTS, 6)
    assert sum(drafted.drafters.values()) == drafted.sums.accepted and not drafted.not_drafted
    plain = llm.with_draft("ngram:min=3", max_batch_size=2)
    stretch = steady.run(plain, PROMPTS, 6)
    assert sum(stretch.not_drafted.values()) + stretch.sums.drafted >= 12
    assert set(stretch.not_drafted) <= {NOTHING_FOUND, NOT_WORTH_IT, MEASURING}
    plain.close()


def test_no_room_for_a_steady_state(llm: LLM) -> None:
    long = [[5] * (llm.target.max_positions - remaining) for remaining in (3, 14)]
    for prompt in long:
        with pytest.raises(ConfigError, match=r"no steady decoding: after .* shorter prompts"):
            steady.run(llm, [prompt], 6)
    assert not llm.engine.has_work


def test_the_context_limits_the_steps(llm: LLM) -> None:
    plain = llm.with_draft(None, max_batch_size=1)
    prompt = [5] * (llm.target.max_positions - 40)
    stretch = steady.run(plain, [prompt], 100).sums
    assert stretch.steps == 40 - 1 - steady.WARM_UP  # one token comes of the prompt itself
    assert stretch.tokens == stretch.steps


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_the_trace_is_json_with_phases(llm: LLM, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"trace{suffix}"
    steady.write_trace(llm, PROMPTS, 5, path)
    text = gzip.decompress(path.read_bytes()) if suffix.endswith("gz") else path.read_bytes()
    names = Counter(event.get("name") for event in json.loads(text)["traceEvents"])
    for phase, times in (("step", 5), ("target", 5), ("verify", 5), ("draft", 10)):
        assert names[f"paceline: {phase}"] == times
    assert names["paceline_native::forward"] == 5 * 2  # the target, and the draft's first level
    assert names["paceline_native::grow"] == 5  # the second


def test_bad_trace_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"end its name in \.json or \.json\.gz"):
        steady.check_path(tmp_path / "trace.txt")
    steady.check_path(tmp_path / "trace.json.gz")
    assert not (tmp_path / "trace.json.gz").exists()
