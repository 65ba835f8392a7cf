"""guidellm: a small benchmark, whose numbers are those of the server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.model.names import resolve
from support.served_process import Served

pytest.importorskip("guidellm")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_benchmark(tiny: Served, path: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [
        *(sys.executable, "-m", "guidellm", "run"),
        *("--backend", f"kind=openai_http,target={tiny.root},request_format={path}"),
        *("--profile", "kind=synchronous"),
        *("--constraint", "kind=max_requests,count=4"),
        *("--tokenizer", f"kind=huggingface_auto,model={resolve(tiny.model)}"),
        *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"),
        *("--output", f"kind=json,path={report}"),
        "--disable-console",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (4, 0)
