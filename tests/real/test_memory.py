"""What the doctor says that a process will take at its peak, against what the kernel counted."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

_SCRIPT = """
import re, sys
from pathlib import Path

from paceline import LLM, SamplingParams
from paceline.lab.doctor import examine

model, draft, quantize, cache = sys.argv[1:]
how = {"dtype": "bfloat16", "device": "cpu", "quantize": quantize or None}
how["kv_cache_memory"] = int(cache) << 20
(found,) = (f.text for f in examine(model, draft or None, **how) if "its peak" in f.text)
LLM(model, draft or None, **how).generate("The capital of France is", SamplingParams(max_tokens=8))
status = Path("/proc/self/status").read_text()
print(found)
print(re.search(r"VmHWM:\\s+(\\d+)", status)[1])
"""
_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read from /proc")
@pytest.mark.parametrize(
    ("draft", "quantize", "cache"),
    [
        ("", "", 50),  # where it takes most while it loads
        ("", "int8", 800),
        ("", "int4", 800),
        ("eagle3:paceline/smollm2-eagle3", "", 800),
    ],
)
def test_the_peak_is_as_the_doctor_says(model: str, draft: str, quantize: str, cache: int) -> None:
    command = [sys.executable, "-c", _SCRIPT, model, draft, quantize, str(cache)]
    run = subprocess.run(
        command, capture_output=True, text=True, env=dict(os.environ), timeout=280, check=False
    )
    assert run.returncode == 0, run.stderr
    *_, found, counted = run.stdout.splitlines()
    said = re.search(r"at its peak ([\d.]+) (\w+)", found)
    assert said is not None
    foreseen, shown = float(said[1]) * _UNITS[said[2]], 0.05 * _UNITS[said[2]]  # one decimal
    peak = int(counted) * 1024
    assert abs(foreseen - peak) <= 0.1 * peak + shown
