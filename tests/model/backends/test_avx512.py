"""The kernels for AVX512 and AMX: the bits of the portable ones. AMX's tile instructions are
emulated, and where the processor has no AVX512, Bochs emulates one that has it."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.kernels.compile import _COMMON, _OPTIONS, _X86, SOURCES
from support import emulated_xeon

HERE = Path(__file__).parent
CPUINFO = Path("/proc/cpuinfo")
FEATURES = set(CPUINFO.read_text().split() if CPUINFO.exists() else ())  # none is known elsewhere
RUNS_HERE = {"avx512_vnni", "avx512f"} <= FEATURES
EMULATED = ("-include", str(HERE / "emulated_tiles.h"))

pytestmark = [
    pytest.mark.slow,  # the kernels are built anew
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ is there"),
    pytest.mark.skipif(
        not (RUNS_HERE or emulated_xeon.AVAILABLE),
        reason="this processor has no AVX512, and no Bochs is there (support/emulated_xeon.py)",
    ),
]


def test_every_instruction_set_gives_the_same_bits(tmp_path: Path) -> None:
    programs = ("tables_check", "native_check")
    checks = [(name, HERE / f"{name}.cpp", ()) for name in programs]
    kernels = [
        (name, SOURCES / source, (*options, *EMULATED) if "amx" in name else options)
        for name, source, options in (*_COMMON, *_X86)
    ]

    def compiled(part: tuple[str, Path, tuple[str, ...]]) -> str:
        name, source, options = part
        into = str(tmp_path / f"{name}.o")
        # With FMA instructions: portable kernels call a function for each otherwise.
        command = ["g++", *_OPTIONS, "-O2", "-mfma", "-DPACELINE_PARTIAL=4096", f"-I{SOURCES}"]
        subprocess.run([*command, *options, "-c", str(source), "-o", into], check=True)
        return into

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tables, forwards, *objects = pool.map(compiled, [*checks, *kernels])
    built = []
    for name, check in zip(programs, (tables, forwards), strict=True):
        built.append(tmp_path / name)
        subprocess.run(["g++", "-fopenmp", check, *objects, "-o", str(built[-1])], check=True)
    if RUNS_HERE:
        runs = [subprocess.run([program], capture_output=True, text=True) for program in built]
        tables, forwards = [(run.returncode, run.stdout) for run in runs]
    else:
        tables, forwards = emulated_xeon.run(built, tmp_path / "machine")
    assert tables == (0, "portable avx2 avx512 amx give the same bits\n")
    assert forwards[0] == 0, forwards[1]
    has_bf16 = not RUNS_HERE or "avx512_bf16" in FEATURES  # which the kernels for AMX need
    wanted = "the kernels portable avx2 avx512" + " amx" * has_bf16
    assert forwards[1].startswith(wanted), forwards[1]
