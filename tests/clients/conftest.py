"""`paceline serve`, as users start it, for the clients they use; run by `make test-clients`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from support import real_model
from support.served_process import Served, ServedProcess

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the other environment none of the servers is started, for one client that is there too."""
    if find_spec("anthropic") is None:
        reason = pytest.mark.skip(reason="the clients are not installed; run make test-clients")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(reason)


def _serve(model: str, *arguments: str) -> Iterator[Served]:
    env = {"PACELINE_CACHE": os.environ["PACELINE_TEST_CACHE"]}
    with ServedProcess([model, *arguments], env=env) as process:
        yield Served(f"http://127.0.0.1:{process.port}", model)


@pytest.fixture(scope="session")
def tiny() -> Iterator[Served]:
    """float32, so that its likelihoods are those that transformers finds."""
    yield from _serve("paceline/tiny", "--dtype", "float32")


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Served]:
    real_model.require()
    yield from _serve("paceline/smollm2")


@pytest.fixture(params=["tiny", "smollm2"])
def served(request: pytest.FixtureRequest) -> Served:
    """One after the other; the real one only where it has been pulled."""
    found: Served = request.getfixturevalue(request.param)
    return found
