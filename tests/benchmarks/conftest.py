"""The benchmark scripts import one another as siblings, as when they are run as scripts."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))


@pytest.fixture
def start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[Any, str, Any]]:
    """Runs a script: its exit code, its output, and the JSON object of the last line."""

    def started(module: Any, *arguments: str) -> tuple[Any, str, Any]:
        monkeypatch.setattr("sys.argv", [f"{module.__name__}.py", *arguments])
        code: Any = 0
        try:
            module.main()
        except SystemExit as ended:
            code = ended.code
        out = capsys.readouterr().out
        return code, out, json.loads(out.strip().splitlines()[-1])

    return started
