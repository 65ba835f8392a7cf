"""Tokens that a grammar forces are drafted: the text stays the same, with fewer steps."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from paceline import LLM, Grammar, SamplingParams
from paceline.core.batch import Plan
from paceline.core.tree import TokenTree, paths_of
from paceline.draft.base import can_extend_forced, forced_tokens, with_members
from paceline.draft.model import ModelDrafter
from paceline.draft.selfspec import SelfDrafter
from paceline.draft.trees.levels import LevelDrafter
from paceline.model.loading import load_tokenizer
from paceline.request.grammar import GrammarCompiler
from support import real_model
from support.every_drafter import SPECS, WEIGHTS

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


# Drafts that go on behind what is forced.
BEHIND = [
    "ngram",
    "suffix",
    pytest.param(
        f"datastore:{WEIGHTS['datastore']}", id="datastore"
    ),  # the folder has no fixed name
    "quantized",
    "hybrid:medusa:paceline/tiny-medusa+ngram",
    "hybrid:ngram+eagle3:paceline/tiny-eagle3",
]
# Others: forced text is a draft of its own beside theirs.
BESIDE = [
    "lookahead",
    "recycling",
    "tree:paceline/tiny-draft",
    "tree:paceline/tiny-draft,nodes=8,width=3",
    "quantized:int4,nodes=8,width=3",
    "medusa:paceline/tiny-medusa",
    "eagle:paceline/tiny-eagle",
    "eagle3:paceline/tiny-eagle3",
    "dflash:paceline/tiny-dflash",
    "dspark:paceline/tiny-dspark",
]
# The same of heads and models that have not learnt to draft.
UNLEARNT = [pytest.param(SPECS[kind], id=kind) for kind in SPECS if kind.endswith("one pass")]
UNLEARNT += [pytest.param(SPECS["mtp"], id="mtp")]


@pytest.fixture(scope="module")
def target() -> LLM:
    return LLM("paceline/tiny", draft="none", dtype="float32")


@pytest.fixture(scope="module")
def expected(target: LLM) -> list[tuple[list[SamplingParams], list[list[int]]]]:
    """A request with a grammar and one without, greedy and seeded, and their plain texts."""
    found = []
    for sampled in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 3}):
        free = SamplingParams(**sampled, max_tokens=24)
        asked = [replace(free, max_tokens=80, grammar=Grammar.json(SCHEMA)), free]
        done = target.generate([PROMPT] * 2, asked)
        json.loads(done[0].text)
        found.append((asked, [completion.token_ids for completion in done]))
    return found


def compiler_of(llm: LLM) -> GrammarCompiler:
    return GrammarCompiler(llm.tokenizer, len(llm.tokenizer), frozenset(llm.end_tokens))


@pytest.mark.broad
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "draft",
    [
        *("paceline/tiny-draft", "hybrid:suffix+ngram", "hybrid:suffix+quantized"),
        *(*BEHIND, *BESIDE, *UNLEARNT),
    ],
)
def test_the_text_is_plain_decodings(
    target: LLM, expected: list[tuple[list[SamplingParams], list[list[int]]]], draft: str, half: int
) -> None:
    """Alone, and beside requests without a grammar; greedy and seeded, of any draft length. Every
    run has each two of these together, and the slow tests all three."""
    llm = target.with_draft(draft, max_batch_size=4)
    for sampled, (asked, texts) in enumerate(expected):
        for given, length in enumerate((None, 6)):
            params = [replace(request, draft_length=length) for request in asked]
            if (sampled + given + half) % 2 == 0:
                together = llm.generate([PROMPT] * 3, [*params, params[0]])
                assert [completion.token_ids for completion in together] == [*texts, texts[0]]
            else:
                alone = [llm.generate(PROMPT, request)[0] for request in params]
                assert [completion.token_ids for completion in alone] == texts


def test_keys_and_brackets_take_no_step_of_their_own(target: LLM) -> None:
    """N-grams find nothing here: the text has no repetition."""
    params = SamplingParams(max_tokens=80, grammar=Grammar.json(SCHEMA))
    (drafted,) = target.with_draft("ngram:min=4").generate(PROMPT, params)
    assert drafted.stats.target_steps <= 0.6 * len(drafted.token_ids)
    matcher = compiler_of(target).matcher(params.grammar)
    assert matcher.forced_tokens()
    matcher.consume(drafted.token_ids)
    assert not matcher.forced_tokens()  # it has ended


@pytest.mark.parametrize("drafter", [SelfDrafter, ModelDrafter])
def test_a_drafter_takes_them_into_its_chain(
    target: LLM, monkeypatch: pytest.MonkeyPatch, drafter: type[LevelDrafter]
) -> None:
    """Fewer steps than if forced tokens and drafts took turns; fewer passes than tokens."""
    schema = {"type": "array", "items": SCHEMA, "minItems": 3, "maxItems": 3}
    params = SamplingParams(max_tokens=120, grammar=Grammar.json(schema))
    draft = "quantized" if drafter is SelfDrafter else "paceline/tiny-draft"
    steps, passes = [], [0, 0]
    real = drafter._run_spans

    def first(self: LevelDrafter, *args: Any) -> Any:
        passes[-1] += 1
        return real(self, *args)

    monkeypatch.setattr(drafter, "_run_spans", first)
    for max_forced_tokens in (0, 64):
        passes.append(0)
        monkeypatch.setattr(drafter, "max_forced_tokens", max_forced_tokens)
        (done,) = target.with_draft(draft, draft_length=12).generate(PROMPT, params)
        steps.append(done.stats.target_steps)
    assert steps[1] < steps[0]
    assert passes[-1] < 0.7 * done.stats.drafted_tokens


@pytest.mark.broad
@pytest.mark.parametrize("draft", BEHIND)
def test_drafts_go_on_behind_it(target: LLM, draft: str) -> None:
    """Lookups and chains extend forced tokens: the text takes fewer steps than if forced tokens
    were a draft of their own. A datastore of other texts finds nothing and costs no step."""
    schema = {"type": "array", "items": SCHEMA, "minItems": 3, "maxItems": 3}
    steps, texts = [0, 0], list[list[int]]()
    for takes in (False, True):
        for seed in (None, 3):
            asked = {"temperature": 0.0} if seed is None else {"temperature": 1.0, "seed": seed}
            params = SamplingParams(max_tokens=120, grammar=Grammar.json(schema), **asked)
            llm = target.with_draft(draft, draft_length=12)
            if not takes:
                set_aside(llm.engine.drafter)
            (done,) = llm.generate(PROMPT, params)
            steps[takes] += done.stats.target_steps
            texts.append(done.token_ids)
            llm.close()
    assert texts[:2] == texts[2:]
    assert steps[True] < steps[False] + draft.startswith("datastore")


def set_aside(drafter: Any) -> None:
    """Make the drafter leave forced tokens to a draft of their own."""
    for member in with_members(drafter):
        kind = type(member)
        member.__class__ = type(kind.__name__, (kind,), {"max_forced_tokens": Fixed()})


class Fixed:
    """0, whatever is assigned."""

    def __get__(self, *_: Any) -> int:
        return 0

    def __set__(self, *_: Any) -> None:
        pass


@pytest.mark.broad
@pytest.mark.parametrize("draft", BEHIND)
def test_a_tree_has_room_for_what_is_forced(target: LLM, draft: str) -> None:
    """For any draft length, alone and in a batch, anywhere in the text."""
    item = {"type": "object", "properties": {"is": {"type": "boolean"}}, "required": ["is"]}
    schema = {"type": "array", "items": item | {"additionalProperties": False}, "minItems": 6}
    grammar = Grammar.json(schema | {"maxItems": 6})
    params = SamplingParams(max_tokens=90, grammar=grammar, temperature=1.0)
    begun = 0
    for length in (2, 5, 9, 16):
        llm = target.with_draft(draft, draft_length=length, max_batch_size=3, strict=True)
        drafter = llm.engine.drafter
        real = drafter.propose

        def propose(plan: Plan, drafter: Any = drafter, real: Any = real) -> list[TokenTree]:
            nonlocal begun
            runs = [forced_tokens(item) for item in plan.slices]
            trees: list[TokenTree] = real(plan)
            for item, run, tree in zip(plan.slices, runs, trees, strict=True):
                if len(tree) and run and can_extend_forced(drafter, run, item):
                    known = tree.tokens.tolist()
                    paths = [[known[node] for node in path] for path in paths_of(tree.parents)]
                    assert [*run] in paths
                    begun += len(tree) > len(run)
            return trees

        drafter.propose = propose  # type: ignore[method-assign]
        for done in llm.generate([PROMPT] * 3, params):
            assert all(set(part) == {"is"} for part in json.loads(done.text))
        llm.close()
    assert begun or draft.startswith("datastore")


@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 3}])
@pytest.mark.parametrize("draft", ["quantized", "paceline/tiny-draft"])
def test_chains_end_with_the_text(target: LLM, draft: str, sampled: dict[str, Any]) -> None:
    """At most one token is drafted after the end of the text."""
    llm = target.with_draft(draft, draft_length=16, seed=0)
    params = SamplingParams(max_tokens=40, grammar=Grammar("regex", "(ab|cde)"), **sampled)
    for done in llm.generate([PROMPT] * 3, params):
        assert 0 < done.stats.drafted_tokens <= (len("cde") + 1) * done.stats.target_steps


def test_chains_end_where_they_are_unlikely(
    target: LLM, expected: list[tuple[list[SamplingParams], list[list[int]]]], monkeypatch: Any
) -> None:
    """Chains along a grammar end early, too, and their verdicts calibrate the drafter."""
    llm = target.with_draft("quantized", draft_length=12)
    drafter, passes = llm.engine.drafter, list[int]()
    assert isinstance(drafter, SelfDrafter)
    real, learnt = SelfDrafter._run_spans, drafter._calibrations.of(SamplingParams()).power

    def first(self: SelfDrafter, *args: Any) -> Any:
        passes[-1] += 1
        return real(self, *args)

    monkeypatch.setattr(SelfDrafter, "_run_spans", first)
    for asked, texts in expected:
        by_least = []
        for stop in (0.0, 1.0):  # chains never end before their length, or behind each token
            drafter.min_level_prob = stop
            passes.append(0)
            (done,) = llm.generate(PROMPT, asked[0])
            assert done.token_ids == texts[0]
            by_least.append(passes[-1] / done.stats.target_steps)
        assert by_least[1] <= 1 < by_least[0]
    assert drafter._calibrations.of(SamplingParams()).power != learnt


@pytest.mark.parametrize("name", ["paceline/tiny", "smollm2"])
def test_forced_text_is_tokenised_as_the_tokenizer_does(target: LLM, name: str) -> None:
    """One way to write it is allowed, and its last token is left out where the text to come may
    change it: the tokens are those of the whole text, whatever that is."""
    real = name == "smollm2"
    tokenizer = load_tokenizer(real_model.require()) if real else target.tokenizer
    texts = (
        '{"name": "Anna", "postal_address": {"street_number": 12}}',
        '{"name": "", "postal_address": {"street_number": -3}}',
        '{"name": " x\\"", "postal_address": {"street_number": 0}}',
    )
    compiler = GrammarCompiler(tokenizer, len(tokenizer), frozenset())
    for text in texts:
        matcher, ids = (
            compiler.matcher(Grammar.json(SCHEMA)),
            tokenizer.encode(text, add_special_tokens=False),
        )
        position = count = 0
        while position < len(ids):
            forced = tuple(matcher.forced_tokens())
            assert forced == tuple(ids[position : position + len(forced)])
            for number, token in enumerate(forced):
                mask = matcher.allowed_tokens(forced[:number])
                assert mask is not None and mask.nonzero().flatten().tolist() == [token]
                assert matcher.is_allowed(forced[:number], token)
                assert not matcher.is_allowed(forced[:number], token - 1)
            taken = ids[position : position + max(1, len(forced))]
            matcher.consume(taken)
            position, count = position + len(taken), count + len(forced)
        assert count > len(ids) / 3


@pytest.mark.parametrize("draft", ["ngram", "quantized"])
def test_unseeded_sampling_follows_the_grammar(target: LLM, draft: str) -> None:
    llm = target.with_draft(draft, seed=2)
    params = SamplingParams(max_tokens=80, temperature=1.0, grammar=Grammar.json(SCHEMA))
    for completion in llm.generate([PROMPT] * 4, params):
        assert set(json.loads(completion.text)) == {"name", "postal_address"}


def test_tokens_that_the_target_has_no_logits_for_are_not_drafted(target: LLM) -> None:
    grammar = Grammar.json(SCHEMA)
    tokens = list(compiler_of(target).matcher(grammar).forced_tokens())
    narrow = max(tokens)
    matcher = GrammarCompiler(target.tokenizer, narrow, frozenset()).matcher(grammar)
    assert list(matcher.forced_tokens()) == tokens[: tokens.index(narrow)]
