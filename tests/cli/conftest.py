"""Commands under test show no stages."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def hushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command says while it loads depends on the machine; errors are looked at alone."""
    monkeypatch.setattr("paceline.request.progress._Lines._show", lambda *arguments: None)
