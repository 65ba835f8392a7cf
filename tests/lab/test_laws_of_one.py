"""``paceline check-drafter``: drafters that keep the laws, and planted bugs that it names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from paceline import LLM, ConfigError, SamplingParams
from paceline.control.controller import FixedLength
from paceline.core.batch import Plan, Slice
from paceline.core.sequence import SequenceState
from paceline.core.tree import depths_of
from paceline.drafters import Draw, LookupDrafter, TokenTree
from paceline.lab.laws import _WAYS, Law, drafters_of, laws
from support.command_lines import paceline
from support.every_drafter import TARGET

PROMPT = "7 + 5 = 12, 7 + 6 = 13, 7 + 7 ="


class Again(LookupDrafter):
    name = "again"

    def propose_one(self, item: Slice) -> tuple[Sequence[int], Sequence[int]]:
        tokens = list(item.seq.tokens)
        before = [n for n, token in enumerate(tokens[:-1]) if token == tokens[-1]]
        chain = tokens[before[-1] + 1 :][: item.draft_length] if before else []
        return chain, range(-1, len(chain) - 1)


class Backwards(Again):
    def propose_one(self, item: Slice) -> tuple[Sequence[int], Sequence[int]]:
        chain, _ = super().propose_one(item)
        return chain, range(1, len(chain) + 1)


class Keeping(Again):
    def propose_one(self, item: Slice) -> tuple[Sequence[int], Sequence[int]]:
        self.states.get_or_make(item.seq, lambda seq: [seq.seq_id])
        return super().propose_one(item)

    def forget(self, seq_id: int) -> None:
        self._offered.pop(seq_id, None)


class Fewer(Again):
    def propose(self, plan: Plan) -> list[TokenTree]:
        return super().propose(plan)[:-1]


class Drawing(Again):
    """Declares that its tokens, which are always the same, were sampled uniformly."""

    def propose(self, plan: Plan) -> list[TokenTree]:
        width = 4096
        return [
            TokenTree(t.tokens, t.parents, Draw.IID, torch.full((len(t), width), 1 / width))
            if len(t)
            else t
            for t in super().propose(plan)
        ]


def silent() -> LookupDrafter:
    class Silent(Again):
        def propose_one(self, item: Slice) -> tuple[Sequence[int], Sequence[int]]:
            return (), ()

    return Silent()


def broken(kind: Any, name: str) -> str:
    """The broken law and how it is broken; later laws are not run."""
    return next(law.broken for law in laws("it", kind, TARGET) if law.name == name)


def test_a_correct_drafter_keeps_all_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.lab.laws._ANSWERS", 20)  # how many show a bias: below
    done = paceline("check-drafter", f"{__name__}:Again", "--json")
    said = json.loads(done.stdout)
    assert [law for law in said["checks"] if law["broken"]] == []
    assert done.exit_code == 0 and said["passed"] and len(said["checks"]) == 8


def test_equal_errors_show_one_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven laws, and three of them had it again for another node of the tree."""

    def broken(drafter: str, make: object, model: str) -> Iterator[Law]:
        for node in (1, 4, 3, 3):
            try:
                depths_of((node,))
            except ConfigError as error:
                yield Law(drafter, str(node), str(error), error)

    monkeypatch.setattr("paceline.lab.laws.laws", broken)
    done = paceline("check-drafter", f"{__name__}:Again")
    assert done.exit_code == 1 and done.stderr.count("Traceback") == 1
    assert "node 0 has parent 1" in done.stderr and done.stdout.count("has parent 3") == 1
    assert "as above" in done.stdout


@pytest.mark.parametrize(
    ("kind", "law", "words"),
    [
        (Backwards, "greedy text", "parents must come before their children"),
        (Keeping, "greedy text", "must drop all state"),
        (Fewer, "greedy text", "one tree for each slice"),
        (silent, "something is proposed", "nothing was proposed"),
    ],
)
def test_planted_bugs_are_named(
    kind: Any, law: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.lab.laws._ANSWERS", 20)  # none of them is in the distribution
    if law not in _WAYS:
        monkeypatch.setattr("paceline.lab.laws._WAYS", {})
    assert words in broken(kind, law)


@pytest.mark.slow  # 200 answers for each way
def test_a_wrong_q_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """No single tree shows the error, only the distribution."""
    monkeypatch.setattr("paceline.lab.laws._WAYS", {})
    monkeypatch.setattr("paceline.lab.laws._ANSWERS", 200)
    width = LLM(TARGET, draft=None).target.vocab_size
    assert width == 4096
    assert "chi-square" in broken(Drawing, "distribution")


def test_names_that_cannot_be_imported() -> None:
    for name, words in (
        ("nowhere_at_all:Thing", "cannot be imported"),
        (f"{__name__}:PROMPT", "no class and no function"),
        (f"{__name__}:broken", "needs kind"),
    ):
        with pytest.raises(ConfigError, match=words):
            drafters_of(name, TARGET)
    assert next(iter(drafters_of("paceline.draft.ngram:NGram", TARGET))).startswith("ngram")


@pytest.mark.parametrize("given", [[], [3, 3]])
def test_a_controller_returning_a_list_of_wrong_length_is_an_error(given: list[int]) -> None:
    """It was zip's error."""

    class Short(FixedLength):
        def lengths(self, seqs: Sequence[SequenceState]) -> list[int]:  # type: ignore[override]
            return given

    llm = LLM(TARGET, "ngram", controller=Short(3), strict=True)
    rule = f"Short: lengths must return one draft for each .* 1 sequences, and {len(given)} drafts"
    with pytest.raises(ConfigError, match=rule):
        llm.generate(PROMPT, SamplingParams(max_tokens=4))


def test_strict_raises_with_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=12)
    plain = LLM(TARGET, draft=None)
    expected = plain.generate(PROMPT, params)[0].token_ids
    lenient = plain.with_draft(Backwards(), draft_length=3)
    assert lenient.generate(PROMPT, params)[0].token_ids == expected
    strict = plain.with_draft(Backwards(), draft_length=3, strict=True)
    with pytest.raises(ConfigError, match="parents must come before their children") as raised:
        strict.generate(PROMPT, params)
    assert "propose" in [entry.name for entry in raised.traceback]
    monkeypatch.setenv("PACELINE_STRICT", "1")
    with pytest.raises(ConfigError, match="parents must come before"):
        plain.with_draft(Backwards(), draft_length=3).generate(PROMPT, params)
    llm = plain.with_draft("ngram")
    monkeypatch.setattr(llm.engine.drafter, "forget", lambda seq_id: {}[seq_id])
    with pytest.raises(KeyError):  # also when the text has ended
        llm.generate(PROMPT, params)
