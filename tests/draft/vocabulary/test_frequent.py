"""How many of the head's columns a draft computes, by the tokens of the current texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
from paceline.core.sequence import SequenceView
from paceline.core.tree import TokenTree
from paceline.draft.selfspec import FrequentTokens
from paceline.draft.trees.levels import LevelDrafter
from support.engine_models import write_pair

VOCAB = 48_000


def view(seq_id: int, tokens: Sequence[int]) -> SequenceView:
    return SequenceView(seq_id, list(tokens), len(tokens), SamplingParams())


def test_texts_of_frequent_tokens_need_half_a_head() -> None:
    usual = view(0, [*range(0, 20_000, 100), 40_000])
    assert FrequentTokens(VOCAB, 0.3).columns([usual]) == VOCAB // 2
    assert FrequentTokens(VOCAB, 0.02).columns([usual]) == VOCAB, "a small head saves nothing"


def test_a_text_of_rare_tokens_needs_all_and_so_do_its_neighbours() -> None:
    found = FrequentTokens(VOCAB, 0.3)
    usual, rare = view(0, range(200)), view(1, range(47_000, 47_200))
    assert found.columns([usual]) < VOCAB == found.columns([rare]) == found.columns([usual, rare])
    found.learn(0, range(47_000, 47_100))
    assert found.columns([usual]) == VOCAB, "it goes on in another language"
    found.forget(0)
    assert found.columns([usual]) < VOCAB


def test_small_vocabularies_are_read_whole() -> None:
    assert FrequentTokens(8_000, 0.9).columns([view(0, range(10))]) == 8_000


def test_the_text_is_the_targets_whatever_its_draft_cannot_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rare tokens come from the target alone."""
    target, _ = write_pair(tmp_path)
    prompts, params = (
        [[5, 9, 30, 41, 7], [3, 1, 4]],
        SamplingParams(max_tokens=30, ignore_eos=True),
    )
    plain = LLM(target, None, dtype="float32", backend="native").generate(prompts, params)
    drafted: list[int] = []
    propose = LevelDrafter.propose

    def proposed(drafter: LevelDrafter, plan: object) -> list[TokenTree]:
        trees = propose(drafter, plan)  # type: ignore[arg-type]
        drafted.extend(token for tree in trees for token in tree.tokens.tolist())
        return trees

    monkeypatch.setattr(LevelDrafter, "propose", proposed)
    monkeypatch.setattr(FrequentTokens, "columns", lambda *_: 160)
    llm = LLM(target, "quantized:int8", dtype="float32", backend="native", draft_length=4)
    found = llm.generate(prompts, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in plain]
    assert max(drafted) < 160 <= max(token for c in plain for token in c.token_ids)
    assert sum(c.stats.accepted_tokens for c in found) > 0
