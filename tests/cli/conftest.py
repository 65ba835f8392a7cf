"""Commands under test keep their measurements to themselves, and say nothing for 20 seconds."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runs"
    monkeypatch.setattr("paceline.cli.measuring.runs_folder", lambda: folder)
    return folder


@pytest.fixture(autouse=True)
def hushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command says while it loads depends on the machine; errors are looked at alone."""
    monkeypatch.setattr("paceline.cli.progress._SOON", 60.0)
