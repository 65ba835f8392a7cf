"""Vercel's ``ai`` with ``@ai-sdk/openai``, whose default is ``/v1/responses``; needs node."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.served_process import Served

SCRIPT = Path(__file__).with_name("ai_sdk.mjs")
# Where `make test-clients` has had npm install them.
NODE = Path(os.environ.get("PACELINE_TEST_NODE", SCRIPT.parents[2] / ".venv-clients" / "node"))


def test_text_streams_tools_and_objects(served: Served) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    if not (NODE / "node_modules" / "@ai-sdk" / "openai").is_dir():
        pytest.skip(f"@ai-sdk/openai is not installed in {NODE.name}; run make test-clients")
    copy = NODE / SCRIPT.name  # modules are looked for beside the script
    shutil.copy(SCRIPT, copy)
    command = [node, str(copy), served.url, served.model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in ("responses", "chat"):
        told = json.loads(next(x for x in done.stdout.splitlines() if x.startswith(f'{{"{kind}"')))
        found = told[kind]
        assert found["text"] == found["streamed"] and found["pieces"] > 1
        assert set(found["object"]) == {"city"} and found["called"] == "weather"
        assert found["steps"] == 2 and found["usage"] > 0
