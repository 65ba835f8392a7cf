"""The real model, SmolLM2-135M-Instruct, read once for all tests here; skipped where it is not.

``PACELINE_TEST_MODEL`` names its folder; otherwise it is what ``paceline pull smollm2`` left in
the cache of whoever runs the tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import LLM

CACHE = 100 << 20  # bytes: some 1,000 tokens; the default is a share of all memory, for each LLM


def _folder() -> Path:
    named = os.environ.get("PACELINE_TEST_MODEL")
    if named:
        return Path(named)
    # The suite hides the cache from all other tests, and leaves its place under this name.
    cache = os.environ.get("PACELINE_TEST_CACHE") or os.environ.get("PACELINE_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache or Path(shared) / "paceline") / "models" / "smollm2"


@pytest.fixture(scope="session")
def model() -> str:
    """Its folder."""
    folder = _folder()
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        pytest.skip(
            "the real model is not here: paceline pull smollm2, or name a folder of "
            "SmolLM2-135M-Instruct in PACELINE_TEST_MODEL"
        )
    return str(folder)


@pytest.fixture(scope="session")
def plain(model: str) -> Iterator[LLM]:
    """float32, without drafts."""
    llm = LLM(model, draft="none", dtype="float32", draft_length=0, kv_cache_memory=CACHE)
    yield llm
    llm.close()
