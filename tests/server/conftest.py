"""A running server over the embedded pair, for clients that speak HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline import LLM
from support.running_server import Running, serve, service_of


@pytest.fixture(scope="session")
def target() -> LLM:
    """float32: the same seed is then the same text to the last token, whatever the batch."""
    return LLM("paceline/tiny", draft="none", dtype="float32")


@pytest.fixture(scope="session")
def server(target: LLM) -> Iterator[Running]:
    """Two drafters, so that requests can choose; eight sequences at a time."""
    llm = target.with_draft(["paceline/tiny-draft", "ngram"], draft_length=4, max_batch_size=8)
    yield from serve(service_of(llm, max_queue=64))
