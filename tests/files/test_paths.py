"""Paths that a user may write: of a user that there is not, with a NUL, of thousands of letters."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, PacelineError
from paceline.draft.foreign import foreign_of
from paceline.drafters import parse_draft
from paceline.files import cache_folder, user_path
from paceline.model.tokenizer import load_tokenizer

READERS: dict[str, Callable[[str], Any]] = {
    "model": lambda path: LLM(path, "none"),
    "tokenizer": load_tokenizer,
    "draft": lambda path: LLM("paceline/tiny", path),
    "drafter": lambda path: parse_draft(re.sub("[./~]", "", path)),
    "head": lambda path: LLM("paceline/tiny", f"eagle3:{path}"),
    "datastore": lambda path: LLM("paceline/tiny", f"datastore:{path}"),
    "adapter": lambda path: LLM("paceline/tiny", "none", lora={"a": path}),
    "configuration": lambda path: foreign_of(f"@{path}"),
    "tuned settings": lambda path: LLM("paceline/tiny", config=path),
}


@pytest.mark.parametrize(
    "path", ["~nobody-of-this-name/x", "./a\0b", "./" + "x" * 300, "./" + "x" * 5000]
)
@pytest.mark.parametrize("reader", READERS)
def test_a_path_that_cannot_be_is_refused_in_one_line(reader: str, path: str) -> None:
    with pytest.raises(PacelineError) as caught:
        READERS[reader](path)
    assert "\n" not in str(caught.value)


def test_homes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    assert user_path("~/a") == Path("/home/x/a")
    monkeypatch.setenv("PACELINE_CACHE", "~nobody-of-this-name/x")
    assert cache_folder() == Path("~nobody-of-this-name/x").absolute()
