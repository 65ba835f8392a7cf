"""Texts that trainings share."""

from __future__ import annotations

import pytest

from support.training_runs import write_stories


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_stories(tmp_path_factory.mktemp("corpus") / "toy.jsonl")
