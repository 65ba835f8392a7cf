"""The recipe as a script: its stages in order, and nothing that goes on once it was stopped.

The commands it calls are stand-ins that say that they were called.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "smollm2.sh"
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")

# The real ones save when they are interrupted. `wait` and not `sleep` alone: that would keep bash
# from its trap.
PACELINE = """#!/usr/bin/env bash
trap 'echo "saved $2 $$" >> "$SAID"; kill $! 2> /dev/null; exit 130' INT
echo "began $2 $$" >> "$SAID"
if [ "$2" = "$LASTING" ]; then sleep 60 & wait $!; fi
echo "ended $2 $$" >> "$SAID"
"""
PYTHON = """#!/usr/bin/env bash
seq 12 > "$3"
"""
STAGES = ["sample"] * 4 + ["eagle3", "medusa", "draft"]


def started(folder: Path, lasting: str = "") -> subprocess.Popen[bytes]:
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for name, text in (("paceline", PACELINE), ("python", PYTHON)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "SAID": str(folder / "said"),
        "LASTING": lasting,
    }
    command = ["bash", str(RECIPE), str(folder), str(folder / "out")]
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)


def said(folder: Path, word: str) -> list[tuple[str, int]]:
    """The stages that reported, and their processes."""
    file = folder / "said"
    lines = file.read_text().splitlines() if file.exists() else []
    found = [line.split() for line in lines]
    return [(stage, int(process)) for what, stage, process in found if what == word]


def test_all_stages_in_order(tmp_path: Path) -> None:
    assert started(tmp_path).wait(60) == 0
    assert [stage for stage, _ in said(tmp_path, "ended")] == STAGES


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("lasting", "count"), [("sample", 2), ("eagle3", 1)])
def test_an_interruption_stops_all_processes(
    lasting: str, count: int, sent: signal.Signals, tmp_path: Path
) -> None:
    """Whoever asked again would otherwise have two processes write one file."""
    script = started(tmp_path, lasting)
    end = time.monotonic() + 60
    while [stage for stage, _ in said(tmp_path, "began")].count(lasting) < count:
        assert time.monotonic() < end
        time.sleep(0.05)
    script.send_signal(sent)
    assert script.wait(60) == 128 + sent
    began = [process for stage, process in said(tmp_path, "began") if stage == lasting]
    assert sorted(process for _, process in said(tmp_path, "saved")) == sorted(began)
    assert said(tmp_path, "ended") == [] or lasting != "sample"
    assert {stage for stage, _ in said(tmp_path, "began")} <= {"sample", lasting}
