"""Predicted outputs: the text stays the same, with fewer steps where the prediction is right."""

from __future__ import annotations

import pytest

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError
from support.diagonal import diagonal

PROMPT = "Once upon a time"
# Nodes are named, as else prices measured at start-up say how many pay, and so how far a step goes.
EAGLE3 = "eagle3:paceline/tiny-eagle3,nodes=20"
DRAFTS = ("paceline/tiny-draft", "ngram", "hybrid:suffix+ngram", EAGLE3)


@pytest.fixture(scope="module")
def target() -> LLM:
    return LLM("paceline/tiny", draft="none", dtype="float32")


@pytest.mark.broad
@pytest.mark.parametrize(
    ("draft", "seed"), diagonal([*DRAFTS, ["paceline/tiny-draft", "ngram"]], [None, 5])
)
def test_it_is_a_draft_and_nothing_else(
    target: LLM, draft: str | list[str], seed: int | None
) -> None:
    params = SamplingParams(max_tokens=60, seed=seed, temperature=0.0 if seed is None else 0.8)
    expected = target.generate(PROMPT, params)[0].token_ids
    llm = target.with_draft(draft, max_batch_size=4)
    right = tuple(expected)
    edited = (*right[:20], 7, 8, *right[26:])
    wrong = tuple(range(40, 80))
    asked = [right, edited, wrong, ()]
    own = [
        SamplingParams(**{**vars(params), "prediction": p, "draft_length": 16 if p else None})
        for p in asked
    ]
    found = llm.generate([PROMPT] * len(own), own)
    assert [completion.token_ids for completion in found] == [expected] * len(own)
    steps = [completion.stats.target_steps for completion in found]
    assert steps[0] <= 8 and steps[1] <= 24  # 60 tokens
    assert sum(found[0].draft_mask) > 45
    assert found[0].stats.drafters["prediction"] > 45
    assert found[2].stats.drafters.get("prediction", 0) < 5
    assert "prediction" not in found[3].stats.drafters
    assert not llm.engine.predictions.states


def test_unseeded_sampling_goes_on(target: LLM) -> None:
    llm = target.with_draft("paceline/tiny-draft", seed=1)
    params = SamplingParams(
        max_tokens=30, temperature=1.0, prediction=tuple(range(30)), draft_length=8
    )
    assert all(len(c.token_ids) > 0 for c in llm.generate([PROMPT] * 3, params))


def test_without_a_drafter_decoding_is_plain(target: LLM) -> None:
    """It was drafted into blocks that nobody had reserved: a step failed, and drafting was off."""
    plain = target.generate(PROMPT, SamplingParams(max_tokens=20))[0]
    told = SamplingParams(max_tokens=20, prediction=tuple(plain.token_ids), draft_length=16)
    (found,) = target.with_draft(strict=True).generate(PROMPT, told)
    assert found.token_ids == plain.token_ids
    assert found.stats.drafted_tokens == 0


def test_what_is_no_prediction(target: LLM) -> None:
    with pytest.raises(ConfigError, match="prediction"):
        SamplingParams(prediction=("x",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        target.generate(PROMPT, SamplingParams(prediction=(10**7,)))
