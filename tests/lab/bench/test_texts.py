"""Texts beside plain decoding's: same, near tie, bug."""

from __future__ import annotations

import pytest

from paceline.lab.bench.pages import labels
from paceline.lab.bench.result import BenchResult, SameTexts, compare
from paceline.lab.bench.runner import BenchJob, JobResult, Method, take_turns
from support.made_outcomes import Fake, job, request


def contest(todo: list[BenchJob], rounds: int = 2) -> list[JobResult]:
    record = list[JobResult]()
    opened_all = [Fake("plain"), Fake("same"), Fake("liar", tokens=(5, 0, 7, 8))]
    take_turns(todo, opened_all, rounds, record)
    return record


def test_every_pair_of_texts_is_compared_once() -> None:
    compared = compare(contest([job(index=0), job("code", 1)]))
    assert compared == {
        "same": SameTexts(2),
        "liar": SameTexts(0, 2, "chat, request 0, token 1"),
    }
    assert compared["liar"].shown == "0 of 2"


def test_unseeded_samples_are_not_compared() -> None:
    free = BenchJob("chat", 1, 0.7, 0, (request(temperature=0.7),))
    seeded = BenchJob("chat", 1, 0.7, 0, (request(temperature=0.7, seed=3),))
    assert compare(contest([free])) == {}
    assert {name: texts.identical for name, texts in compare(contest([seeded])).items()} == {
        "same": 1,
        "liar": 0,
    }


def result(
    texts: dict[str, SameTexts], idle: dict[str, str] | None = None, backend: str = "native"
) -> BenchResult:
    return BenchResult("m", {"backend": backend}, {}, [Method("ngram")], [], texts, idle or {})


def test_a_different_text_is_a_bug_of_the_kernels_and_may_be_a_tie_on_torch() -> None:
    compared = compare(contest([job()]))
    measured = result(compared)
    assert measured.bugs() == ["liar"]
    (line,) = measured.failures()
    assert "the text of liar differs from plain decoding's (chat, request 0, token 1)" in line
    assert "this is a bug" in line and "\n" not in line
    measured = result(compared, backend="reference")
    assert measured.bugs() == [] == measured.failures()
    assert "may be near ties; paceline certify tells" in measured.warnings()[0]


def test_idle_methods_are_a_warning() -> None:
    failed = result({}, {"ngram": "drafted nothing"})
    (line,) = failed.warnings()
    assert "ngram drafted nothing in the whole run" in line
    assert "another draft or a fixed length" in line and failed.failures() == []


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["plain", "eagle3:paceline/tiny-eagle3@4"], ["plain", "eagle3:tiny-eagle3@4"]),
        (["hybrid:ngram+model:/a/b"], ["hybrid:ngram+model:b"]),
        (["a/x", "b/x"], ["a/x", "b/x"]),
    ],
)
def test_labels(names: list[str], expected: list[str]) -> None:
    assert list(labels(names).values()) == expected
