"""Which drafters are tried for a target."""

from __future__ import annotations

import pytest

from paceline import ConfigError
from paceline.drafters import parse_draft
from paceline.lab.tune.candidates import at_hand, default_candidate, variants
from paceline.model.names import REAL


def test_the_embedded_pair_has_its_own_candidates() -> None:
    proposed = at_hand("paceline/tiny", [])
    specs = [candidate.spec for candidate in proposed]
    assert len(specs) == len(set(specs)) >= 12
    assert "model:paceline/tiny-draft,nodes=0" in specs
    assert "eagle3:paceline/tiny-eagle3,branching=2x2x1x1x1" in specs
    assert {"medusa:paceline/tiny-medusa", "ngram", "suffix", "recycling"} <= set(specs)
    assert not any(candidate.requested for candidate in proposed)
    assert [candidate.spec for candidate in proposed if candidate.default] == ["auto"]
    families = list(dict.fromkeys(candidate.family for candidate in proposed))
    assert families[:3] == ["ngram", "suffix", "recycling"]  # those that run a model are dearer


def test_labels_name_the_weights() -> None:
    """The 4- and 8-bit forms of the target were called "int4" and "int4 int8"."""
    labels = [
        candidate.label for text in ("quantized", "some/draft") for candidate in variants(text)
    ]
    assert labels[:2] == ["quantized:int4", "quantized:int8"]
    assert labels[2] == "draft chain" and labels[-2:] == ["draft int8", "draft int4"]


def test_the_default_draft_is_always_a_candidate() -> None:
    """A minute went to the dearest drafter, and what commands take was never entered."""
    for drafts in ([], ["some/draft"]):
        (default,) = [c for c in at_hand("any/target", drafts) if c.default]
        assert (default.spec, default.label) == ("auto", "auto (default)")
    assert not any(c.default for c in at_hand(REAL, ["some/draft"], only=True))
    composed = default_candidate("hybrid:suffix+ngram+eagle3:paceline/smollm2-eagle3")
    assert composed.label == "suffix + ngram + smollm2-eagle3 (default)" and composed.default


def test_candidates_of_other_targets() -> None:
    proposed = at_hand("other", ["some/draft", "ngram:min=2"])
    assert [c.spec for c in proposed if c.requested] == [
        "model:some/draft,nodes=0",
        "model:some/draft,branching=2x2x1x1x1",
        "model:some/draft,nodes=16",
        "ngram:min=2",
    ]
    free = [c.spec for c in proposed if not c.requested and not c.default]
    assert free == [
        "ngram",
        "suffix",
        "recycling",
        "model:some/draft,nodes=0,quantize=int8",
        "model:some/draft,nodes=0,quantize=int4",
        "lookahead",
        "layer_skip",
        "quantized:int4",
        "quantized:int8",
    ]
    assert [c.spec for c in at_hand("other", ["suffix"], only=True)] == ["suffix"]
    for none in ([], ["none"]):
        with pytest.raises(ConfigError, match="and there is none; add one"):
            at_hand("other", none, only=True)


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("some/draft", ["chain", "2x2 tree", "16 nodes", "", ""]),
        ("model:some/draft,quantize=int8", ["chain", "2x2 tree", "16 nodes"]),
        ("quantized", ["", ""]),
        ("quantized:int8", [""]),
        ("tree:some/draft", [""]),
        ("model:some/draft,branching=3x1", [""]),
        ("eagle3:head,nodes=32", [""]),
        ("eagle3:head,nodes=0", [""]),
        ("eagle2:head", [""]),
        ("none", []),
    ],
)
def test_variants_of_a_draft(text: str, shapes: list[str]) -> None:
    spec = parse_draft(text)
    assert [*spec.variants(), *("" for _ in spec.precisions())] == shapes
    assert len(variants(text)) == len(shapes)
