"""Texts and runs that the tests of trainings share."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from support import training_runs


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return training_runs.write_stories(tmp_path_factory.mktemp("corpus") / "toy.jsonl")


@pytest.fixture(scope="session")
def talking(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a target of three layers that has learnt the corpus."""
    return training_runs.talking_target(corpus, tmp_path_factory.mktemp("target"), layers=3)


@pytest.fixture(scope="module")
def learnt(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> training_runs.Learnt:
    """What a module's ``train`` makes of its ``config``, watched."""
    train: partial[Any] = request.module.train
    config, out = request.getfixturevalue("config"), tmp_path_factory.mktemp("run")
    return training_runs.learnt(*train.args, config, out, **train.keywords)


@pytest.fixture(scope="module")
def finished(learnt: training_runs.Learnt) -> Any:
    """The trainer of this configuration."""
    return learnt.trainer
