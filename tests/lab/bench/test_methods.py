"""Method specs."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.lab.bench.engines import parse_method, parse_methods
from paceline.lab.bench.runner import Method

DRAFT = "some/draft"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", Method("plain", None, 0)),
        ("none", Method("plain", None, 0)),
        ("draft", Method("draft", DRAFT, 3)),
        ("draft@auto", Method("draft@auto", DRAFT, "auto")),
        ("ngram", Method("ngram", "ngram", 3)),
        ("ngram:min=2,max=4@5", Method("ngram:min=2,max=4@5", "ngram:min=2,max=4", 5)),
        ("eagle3:a/b@7", Method("eagle3:a/b@7", "eagle3:a/b", 7)),
        ("model:me@home/x", Method("model:me@home/x", "model:me@home/x", 3)),
        ("hybrid:ngram+model:a/b", Method("hybrid:ngram+model:a/b", "hybrid:ngram+model:a/b", 3)),
        ("paceline/tiny-draft", Method("paceline/tiny-draft", "paceline/tiny-draft", 3)),
    ],
)
def test_parse(text: str, expected: Method) -> None:
    assert parse_method(text, DRAFT, 3) == expected


@pytest.mark.parametrize(
    ("text", "draft", "words"),
    [
        ("ngrm", DRAFT, "no drafter 'ngrm' and no model folder 'ngrm'; did you mean ngram?"),
        ("warp", DRAFT, "'warp' is not plain or draft"),
        ("warp", DRAFT, "eagle3"),
        ("transformers:lookup", DRAFT, "no drafter 'transformers'"),
        ("ngram:colour=1", DRAFT, "has no option colour"),
        ("plain@4", DRAFT, "omit the @"),
        ("draft", None, "no draft is named"),
        ("ngram@0", DRAFT, "from 1 to 64"),
        ("ngram@four", DRAFT, "from 1 to 64"),
        ("ngram@-3", DRAFT, "from 1 to 64"),
        ("ngram@65", DRAFT, "from 1 to 64"),
    ],
)
def test_refused(text: str, draft: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as caught:
        parse_method(text, draft)
    assert words in str(caught.value)


def test_plain_decoding_always_comes_first_and_nothing_twice() -> None:
    parsed = parse_methods(["ngram", "plain", "ngram"], None)
    assert [method.name for method in parsed] == ["plain", "ngram"]


def test_lengths_apply_to_methods_without_one() -> None:
    texts = ["ngram", "draft@auto"]
    parsed = parse_methods(texts, DRAFT, (2, 4))
    assert [(method.name, method.length) for method in parsed] == [
        ("plain", 0),
        ("ngram@2", 2),
        ("ngram@4", 4),
        ("draft@auto", "auto"),
    ]


def test_methods_that_learn_from_requests() -> None:
    remembering = {"suffix", "recycling", "hybrid:ngram+suffix", "auto"}
    for text in (*remembering, "ngram", "draft", "hybrid:ngram+lookahead", "plain"):
        assert parse_method(text, DRAFT).learns_across_requests == (text in remembering), text
