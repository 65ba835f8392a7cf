"""Commands under test keep their measurements away from the user's."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runs"
    monkeypatch.setattr("paceline.cli.continuing.runs_folder", lambda: folder)
    return folder
