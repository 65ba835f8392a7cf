"""What a grammar forces is drafted: never another text, and fewer steps."""

from __future__ import annotations

import json

import pytest

from paceline import LLM, Grammar, SamplingParams
from paceline.draft.selfspec import SelfDrafter
from paceline.request.grammar import GrammarCompiler

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "postal_address": {
            "type": "object",
            "properties": {"street_number": {"type": "integer", "maximum": 99}},
            "required": ["street_number"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "postal_address"],
    "additionalProperties": False,
}
PROMPT = "A person as JSON: "


@pytest.fixture(scope="module")
def target() -> LLM:
    return LLM("paceline/tiny", draft="none", dtype="float32")


@pytest.mark.parametrize(
    "draft",
    ["ngram", "paceline/tiny-draft", "hybrid:suffix+ngram", "quantized", "hybrid:suffix+quantized"],
)
@pytest.mark.parametrize("length", [None, 6])
@pytest.mark.parametrize("seed", [None, 3])
def test_the_text_is_plain_decodings(
    target: LLM, draft: str, length: int | None, seed: int | None
) -> None:
    """Alone, and beside requests without a grammar."""
    sampled = {"temperature": 0.0 if seed is None else 0.9, "seed": seed, "max_tokens": 80}
    free = SamplingParams(**sampled, draft_length=length)
    params = SamplingParams(**sampled, draft_length=length, grammar=Grammar.json(SCHEMA))
    expected = target.generate([PROMPT] * 3, [params, free, params])
    json.loads(expected[0].text)
    llm = target.beside(draft, max_batch_size=4)
    asked = [params, free, params]
    together = llm.generate([PROMPT] * 3, asked)
    alone = [llm.generate(PROMPT, each)[0] for each in asked]
    for drafted in (together, alone):
        assert [c.token_ids for c in drafted] == [c.token_ids for c in expected]


def test_keys_and_brackets_take_no_step_of_their_own(target: LLM) -> None:
    """Unlike what n-grams find in a text without any repetition."""
    params = SamplingParams(max_tokens=80, grammar=Grammar.json(SCHEMA))
    (drafted,) = target.beside("ngram:min=4").generate(PROMPT, params)
    assert drafted.stats.target_steps <= 0.6 * len(drafted.token_ids)
    matcher = target._grammars.matcher(params.grammar)
    assert matcher.forced()
    matcher.read(drafted.token_ids)
    assert not matcher.forced()  # it has ended


def test_a_drafter_goes_on_behind_them(target: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same step: fewer steps than with what is forced and drafts by turns."""
    schema = {"type": "array", "items": SCHEMA, "minItems": 3, "maxItems": 3}
    params = SamplingParams(max_tokens=120, grammar=Grammar.json(schema))
    steps = []
    for goes_on in (False, True):
        monkeypatch.setattr(SelfDrafter, "goes_on", goes_on)
        (done,) = target.beside("quantized", draft_length=12).generate(PROMPT, params)
        steps.append(done.stats.target_steps)
    assert steps[1] < steps[0]


@pytest.mark.parametrize("draft", ["ngram", "quantized"])
def test_unseeded_sampling_follows_the_grammar(target: LLM, draft: str) -> None:
    llm = target.beside(draft, seed=2)
    params = SamplingParams(max_tokens=80, temperature=1.0, grammar=Grammar.json(SCHEMA))
    for completion in llm.generate([PROMPT] * 4, params):
        assert set(json.loads(completion.text)) == {"name", "postal_address"}


def test_tokens_that_the_target_has_no_logits_for_are_not_drafted(target: LLM) -> None:
    grammar = Grammar.json(SCHEMA)
    tokens = list(target._grammars.matcher(grammar).forced())
    narrow = max(tokens)
    matcher = GrammarCompiler(target.tokenizer, narrow, frozenset()).matcher(grammar)
    assert list(matcher.forced()) == tokens[: tokens.index(narrow)]
