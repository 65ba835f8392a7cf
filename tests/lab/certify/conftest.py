"""A random pair, loaded once; whatever a test plants in its engine is taken out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from paceline.llm import LLM
from support.engine_models import write_pair

TEXTS = ("Once upon a time", "def add(a, b)", "What is 12 + 30?")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_pair(tmp_path_factory.mktemp("certify"), noise=0.08)


@pytest.fixture(scope="session")
def loaded(folders: tuple[str, str]) -> LLM:
    return LLM(folders[0], folders[1], dtype="float32", draft_length=2, max_batch_size=64, seed=1)


@pytest.fixture(scope="session")
def on_reference(folders: tuple[str, str]) -> LLM:
    """The same on torch, whose rows' bits depend on the rows beside them."""
    kind = {"dtype": "float32", "backend": "reference"}
    return LLM(folders[0], folders[1], draft_length=2, max_batch_size=64, seed=1, **kind)


@pytest.fixture
def llm(loaded: LLM) -> Iterator[LLM]:
    engine = loaded.engine
    parts = engine.drafter, engine.verifier, engine.controller
    yield loaded
    engine.drafter, engine.verifier, engine.controller = parts


@pytest.fixture(scope="session")
def prompts(loaded: LLM) -> list[tuple[str, list[int]]]:
    return [(text, loaded.tokenizer(text)["input_ids"]) for text in TEXTS]


@pytest.fixture
def interrupt_at() -> Callable[[int], Callable[[str], None]]:
    """Ctrl-C before the n-th task."""

    def planted(number: int) -> Callable[[str], None]:
        said: list[str] = []

        def advance(what: str) -> None:
            said.append(what)
            if len(said) == number:
                raise KeyboardInterrupt

        return advance

    return planted
