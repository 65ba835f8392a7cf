"""The kernels for AMX, whose tile instructions are emulated: the bits of those without tiles."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.kernels.compile import _AMX, _AVX512, _OPTIONS, _VNNI, SOURCES

HERE = Path(__file__).parent
CPUINFO = Path("/proc/cpuinfo")
FEATURES = set(CPUINFO.read_text().split() if CPUINFO.exists() else ())  # none is known elsewhere
EMULATED = ("-include", str(HERE / "emulated_tiles.h"))


@pytest.mark.slow  # the kernels are built anew
@pytest.mark.skipif(
    not {"avx512_vnni", "avx512f"} <= FEATURES,
    reason="the instructions beside the tiles are AVX512's, which this processor has not",
)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ is there")
def test_products_by_tiles_have_the_bits_of_products_without(tmp_path: Path) -> None:
    parts = (
        (SOURCES / "kernels.cpp", _AVX512),
        (SOURCES / "quantised.cpp", _VNNI),
        (SOURCES / "kernels.cpp", (*_AVX512, *_AMX, *EMULATED)),
        (SOURCES / "quantised.cpp", (*_VNNI, *_AMX, *EMULATED)),
        (SOURCES / "amx_trial.cpp", ()),
        (SOURCES / "forward.cpp", ()),
        (SOURCES / "attention_plan.cpp", ()),
        (SOURCES / "experts.cpp", ()),
        (HERE / "tables_check.cpp", ()),
    )
    objects = []
    for number, (source, options) in enumerate(parts):
        objects.append(str(tmp_path / f"{number}.o"))
        compile_ = ("g++", *_OPTIONS, "-O1", f"-I{SOURCES}", *options)
        subprocess.run([*compile_, "-c", str(source), "-o", objects[-1]], check=True)
    program = str(tmp_path / "check")
    subprocess.run(["g++", "-fopenmp", *objects, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "avx512 amx give the same bits\n")
