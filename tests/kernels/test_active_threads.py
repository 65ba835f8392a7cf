"""How many threads take part in forwards (csrc/threads.h), on a simulated clock."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.kernels.compile import _OPTIONS, SOURCES


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ is there")
def test_threads_leave_and_return(tmp_path: Path) -> None:
    """A thread leaves after two windows without its processor. It is tried again after 0.1 s, after
    twice as long whenever that fails, up to 3.2 s, and stays once its processor is free."""
    source = Path(__file__).with_name("active_threads_check.cpp")
    program = tmp_path / "check"
    command = ["g++", *_OPTIONS, "-O1", f"-I{SOURCES}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "threads leave and return\n")
