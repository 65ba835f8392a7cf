"""Time is simulated here: what a hybrid takes to look up must not be this machine's seconds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.pace import hybrid
from simulated_clock import Clock


@pytest.fixture(autouse=True)
def _standing_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid, "time", SimpleNamespace(perf_counter=Clock()))
