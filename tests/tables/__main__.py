"""``make test-tables``: the tests that depend on a model's numbers, on every table of kernels.

A test that holds by the roundings of one processor fails on another's. So these tests run once
for each instruction set that this processor has, with torch held to the same one, and once on the
torch backend.

    PYTHONPATH=tests python -m tables --only avx2 portable -- -k bench
    PYTHONPATH=tests python -m tables --whole --threads 2 --load 2

Exit code 1 if a test failed on any of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from paceline.kernels.library import INSTRUCTIONS, choose

TORCH = "torch"
TESTS = Path(__file__).resolve().parents[1]
# Whose outcome depends on texts, prices or bits: those that decode, train or measure a model.
DEPENDENT = (
    *("parity", "train", "engine", "control", "draft/heads", "lab/bench", "lab/certify"),
    *("model/backends", "model/test_rows.py", "test_embedded_pair.py", "test_llm.py"),
)
# These bring kernels of their own, the same under each table.
ALIKE = ("model/backends/test_arm.py", "model/backends/test_wheel_kernels.py")
# What holds torch's own libraries to no more than a table's instructions.
_LIMITS = {
    "dpbf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "portable": {
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
}


def tables() -> list[str]:
    """What this processor runs, and the torch backend."""
    return [*(name for name in INSTRUCTIONS if choose(name)), TORCH]


def environment(table: str, threads: int) -> dict[str, str]:
    chosen = {"PACELINE_NATIVE": "off" if table == TORCH else table, **_LIMITS.get(table, {})}
    return {**os.environ, **chosen, "OMP_NUM_THREADS": str(threads)}


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Other programs that take what they get of the processors."""
    loop = "while True: pass"
    others = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*INSTRUCTIONS, TORCH], help="these tables")
    parser.add_argument("--threads", type=int, default=1, help="of each test process")
    parser.add_argument("--load", type=int, default=0, help="busy processes beside the tests")
    parser.add_argument("--workers", default="2", help="test processes")
    parser.add_argument("--whole", action="store_true", help="the whole suite")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest, behind --")
    given = parser.parse_args(arguments)
    chosen = [str(TESTS / name) for name in DEPENDENT]
    command = [sys.executable, "-m", "pytest", "-q", "-n", given.workers, "--dist", "worksteal"]
    command += [f"--ignore={TESTS / name}" for name in ALIKE]
    command += [*([] if given.whole else chosen), *given.pytest]
    failed = []
    for table in given.only or tables():
        own = ["-k", "not native"] if table == TORCH else []
        print(f"\n-- {table}, {given.threads} thread(s), {given.load} busy processes", flush=True)
        began = time.perf_counter()
        with busy(given.load):
            code = subprocess.run(
                [*command, *own], env=environment(table, given.threads)
            ).returncode
        print(f"-- {table}: exit {code} after {time.perf_counter() - began:.0f} s", flush=True)
        failed += [table] if code else []
    print(f"failed on: {', '.join(failed)}" if failed else "the same on every table")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
