"""Programs that check or run a deployment, where they are: on the PATH, or in .venv-deploy."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

BIN = Path(__file__).resolve().parents[2] / ".venv-deploy" / "bin"


def needed(name: str) -> str:
    """Its path; the test is skipped where there is none."""
    folders = [os.environ.get("PACELINE_DEPLOY_BIN", str(BIN)), os.environ.get("PATH", "")]
    program = shutil.which(name, path=os.pathsep.join(folders))
    if program is None:
        pytest.skip(f"{name} is not installed; make test-routers installs it into .venv-deploy")
    return program
