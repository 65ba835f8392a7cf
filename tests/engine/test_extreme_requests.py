"""Random requests at the edge of what may be asked, with every kind of drafter, in one batch.

Nobody gets a token that does not exist, nothing raises, and each request has the text that it has
alone: where it cannot go on it ends with an error, and so it does alone.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from paceline import LLM, Grammar, SamplingParams

SPECS = (
    "paceline/tiny-draft",
    "tree:paceline/tiny-draft,branching=2x2x1",
    "tree:paceline/tiny-draft,nodes=8",
    "eagle3:paceline/tiny-eagle3",
    "eagle3:paceline/tiny-eagle3,nodes=8",
    "medusa:paceline/tiny-medusa",
    "early_exit:layers=2",
    "ngram",
    "suffix",
    "recycling",
    "lookahead",
)
PROMPTS = ("Once upon a time", "def add(a, b):\n", "Zürich is", "1 2 3 1 2 3 1 2", "The sea was")
GRAMMARS = (
    Grammar.json({"enum": ["Zürich", "Köln"]}),
    Grammar("regex", "[äöü]{3,5}"),
    Grammar.json({"type": "object", "properties": {"ö": {"type": "integer"}}}),
)
BATCHES, TOKENS = 4, 10


def extreme(chance: random.Random, vocab: int) -> SamplingParams:
    """A valid request, most likely a strange one."""
    asked: dict[str, Any] = {"max_tokens": chance.randint(1, TOKENS), "ignore_eos": True}
    asked["temperature"] = chance.choice((0.0, 1e-300, 1e-45, 1e-8, 0.3, 1.0, 1.0, 2.0, 100.0))
    if chance.random() < 0.6:
        asked["seed"] = chance.choice((0, 7, 2**63 - 1))
    if chance.random() < 0.4:
        asked["repetition_penalty"] = chance.choice((0.01, 0.5, 1.5, 100.0))
    if chance.random() < 0.3:
        asked["frequency_penalty"] = chance.choice((-2.0, 2.0))
    if chance.random() < 0.3:
        ids = chance.sample(range(vocab), chance.choice((1, 5, 50)))
        asked["logit_bias"] = {token: chance.choice((-100.0, 100.0, 0.0)) for token in ids}
    if chance.random() < 0.3:
        asked["top_k"] = chance.choice((1, 2, vocab, 10**12))
    if chance.random() < 0.3:
        asked["top_p"] = chance.choice((1e-300, 1e-6, 0.5, 1.0))
    if chance.random() < 0.2:
        asked["min_p"] = chance.choice((1e-300, 0.5, 1.0))
    if chance.random() < 0.2:
        asked["logprobs"] = chance.choice((0, 20))
    if chance.random() < 0.2:
        asked["draft_length"] = chance.choice((0, 1, 64))
    if chance.random() < 0.25:
        asked["grammar"] = chance.choice(GRAMMARS)
    elif chance.random() < 0.15:  # nothing may follow: every token would end it too early
        asked["stop_token_ids"] = tuple(range(vocab))
        asked["min_tokens"] = chance.choice((0, 1))
    return SamplingParams(**asked)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("paceline/tiny", draft="none", dtype="float32", max_batch_size=1)


@pytest.mark.broad
@pytest.mark.parametrize("spec", SPECS)
def test_each_is_served_as_if_alone(plain: LLM, spec: str) -> None:
    chance = random.Random(spec)
    vocab = len(plain.tokenizer)
    llm = plain.with_draft(spec, draft_length=4, max_batch_size=4, seed=1)
    failed = 0
    for _ in range(BATCHES):
        params = [extreme(chance, vocab) for _ in range(4)]
        prompts = [chance.choice(PROMPTS) for _ in params]
        for prompt, asked, done in zip(prompts, params, llm.generate(prompts, params), strict=True):
            assert all(0 <= token < vocab for token in done.token_ids), asked
            assert len(done.token_ids) <= asked.max_tokens
            if asked.greedy or asked.seed is not None:
                (alone,) = plain.generate(prompt, asked)
                assert done.token_ids == alone.token_ids, asked
                assert (done.text, done.finish_reason) == (alone.text, alone.finish_reason), asked
            hopeless = bool(asked.min_tokens and asked.stop_token_ids)
            assert (done.finish_reason == "error") == hopeless == bool(done.error), (asked, done)
            failed += hopeless
    blocks = llm.engine.cache
    assert blocks.pool.available == blocks.num_blocks


def test_some_of_them_cannot_go_on(plain: LLM) -> None:
    """So the cases above do hold requests that fail."""
    vocab = len(plain.tokenizer)
    failing = [
        asked
        for spec in SPECS
        for chance in (random.Random(spec),)
        for asked in (extreme(chance, vocab) for _ in range(4 * BATCHES))
        if asked.min_tokens and asked.stop_token_ids
    ]
    assert len(failing) > 5
