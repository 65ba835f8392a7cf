"""docs/get-started/migration.md names every keyword of other engines that is known here, beside
ours, and docs/comparison.md counts our drafters. Their code is run by test_readme."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path

from paceline import LLM, SamplingParams
from paceline.core.keywords import TABLES
from paceline.drafters import RECORDS

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = (DOCS / "get-started" / "migration.md").read_text(encoding="utf-8")
OURS = {
    name
    for function in (LLM.__init__, LLM.generate, SamplingParams)
    for name in signature(function).parameters
}


def test_every_keyword_that_is_known_is_in_the_tables() -> None:
    page = PAGE.replace("`--", "`").replace("-", "_")
    theirs = {**TABLES["theirs"], **TABLES["instead"]}
    assert not [name for name in theirs if f"`{name}" not in page]


def test_a_mapped_keyword_stands_beside_ours() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    for theirs, listed in TABLES["theirs"].items():
        ours = listed if isinstance(listed, str) else listed[0]
        own = [row for row in rows if f"`{theirs}`" in row.split(" | ")[0]]
        if ours in OURS and own:
            assert any(re.search(rf"[`(]{ours}\b", row.split(" | ", 1)[1]) for row in own), theirs


def test_the_comparison_counts_our_drafters() -> None:
    kinds = [record.kind for record in RECORDS if record.kind not in ("none", "hybrid", "auto")]
    page = (DOCS / "comparison.md").read_text(encoding="utf-8")
    assert f"[{len(kinds)} kinds](" in page
