"""Every kind of drafter: specs, variants for tune, reports to doctor, and its distribution."""

from __future__ import annotations

from collections import Counter
from dataclasses import FrozenInstanceError, dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, ConfigError, SamplingParams
from paceline.core.batch import Slice
from paceline.draft.base import Drafter, DrafterTraits, LookupDrafter
from paceline.draft.ngram import NGram
from paceline.draft.spec import DraftSpec, LoadContext, PreparedDraft, TreeSpec
from paceline.drafters import (
    DRAFTERS,
    RECORDS,
    DraftModel,
    Eagle3,
    Hybrid,
    QuantizedDraft,
    Registry,
    Suffix,
    parse_draft,
)
from paceline.lab.doctor import Severity, examine
from paceline.lab.tune.candidates import variants
from support.every_drafter import WEIGHTS

TARGET = "paceline/tiny"
ROOT = Path(__file__).parents[2]
CACHE = 128 << 20  # bytes: room for 200 short requests; whole contexts of them would fill 2.5 GB
EXAMPLES = [example for record in DRAFTERS.values() for example in record.examples]
FIRST = [record.examples[0] for record in DRAFTERS.values()]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(
        TARGET, draft="none", dtype="float32", max_batch_size=200, kv_cache_memory=CACHE, seed=3
    )


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_spec_is_written_as_it_was_read(example: str) -> None:
    spec = parse_draft(example)
    assert spec.kind == example.partition(":")[0] and type(spec) is DRAFTERS[spec.kind]
    assert str(spec) == example and parse_draft(str(spec)) == spec
    with pytest.raises(FrozenInstanceError):
        spec.kind = "other"  # type: ignore[misc]


@pytest.mark.parametrize("example", EXAMPLES)
def test_what_tune_tries_in_its_place(example: str) -> None:
    found = variants(example)
    assert bool(found) == (example != "none")
    assert len({one.label for one in found}) == len(found)
    assert all(str(parse_draft(one.spec)) == one.spec for one in found)


@pytest.mark.broad
@pytest.mark.parametrize("example", FIRST)
def test_doctor_has_no_complaint(example: str) -> None:
    findings = examine(TARGET, example.format(**WEIGHTS))
    mine = [item for item in findings if item.about != "machine"]  # processors differ
    assert {item.about for item in mine} - {"target"}
    assert {item.severity for item in mine} <= {Severity.NOTE, Severity.OK}


def pairs_of(llm: LLM) -> Counter[tuple[int, ...]]:
    """The first two tokens of 200 unseeded answers."""
    params = SamplingParams(max_tokens=2, temperature=1.0, top_k=3, ignore_eos=True, n=200)
    found = llm.generate("The quick brown fox", params)
    return Counter(tuple(completion.token_ids) for completion in found)


@pytest.fixture(scope="module")
def ours(plain: LLM) -> Counter[tuple[int, ...]]:
    return pairs_of(plain)


@pytest.mark.broad
@pytest.mark.parametrize("example", FIRST)
def test_unseeded_pairs_follow_the_targets_distribution(
    plain: LLM, ours: Counter[tuple[int, ...]], example: str
) -> None:
    """First two tokens over many runs: plain and drafted counts come from one distribution.

    A two-sample chi-square; the engine seeds are fixed. 27.9 is the 0.05 % point of 8 degrees.
    """
    spec = example.format(**WEIGHTS)
    options = {"draft_length": 2, "max_batch_size": 200, "kv_cache_memory": CACHE}
    theirs = pairs_of(plain.with_draft(spec, seed=5, **options))
    pairs = ours.keys() | theirs.keys()
    statistic = sum((ours[p] - theirs[p]) ** 2 / (ours[p] + theirs[p]) for p in pairs)
    assert len(pairs) <= 9 and statistic < 27.9


