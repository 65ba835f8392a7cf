"""Colouring of streamed text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.text import Text

from paceline.cli.output import DRAFT_STYLE, TARGET_STYLE, Painter


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from embedded_target import train_tokenizer

    return train_tokenizer(["Lily went to the garden and the garden was big."] * 3, 300)


def runs(painted: Text) -> list[tuple[str, str]]:
    """Styled pieces, neighbours of one style joined."""
    pieces: list[tuple[str, str]] = []
    for span in painted.spans:
        piece, style = painted.plain[span.start : span.end], str(span.style)
        if pieces and pieces[-1][1] == style:
            piece = pieces.pop()[0] + piece
        pieces.append((piece, style))
    return [item for item in pieces if item[0]]


def test_draft_and_target_tokens_are_told_apart(tokenizer: Any) -> None:
    left = tokenizer.encode("Lily went", add_special_tokens=False)
    right = tokenizer.encode(" to the garden", add_special_tokens=False)
    mask = [True] * len(left) + [False] * len(right)
    painted = Painter(tokenizer, True).paint(left + right, mask, "Lily went to the garden")
    assert painted.plain == "Lily went to the garden"
    assert runs(painted) == [("Lily went", DRAFT_STYLE), (" to the garden", TARGET_STYLE)]


def test_text_held_back_by_the_engine_keeps_its_colour(tokenizer: Any) -> None:
    ids = tokenizer.encode("garden", add_special_tokens=False)
    painter = Painter(tokenizer, True)
    assert runs(painter.paint(ids, [True] * len(ids), "gar")) == [("gar", DRAFT_STYLE)]
    more = tokenizer.encode(" big", add_special_tokens=False)
    later = painter.paint(more, [False] * len(more), "den big")
    assert runs(later) == [("den", DRAFT_STYLE), (" big", TARGET_STYLE)]


def test_without_colours_the_text_is_plain(tokenizer: Any) -> None:
    painted = Painter(tokenizer, False).paint([5], [True], "[bold]x[/bold]")
    assert painted.plain == "[bold]x[/bold]"
    assert not painted.spans


@settings(deadline=None, max_examples=40)
@given(text=st.text(max_size=30), data=st.data())
def test_painting_never_changes_the_text(tokenizer: Any, text: str, data: st.DataObject) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    mask = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    cut = data.draw(st.integers(0, len(text)))
    painter = Painter(tokenizer, True)
    half = len(ids) // 2
    first = painter.paint(ids[:half], mask[:half], text[:cut])
    second = painter.paint(ids[half:], mask[half:], text[cut:])
    assert first.plain + second.plain == Text(text[:cut]).plain + Text(text[cut:]).plain


def test_a_drafter_that_did_not_draft_says_so() -> None:
    """It read "0% of drafted tokens accepted"; without a drafter there is nothing to say."""
    from paceline import LLM, SamplingParams
    from paceline.cli.output import summary

    llm = LLM("paceline/tiny", draft="ngram")
    (done,) = llm.generate("Once", SamplingParams(max_tokens=3, draft_length=0))
    assert "no draft was tried: none is asked for" in summary(done, drafts=True)
    assert "draft" not in summary(done) and "first token after" not in summary(done)
    late = replace(done, stats=replace(done.stats, time_to_first_token=26.54))
    assert " · first token after 26.5 s" in summary(late)


def test_what_the_last_token_left_unfinished(tokenizer: Any) -> None:
    painter = Painter(tokenizer, True)
    ids = tokenizer.encode("🙂", add_special_tokens=False)[:-1]
    shown = painter.paint(ids, [False] * len(ids)).plain
    assert shown + painter.rest().plain == tokenizer.decode(ids)
    assert painter.rest().plain != ""
