"""The kernels for ARM, cross-compiled and run by qemu: the portable table's bits in every table."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.kernels.compile import _ARM, _COMMON, _OPTIONS, SOURCES

HERE = Path(__file__).parent
COMPILER, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
LIBRARIES = "/usr/aarch64-linux-gnu"  # of Debian's cross compiler
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# What runs on each: Cortex-A72 has no dot products, only later cores have i8mm and bf16.
PROCESSORS = {
    "cortex-a72": "portable neon",
    "neoverse-n1": "portable neon dotprod",
    "neoverse-v1": "portable neon dotprod i8mm",
    "max": "portable neon dotprod i8mm",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and shutil.which(QEMU)),
        reason=f"no {COMPILER} or no {QEMU} (Debian: g++-aarch64-linux-gnu, qemu-user)",
    ),
]


def built(folder: Path, options: Sequence[str]) -> Path:
    """The programs `tables` and `forwards` in the folder."""

    def compiled(part: tuple[str, Path, tuple[str, ...]]) -> str:
        name, source, own = part
        into = str(folder / f"{name}.o")
        command = [COMPILER, *_OPTIONS, "-O2", "-DPACELINE_PARTIAL=4096", *own, *options]
        subprocess.run([*command, f"-I{SOURCES}", "-c", str(source), "-o", into], check=True)
        return into

    library = [(name, SOURCES / source, own) for name, source, own in (*_COMMON, *_ARM)]
    checks = [(name, HERE / f"{name}.cpp", ("-O1",)) for name in ("tables_check", "native_check")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        *objects, tables, forwards = pool.map(compiled, [*library, *checks])
    for program, check in (("tables", tables), ("forwards", forwards)):
        command = [COMPILER, "-fopenmp", *options, check, *objects, "-o", str(folder / program)]
        subprocess.run(command, check=True)
    return folder


def run(program: Path, processor: str) -> tuple[int, str]:
    known = subprocess.run([QEMU, "-cpu", "help"], capture_output=True, text=True).stdout
    if processor not in known.split():
        pytest.skip(f"this version of {QEMU} has no {processor}")
    environment = {**os.environ, "OMP_NUM_THREADS": "3", "ASAN_OPTIONS": "detect_leaks=0"}
    environment.pop("PACELINE_NATIVE", None)  # of this machine's kernels
    command = [QEMU, "-cpu", processor, "-L", LIBRARIES, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("arm"), ())


@pytest.mark.parametrize(("processor", "tables"), PROCESSORS.items())
def test_products_rows_and_rounding_have_the_portable_bits(
    programs: Path, processor: str, tables: str
) -> None:
    assert run(programs / "tables", processor) == (0, f"{tables} give the same bits\n")


def ran(processor: str) -> str:
    """Of whole forwards; the sums of whole numbers are no table of kernels."""
    return "the kernels " + PROCESSORS[processor].replace(" dotprod", "")


@pytest.mark.parametrize("processor", PROCESSORS)
def test_forwards_have_the_portable_bits(programs: Path, processor: str) -> None:
    code, said = run(programs / "forwards", processor)
    assert (code, said.partition(":")[0]) == (0, ran(processor))


def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    folder = built(tmp_path, ("-O1", *SANITIZERS))
    assert run(folder / "tables", "max") == (0, f"{PROCESSORS['max']} give the same bits\n")
    code, said = run(folder / "forwards", "max")
    assert (code, said.partition(":")[0]) == (0, ran("max")), said
