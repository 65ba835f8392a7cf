"""The pulled SmolLM2, for tests on a real model: where it lies, or why there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.model.names import SMOLLM2, model_folder, pulled

_MISSING = f"{SMOLLM2.full_name} has not been pulled (paceline pull {SMOLLM2.name})"


def folder() -> Path | None:
    """The pulled model in the developer's own cache; conftest.py hides it from all other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", os.environ["PACELINE_TEST_CACHE"])
        return pulled(SMOLLM2)


def require() -> str:
    """Its folder; skips the test, with the reason, where it has not been pulled."""
    found = folder()
    if found is None:
        pytest.skip(_MISSING)
    return str(found)


def by_name(patch: pytest.MonkeyPatch) -> str:
    """Its name, with the developer's cache opened for this test; skips as ``require`` does."""
    require()
    patch.setenv("PACELINE_CACHE", os.environ["PACELINE_TEST_CACHE"])
    assert model_folder(SMOLLM2).is_dir()
    return SMOLLM2.full_name
