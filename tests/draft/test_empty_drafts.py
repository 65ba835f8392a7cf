"""A grammar that forbids the whole draft vocabulary: nothing is proposed, and nothing fails."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from paceline import LLM, Grammar, SamplingParams

# "ü" and "ö" lie outside the 3,072 tokens of the head's vocabulary.
WORDS = ("Zürich", "Köln")
GRAMMAR = Grammar.json({"enum": list(WORDS)})
BESIDE = SamplingParams(max_tokens=16, ignore_eos=True)
SPECS = {
    "chain": "eagle3:paceline/tiny-eagle3",
    "static tree": "eagle3:paceline/tiny-eagle3,branching=2x2x1",
    "dynamic tree": "eagle3:paceline/tiny-eagle3,nodes=8",
}
PROBS = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 3},
    "sampled": {"temperature": 1.0},
    "truncated": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "penalised": {"temperature": 1.0, "repetition_penalty": 1.3, "logit_bias": {7: 5.0}},
}
PROMPTS = ["The city is called", "Once upon a time"]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("paceline/tiny", draft="none", dtype="float32", draft_length=4)


@pytest.fixture(scope="module", params=SPECS)
def drafted(plain: LLM, request: pytest.FixtureRequest) -> LLM:
    return plain.with_draft(SPECS[request.param], draft_length=4, max_batch_size=4)


@pytest.mark.broad
@pytest.mark.parametrize("distribution", PROBS)
def test_an_enum_outside_the_draft_vocabulary(plain: LLM, drafted: LLM, distribution: str) -> None:
    params = SamplingParams(grammar=GRAMMAR, max_tokens=24, **PROBS[distribution])  # type: ignore[arg-type]
    (alone,) = plain.generate(PROMPTS[1], BESIDE)
    for _ in range(5 if "seed" not in PROBS[distribution] and PROBS[distribution] else 1):
        own, beside = drafted.generate(PROMPTS, [params, BESIDE])
        assert own.finish_reason == "stop" and json.loads(own.text) in WORDS
        assert beside.token_ids == alone.token_ids
        if distribution in ("greedy", "seeded"):
            assert own.token_ids == plain.generate(PROMPTS[0], params)[0].token_ids
    assert drafted.engine.cache.pool.available == drafted.engine.cache.num_blocks


def test_without_a_seed_it_is_still_the_targets_distribution(plain: LLM) -> None:
    """Both words are as frequent as in plain decoding, within five standard deviations."""
    params = SamplingParams(grammar=GRAMMAR, max_tokens=24, temperature=2.0, n=150)
    counts = []
    for spec in (None, SPECS["chain"]):
        llm = plain.with_draft(spec, draft_length=4, max_batch_size=32, seed=1)
        counts.append(Counter(json.loads(one.text) for one in llm.generate(PROMPTS[0], params)))
    first, second = (count[WORDS[0]] / 150 for count in counts)
    share = (first + second) / 2
    assert 0 < share < 1
    assert abs(first - second) < 5 * (2 * share * (1 - share) / 150) ** 0.5
