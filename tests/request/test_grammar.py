"""Grammars: every text matches, drafts change nothing, bad grammars are one line."""

from __future__ import annotations

import json
import re

import pytest

from paceline import LLM, Completion, ConfigError, Grammar, SamplingParams
from paceline.request.grammar import GrammarCompiler

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
DRAFTS = (
    "paceline/tiny-draft",
    "ngram",
    "eagle3:paceline/tiny-eagle3",
    "tree:paceline/tiny-draft,branching=2x2x1",
    "tree:paceline/tiny-draft,nodes=8",
    "medusa:paceline/tiny-medusa",
    "recycling",
    "early_exit",
)
PROMPT = "Give me a person as JSON: "


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("paceline/tiny", draft="none", dtype="float32")


MIXED = [
    SamplingParams(grammar=Grammar.json(PERSON), max_tokens=60),
    SamplingParams(grammar=Grammar.json(PERSON), max_tokens=60, temperature=1.0, seed=3),
    SamplingParams(grammar=Grammar("regex", "(ab|cd)+e"), max_tokens=40, seed=1, temperature=1),
    SamplingParams(max_tokens=20),  # a neighbour without a grammar
]


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[Completion]:
    return plain.generate([PROMPT] * 4, MIXED)


@pytest.mark.parametrize("draft", DRAFTS)
def test_constrained_text_does_not_depend_on_the_draft(
    plain: LLM, expected: list[Completion], draft: str
) -> None:
    llm = plain.with_draft(draft, draft_length=4)
    completions = llm.generate([PROMPT] * 4, MIXED)
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    for completion in completions[:2]:
        assert completion.finish_reason == "stop"
        person = json.loads(completion.text)
        assert set(person) == {"name", "age"} and isinstance(person["age"], int)
    if completions[2].finish_reason == "stop":
        assert re.fullmatch("(ab|cd)+e", completions[2].text)
    assert any(c.stats.drafted_tokens for c in completions)


def test_sampled_drafts_keep_to_the_grammar(plain: LLM) -> None:
    llm = plain.with_draft("paceline/tiny-draft", draft_length=4, seed=1)
    params = SamplingParams(grammar=Grammar.json(PERSON), temperature=1.2, max_tokens=80, n=8)
    completions = llm.generate(PROMPT, params)
    assert sum(c.stats.accepted_tokens for c in completions) > 0
    for completion in completions:
        if completion.finish_reason == "stop":
            assert set(json.loads(completion.text)) == {"name", "age"}


def test_any_object(plain: LLM) -> None:
    params = SamplingParams(grammar=Grammar.json(), max_tokens=100, temperature=0.7, seed=5)
    completion = plain.generate(PROMPT, params)[0]
    assert completion.text.startswith("{")
    if completion.finish_reason == "stop":
        assert isinstance(json.loads(completion.text), dict)


def test_logprobs_are_those_of_allowed_tokens(plain: LLM) -> None:
    params = SamplingParams(grammar=Grammar("regex", "[ab]c"), max_tokens=4, logprobs=3)
    completion = plain.generate(PROMPT, params)[0]
    assert completion.text in ("ac", "bc")
    assert completion.logprobs is not None
    assert completion.logprobs[-1].logprob == pytest.approx(0.0, abs=1e-5) or (
        len(completion.token_ids) == 1
    )


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.json({"type": "strange"}), "Invalid type"),
        (Grammar("json", "{"), "grammar .json"),
        (Grammar("json", "[" * 100_000), "grammar .json"),
        (Grammar("regex", "(ab"), "grammar .regex"),
        (Grammar("lark", "start: nothing_here"), "grammar .lark"),
    ],
)
def test_bad_grammars_are_one_line(plain: LLM, grammar: Grammar, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        plain.generate(PROMPT, SamplingParams(grammar=grammar))
    assert "\n" not in str(caught.value)
    assert not plain.engine.has_work


AGE = {"properties": {"age": {"enum": [3]}}, "required": ["age"]}
TALL = {"properties": {"tall": {"enum": [1]}}, "required": ["tall"]}


@pytest.mark.parametrize(
    ("schema", "text", "allowed"),
    [
        (AGE, '{"age": 3, "b": 1}', False),
        ({**AGE, "additionalProperties": True}, '{"age": 3, "b": 1}', True),
        ({"type": "object"}, '{"b": 1}', True),
        ({"$defs": {"age": AGE}, "items": {"$ref": "#/$defs/age"}}, '[{"age": 3, "b": 1}]', False),
        ({"anyOf": [AGE, TALL]}, '{"tall": 1, "b": 1}', False),
        # Schemas that combine properties, or ask for one that is not listed, stay open.
        ({"allOf": [AGE, TALL]}, '{"age": 3, "tall": 1}', True),
        ({**AGE, "anyOf": [TALL]}, '{"age": 3, "tall": 1}', True),
        ({**AGE, "required": ["b"]}, '{"b": 1}', True),
        # So does all of a schema in which some do.
        (
            {"prefixItems": [{"allOf": [AGE, TALL]}, TALL]},
            '[{"age": 3, "tall": 1}, {"tall": 1, "b": 1}]',
            True,
        ),
        # One alone is combined with nothing.
        ({"prefixItems": [{"allOf": [AGE]}, TALL]}, '[{"age": 3}, {"tall": 1}]', True),
        ({"prefixItems": [{"allOf": [AGE]}, TALL]}, '[{"age": 3}, {"tall": 1, "b": 1}]', False),
        ({"prefixItems": [{"allOf": [AGE]}, TALL]}, '[{"age": 3, "b": 1}, {"tall": 1}]', False),
        # A field that is called properties, and data that looks like a schema.
        ({"properties": {"properties": AGE}}, '{"properties": {"age": 3}}', True),
        ({"const": AGE}, json.dumps(AGE), True),
    ],
)
def test_objects_take_no_fields_but_those_listed(
    plain: LLM, schema: dict[str, object], text: str, allowed: bool
) -> None:
    compiler = GrammarCompiler(plain.tokenizer, len(plain.tokenizer), frozenset())
    matcher = compiler.matcher(Grammar.json(schema))
    for token in plain.tokenizer.encode(text, add_special_tokens=False):
        mask = matcher.allowed_tokens(())
        if mask is None or not mask[token]:
            assert not allowed
            return
        matcher.consume([token])
    assert allowed


def test_bad_parameters() -> None:
    with pytest.raises(ConfigError, match="grammar kind"):
        Grammar("yaml", "a")
    with pytest.raises(ConfigError, match=r"paceline\.Grammar"):
        SamplingParams(grammar="[ab]")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="min_tokens and grammar"):
        SamplingParams(grammar=Grammar.json(), min_tokens=3)


def test_requests_fix_their_own_draft_length(plain: LLM) -> None:
    llm = plain.with_draft("paceline/tiny-draft", draft_length=4)
    lengths = (None, 0, 2)
    params = [SamplingParams(max_tokens=24, draft_length=length) for length in lengths]
    own, none, two = llm.generate(["Once upon a time"] * 3, params)
    assert own.token_ids == none.token_ids == two.token_ids
    assert none.stats.drafted_tokens == 0
    assert len(two.stats.reached_per_position) == 2 < len(own.stats.reached_per_position)
    with pytest.raises(ConfigError, match="draft_length is 65"):
        SamplingParams(draft_length=65)