def test_a_spec_in_python_is_the_same_as_its_text() -> None:
    for spec, text in (
        (NGram(min=2), "ngram:min=2"),
        (Eagle3("path", nodes=16), "eagle3:path,nodes=16"),
        (Eagle3("path", feature_layers=(2, 16, 29)), "eagle3:path,feature_layers=2x16x29"),
        (DraftModel("org/name", branching=(2, 2)), "model:org/name,branching=2x2"),
        (QuantizedDraft("int8"), "quantized:int8"),
        (Suffix(shared=False), "suffix:global=off"),
        (Hybrid(NGram(), Eagle3("a+b")), "hybrid:ngram+eagle3:a+b"),
    ):
        assert str(spec) == text and parse_draft(text) == spec


def test_an_option_by_its_former_name(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "paceline.core.keywords._announced", set()
    )  # by another test of this process
    for _ in range(2):
        assert parse_draft("eagle3:path,layers=2x6") == Eagle3("path", feature_layers=(2, 6))
    (told,) = caplog.messages
    assert told == "note: draft 'eagle3': layers is feature_layers here"
    for both in ("layers=1,feature_layers=2", "feature_layers=2,layers=1"):
        with pytest.raises(ConfigError, match=r"feature_layers (here|twice); give it once"):
            parse_draft(f"eagle3:path,{both}")
    assert parse_draft("early_exit:layers=3").layers == 3  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="quantize is 'int4'; use one of int8, none"):
        parse_draft("eagle3:path,quantize=int4")
    # Not by another name, for the values are others.
    for text, words in (
        ("int8=off", "no option int8; it knows: .*quantize"),
        ("quantize=off", "'off'"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_draft(f"eagle3:path,{text}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ngram:size=4", "no option size; it knows: min, max, length"),
        ("ngram:4", "'4' is not KEY=VALUE"),
        ("ngram+suffix", r"several at once are hybrid:ngram\+suffix"),
        ("hybrid:ngram+nope", "member 'nope' begins with no known kind"),
        ("eagle3", "'eagle3' needs a head: eagle3:PATH"),
        ("medusa:", "'medusa' needs heads: medusa:PATH"),
        ("medusa", "'medusa' needs heads: medusa:PATH"),
        ("medusa:x,depth=3", "no option depth"),
        ("medusa:x,nodes=0", "nodes is 0; it must be at least 1"),
        ("tree:x,nodes=4,branching=2", "either branching or nodes"),
        ("model:x,branching=2x0", "branching='2x0' is not like 2x2x1"),
        ("eagle:x,feature_layers=two", "feature_layers='two' is not like 2x16x29"),
        ("quantized:int3", "quantize is 'int3'; use one of int8, int4"),
        ("dspark:x,stop=nan", "stop=nan is not a number"),
        ("dspark:x,stop=inf", "stop=inf is not a number"),
        ("datastore:x,min=17", "min is 17; it must be at least 5 and at most 16"),
        ("tree:x,width=0", "width is 0; it must be at least 1"),
        ("recycling:share=perhaps", "share='perhaps' is neither on nor off"),
        ("suffix:global=maybe", "neither on nor off"),
        ("suffix:global=off,nodes=0", "nodes is 0"),
        ("suffix:factor=much", "not a number"),
        ("suffix:depth=3", "no option depth"),
    ],
)
def test_specs_that_make_no_sense(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_draft(text)


def test_a_path_may_have_an_equals_sign() -> None:
    spec = parse_draft("eagle3:runs/lr=3e-4,nodes=9")
    assert spec == Eagle3("runs/lr=3e-4", nodes=9)
    assert parse_draft(str(spec)) == spec


def test_every_option_of_a_tree_is_checked_in_python_too() -> None:
    for wrong in ({"nodes": -1}, {"width": 0}, {"branching": (2, 0)}):
        with pytest.raises(ConfigError):
            DraftModel("x", **wrong)  # type: ignore[arg-type]
    whole: tuple[dict[str, Any], ...] = ({"nodes": True}, {"nodes": 2.5}, {"width": "3"})
    for wrong in whole:
        with pytest.raises(ConfigError, match="is not a whole number"):
            DraftModel("x", **wrong)
    with pytest.raises(ConfigError, match="branching=2 is not like 2x2x1"):
        DraftModel("x", branching=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="global='off' is neither on nor off"):
        Suffix(shared="off")  # type: ignore[arg-type]
    assert DraftModel("x", branching=[2, 1]).branching == [2, 1]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="join drafters"):
        Hybrid()


