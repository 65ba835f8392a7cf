"""Texts beside plain decoding's: same, near tie, bug."""

from __future__ import annotations

import pytest

from paceline.lab.bench.pages import labels
from paceline.lab.bench.result import BenchResult, Comparison, compare
from paceline.lab.bench.runner import (
    BenchJob,
    BenchRequest,
    JobResult,
    Method,
    take_turns,
)
from paceline.lab.certify.decoding import Difference
from support.made_outcomes import Fake, job, request

TIE = Difference(2, 7, 9, gap=0.01, rounding=0.01)
BUG = Difference(1, 6, 0, gap=1.0, rounding=0.01)


def judge(asked: BenchRequest, left: tuple[int, ...], right: tuple[int, ...]) -> Difference | None:
    assert left == (5, 6, 7, 8), "plain decoding's text comes first"
    return TIE if right == (5, 6, 9, 8) else BUG


def contest(todo: list[BenchJob], rounds: int = 2) -> list[JobResult]:
    record = list[JobResult]()
    opened_all = [
        Fake("plain"),
        Fake("same"),
        Fake("tie", tokens=(5, 6, 9, 8)),
        Fake("liar", tokens=(5, 0, 7, 8)),
    ]
    take_turns(todo, opened_all, rounds, record)
    return record


def test_every_pair_of_texts_is_compared_once() -> None:
    compared = compare(contest([job(index=0), job("code", 1)]), judge)
    assert compared.counts == {
        "same": {"identical": 2},
        "tie": {"near tie": 2},
        "liar": {"different": 2},
    }
    assert [p.category for p in compared.different("liar")] == ["chat", "code"]
    assert compared.different("tie") == [] == compared.different("same")


def test_unseeded_samples_are_not_compared() -> None:
    free = BenchJob("chat", 1, 0.7, 0, (request(temperature=0.7),))
    seeded = BenchJob("chat", 1, 0.7, 0, (request(temperature=0.7, seed=3),))
    assert compare(contest([free]), judge).counts == {}
    compared = compare(contest([seeded]), judge)
    assert compared.counts == {
        "same": {"identical": 1},
        "tie": {"near tie": 1},
        "liar": {"different": 1},
    }


def result(texts: Comparison, *methods: Method, idle: dict[str, str] | None = None) -> BenchResult:
    return BenchResult("m", {}, {}, methods, [], texts, idle or {})


def test_a_different_text_is_a_bug_and_a_tie_is_none() -> None:
    compared = compare(contest([job()]), judge)
    plain = Method("plain", length=0)
    ours = result(compared, plain, Method("liar", "ngram"), Method("tie", "ngram"))
    assert ours.bugs() == ["liar"]
    (line,) = ours.failures()
    assert "the text of liar differs from plain decoding's (chat, request 0, token 1" in line
    assert "this is a bug" in line and "\n" not in line


def test_idle_methods_are_a_failure_unless_accepted() -> None:
    lacking = {"ngram": "drafted nothing"}
    failed = result(Comparison({}, []), Method("ngram", "ngram"), idle=lacking)
    (line,) = failed.failures()
    assert "ngram drafted nothing in the whole run" in line
    assert "another draft or a fixed length" in line and "--allow-idle" in line
    assert failed.failures(allow_idle=True) == []


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
