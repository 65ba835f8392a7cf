"""A right engine is certified, also under truncation and penalties; what is not one is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.core.params import SamplingParams
from paceline.errors import ConfigError, PromptError
from paceline.lab.certify.decoding import Start
from paceline.lab.certify.effort import Effort
from paceline.lab.certify.run import Certifier, Prefix, certify
from paceline.llm import LLM

Named = Sequence[tuple[str, Sequence[int]]]
SMALL = Effort(num_prompts=2, max_tokens=16, prefixes=1, samples=600)
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3}
PENALISED = SamplingParams(temperature=0.8, top_p=0.9, logit_bias={7: 2.0}, **PENALTIES)


@pytest.mark.parametrize("params", [SamplingParams(temperature=1.0), PENALISED])
def test_a_correct_engine_is_certified(llm: LLM, prompts: Named, params: SamplingParams) -> None:
    certificate = certify(llm, prompts, params, effort=SMALL)
    assert certificate.lossless, certificate.verdict
    assert certificate.verdict.startswith("CERTIFIED: ")
    assert {check.kind for check in certificate.rows("texts")} == {"greedy", "seeded"}
    assert all(check.drafted > check.accepted > 0 for check in certificate.rows("texts"))
    assert max(check.distance for check in certificate.rows("exact")) < 1e-6
    assert {test.part for test in certificate.rows("tests")} == {"sampling", "drafter"}
    assert 0 < certificate.facts["smallest_bias"] < 0.25
    sampled = [test for test in certificate.rows("tests") if test.part == "sampling"]
    assert f"no bias in {len(sampled)} tests of samples" in certificate.verdict


def test_trees_without_replacement(llm: LLM, folders: tuple[str, str], prompts: Named) -> None:
    tree = llm.with_draft(
        f"tree:{folders[1]},branching=2x2", draft_length=2, max_batch_size=64, seed=1
    )
    certificate = certify(tree, prompts, effort=SMALL)
    assert certificate.lossless, certificate.verdict
    assert any(test.part == "drafter" for test in certificate.rows("tests"))
    assert {check.draw for check in certificate.rows("exact")} == {"without_replacement"}


def test_an_adaptive_engine_with_chosen_drafts(llm: LLM, prompts: Named) -> None:
    ngram = llm.with_draft("ngram", max_batch_size=8, seed=1)
    again = [("again", [*prompts[0][1], *prompts[0][1]] * 2)]
    certifier = Certifier(ngram, again, None, Effort(1, 16, 1, 200))
    assert list(certifier.settings)[2] == "draft length auto, alone"
    pieces: list[str] = []
    certifier.run(pieces.append)
    assert len(pieces) == len(list(certifier.tasks()))
    # Its drafts are chosen, so there is no distribution of its own to test.
    assert not [t for t in certifier.certificate().rows("tests") if t.part == "drafter"]


def test_the_rule_is_enumerated_where_a_lookup_matches(llm: LLM) -> None:
    """It was "not enumerated" where nothing was drafted at the prefix itself."""
    tokens = tuple(range(20, 60))  # no token comes twice
    ngram = llm.with_draft("ngram:min=1", draft_length=2, max_batch_size=64, seed=1)
    certifier = Certifier(ngram, [("new", tokens)], None, replace(SMALL, num_prompts=1))
    certifier.prefixes.append(Prefix(Start(tokens, SamplingParams(temperature=1.0)), 2))
    certifier.run()
    assert certifier.exact
    assert all(check.passed and check.draw == "point" for check in certifier.exact)


def test_plain_decoding_takes_no_more_memory_than_the_engine(llm: LLM, prompts: Named) -> None:
    """Its cache was a share of all that was free: 6 s to fill with zeros beside SmolLM2."""
    small = llm.with_draft("ngram", max_batch_size=8, draft_length=2, kv_cache_memory=2 << 20)
    certifier = Certifier(small, prompts, None, SMALL)
    assert certifier.plain.cache.num_blocks <= small.engine.cache.num_blocks
    sizes = {"max_batch_size": 2, "max_model_len": 40}
    assert llm.with_draft("ngram", **sizes).engine.cache.num_blocks == 2 * 4  # one spare each
    with pytest.raises(ConfigError, match="max_model_len is 9999"):
        llm.with_draft("ngram", max_model_len=9999)


def test_greedy_only(llm: LLM, prompts: Named) -> None:
    certificate = certify(llm, prompts, SamplingParams(), effort=SMALL)
    assert certificate.lossless
    assert not certificate.rows("tests") and "temperature is 0" in certificate.notes[0]
    assert "greedy decoding only, no samples were drawn" in certificate.verdict


@pytest.mark.parametrize(
    ("effort", "lack"),
    [
        (Effort(1, 16, 1, 600), "whole texts compared: 1, not 2"),
        (Effort(2, 16, 1, 100), "or more would have been detected"),
    ],
)
def test_small_effort_settings_give_no_certificate(
    llm: LLM, prompts: Named, effort: Effort, lack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.lab.certify.certificate.MAX_BIAS", 0.1)
    certificate = certify(llm, prompts, effort=effort)
    assert certificate.facts["complete"] and not certificate.problems
    assert not certificate.lossless
    assert certificate.verdict.startswith("NOT ENOUGH: ") and lack in certificate.verdict


class Silent:
    """Never proposes anything."""

    def __init__(self, drafter, empty) -> None:
        self._drafter, self._empty = drafter, empty

    def propose(self, plan):
        return [self._empty] * len(plan.slices)

    def __getattr__(self, name: str):
        return getattr(self._drafter, name)


def test_without_drafts_nothing_is_certified(llm: LLM, prompts: Named) -> None:
    llm.engine.drafter = Silent(llm.engine.drafter, llm.engine.drafter._empty)
    certificate = certify(llm, prompts, effort=SMALL)
    assert not certificate.lossless
    assert "the drafter proposed nothing for greedy requests" in certificate.verdict


def test_the_same_seed_gives_the_same_certificate(folders: tuple[str, str], llm: LLM) -> None:
    one = [("one", list(range(20, 40)))]
    records = [
        certify(
            llm.with_draft(folders[1], draft_length=2, max_batch_size=64, seed=seed),
            one,
            effort=Effort(1, 8, 1, 100),
        ).record()
        for seed in (1, 2)
    ]
    for record in records:  # what it took is another each time
        assert record.pop("seconds") > 0 and record.pop("verdict")
    assert records[0] == records[1]


def test_refusals(llm: LLM, folders: tuple[str, str], prompts: Named) -> None:
    with pytest.raises(ConfigError, match="no drafter to certify; give one with draft"):
        certify(llm.with_draft(), prompts)
    with pytest.raises(ConfigError, match="draft length 0 drafts nothing"):
        certify(llm.with_draft(folders[1], draft_length=0), prompts)
    with pytest.raises(PromptError, match="no prompt was given"):
        certify(llm, [])
    with pytest.raises(PromptError, match="prompt a has 0 tokens"):
        certify(llm, [("a", [])])
    with pytest.raises(PromptError, match=r"prompt b has 150 tokens; give .* at most "):
        certify(llm, [("b", [1] * 150)])
    with pytest.raises(PromptError, match=r"leave no room for a prompt .*; lower"):
        certify(llm, prompts, effort=replace(SMALL, max_tokens=llm.max_model_len))
    for wrong in ({"num_prompts": 0}, {"samples": 5}, {"seed": -1}):
        with pytest.raises(ConfigError, match=f"^{next(iter(wrong))} is "):
            Effort(**wrong)