# -- drafters of others ----------------------------------------------------------------------------


class CountingDrafter(LookupDrafter):
    """The next token is the last one plus one."""

    name = "counting"

    def propose_one(self, item: Slice) -> tuple[list[int], range]:
        last, length = item.seq.tokens[-1], item.draft_length
        return [(last + n) % 4096 for n in range(1, 1 + length)], range(-1, length - 1)


@dataclass(frozen=True)
class Counting(DraftSpec):
    kind = "counting"
    page = "https://example.org"
    examples = ("counting",)

    def prepare(self, loading: LoadContext) -> PreparedDraft:
        return PreparedDraft(lambda context: CountingDrafter(context.target.device))


def test_objects_and_specs_stand_beside_strings(plain: LLM) -> None:
    own = CountingDrafter(plain.engine.cache.device)
    assert isinstance(own, Drafter)
    llm = plain.with_draft([own, NGram(min=2), "ngram", Counting()], draft_length=3)
    assert llm.drafters == ("counting", "ngram", "ngram-2", "counting-2")
    prompt, asked = "7 + 5 = 12, 7 + 6 =", {"max_tokens": 8, "ignore_eos": True}
    wanted = plain.generate(prompt, SamplingParams(**asked))[0]  # type: ignore[arg-type]
    for name in llm.drafters:
        (found,) = llm.generate(prompt, SamplingParams(drafter=name, **asked))  # type: ignore[arg-type]
        assert found.token_ids == wanted.token_ids
        assert found.stats.drafted_tokens or name.startswith("ngram")
    alone = plain.with_draft(own, draft_length="auto")
    assert alone.drafters == ("counting",)
    assert alone.generate(prompt, SamplingParams(**asked))[0].token_ids == wanted.token_ids  # type: ignore[arg-type]


def test_what_is_no_drafter_is_told_what_it_lacks(plain: LLM) -> None:
    wrong: Any = object()
    with pytest.raises(ConfigError, match=r"lacks .*propose.*your_own\.md"):
        plain.with_draft(wrong)


def entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, "paceline.drafters")


def test_kinds_of_other_packages_are_loaded_when_asked_for() -> None:
    here = f"{__name__}:Counting"
    found = Registry(RECORDS, [entry("counting", here), entry("ngram", here)])
    assert "counting" in found and list(found)[-1] == "counting" and len(found) == len(RECORDS) + 1
    assert found["counting"].kind == "counting" and found["ngram"] is NGram


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("nowhere_at_all:Thing", "cannot be loaded"),
        (f"{__name__}:WEIGHTS", "is no DraftSpec"),
        (f"{__name__}:Counting", "calls itself 'counting'"),
    ],
)
def test_broken_packages_are_told_in_one_line(value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Registry(RECORDS, [entry("broken", value)])["broken"]
    assert "\n" not in str(caught.value) and "'broken'" in str(caught.value)


def test_trees_have_a_shape_for_tune() -> None:
    for record in RECORDS:
        if issubclass(record, TreeSpec) and record.argument_kind != "nothing":
            spec = parse_draft(f"{record.kind}:path,branching=3x1")
            assert spec.variants() == {"": spec}


def test_the_page_lists_all_members_of_a_drafter() -> None:
    """docs/drafters/your_own.md: the members of the Protocol, and the optional attributes."""
    page = (ROOT / "docs/drafters/your_own.md").read_text()
    rows = {
        row.split("`")[1].partition("(")[0]: [cell.strip() for cell in row.split("|")]
        for row in page.splitlines()
        if row.startswith("| `")
    }
    members = {name for name in vars(Drafter) if not name.startswith("_")}
    assert members <= rows.keys()
    defaults = {name: f"`{value}`" for name, value in DrafterTraits._field_defaults.items()}
    assert {name: rows[name][2] for name in defaults} == defaults
