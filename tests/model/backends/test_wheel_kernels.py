"""The kernels of a platform wheel: when they are used; a wheel where there is no compiler."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from paceline import LLM
from paceline.kernels import compile as compiling
from paceline.kernels.compile import (
    NativeUnavailableError,
    build_for_wheel,
    library_file,
    origin,
)

ROOT = Path(__file__).resolve().parents[3]
PROMPT = "Once upon a time"


def compiler(folder: Path, body: str = "") -> str:
    """A program that compiles nothing, but leaves the file that is asked for."""
    file = folder / "compiler"
    leave = 'while [ "$1" != -o ]; do shift; done\n: > "$2"'
    file.write_text(f"#!/bin/sh\n[ $1 = --version ] && exit 0\n{body}\n{leave}\n")
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without kernels and without a compiler."""
    monkeypatch.setenv("PACELINE_NATIVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    return tmp_path


def test_what_the_wheel_brings_comes_first(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "none is not there" in origin()
    monkeypatch.setenv("CXX", compiler(empty))
    assert origin() == "not built yet, the first run does it"
    here = library_file()
    assert origin() == "built here"
    file = build_for_wheel(platform.machine(), compiling.PREBUILT)
    assert library_file() == file != here and origin() == "from the wheel"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(empty))
    assert library_file() == file


def test_one_of_other_sources_is_not_used(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler(empty))
    build_for_wheel(platform.machine(), compiling.PREBUILT)
    shutil.copytree(compiling.SOURCES, empty / "csrc")
    (empty / "csrc" / "vec.h").write_text("// another one")
    monkeypatch.setattr(compiling, "SOURCES", empty / "csrc")
    assert origin() == "not built yet, the first run does it"
    assert compiling.PREBUILT not in library_file().parents


def test_a_wheel_has_every_table(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is built here may lack what the compiler does not know."""
    fails = 'case "$*" in *mamx*) echo "error: no such option" >&2; exit 1;; esac'
    monkeypatch.setenv("CXX", compiler(empty, fails))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert library_file().is_file()
    with pytest.raises(NativeUnavailableError, match="error: no such option"):
        build_for_wheel("x86_64", compiling.PREBUILT)


def test_no_compiler_for_another_machine(empty: Path) -> None:
    with pytest.raises(NativeUnavailableError, match=r"no riscv64-linux-gnu-g\+\+ is there"):
        build_for_wheel("riscv64", empty)


def run(command: list[str], **environment: str) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def runs_on_its_tag(library: Path) -> bool:
    """Whether it asks for no newer C library than a wheel's name says, manylinux_2_28."""
    asked = re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes())
    return max(map(int, asked)) <= 28


ASK = f"""
from pathlib import Path
from paceline import LLM
from paceline.kernels.compile import library_file
llm = LLM("paceline/tiny")
print(library_file())
print(llm.target.backend_reason)
print(list(llm.generate({PROMPT!r})[0].token_ids))
maps = Path("/proc/self/maps").read_text().splitlines()
names = {{Path(line.split(maxsplit=5)[-1]).name for line in maps}}
print(*(name for name in names if name.startswith(("libgomp", "libomp", "libiomp"))))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("PACELINE_NATIVE") == "off", reason="the kernels are off")
@pytest.mark.skipif(sys.platform != "linux", reason="platform wheels are for Linux")
def test_the_wheel_in_an_empty_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed offline, beside torch, where there is no compiler."""
    built = {**os.environ, "PACELINE_WHEEL": platform.machine()}
    try:
        compiling._compiler()
    except NativeUnavailableError as error:
        pytest.skip(str(error))
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], **built)
    (wheel,) = tmp_path.glob(f"*-manylinux_2_28_{platform.machine()}.whl")
    home = tmp_path / "environment"
    run([sys.executable, "-m", "venv", "--without-pip", str(home)], **os.environ)
    python, pip = str(home / "bin" / "python"), [sys.executable, "-m", "pip", "--python"]
    run([*pip, python, "install", "-q", "--no-deps", "--no-index", str(wheel)], **os.environ)
    (packages,) = home.glob("lib/python3*/site-packages")
    (packages / "beside.pth").write_text(sysconfig.get_path("purelib"))
    clean = {
        "PATH": str(home / "bin"),
        "HOME": str(home),
        "PACELINE_CACHE": str(home / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
    }
    if chosen := os.environ.get("PACELINE_NATIVE"):  # texts of instruction sets differ
        clean["PACELINE_NATIVE"] = chosen
    version = run(["paceline", "--version"], **clean)
    assert f"build: wheel py3-none-manylinux_2_28_{platform.machine()}\n" in version
    assert version.endswith("backend on CPUs: native\nnative kernels: from the wheel\n")
    (sbom,) = packages.glob("paceline-*.dist-info/sboms/paceline.cdx.json")
    parts = json.loads(sbom.read_text(encoding="utf-8"))["components"]
    heavy = [*packages.rglob("paceline/**/*.safetensors"), *packages.rglob("paceline/**/*.so")]
    assert {part["description"] for part in parts} == {
        str(file.relative_to(packages)) for file in heavy
    }
    for part in parts:
        digest = hashlib.sha256((packages / part["description"]).read_bytes()).hexdigest()
        assert [digest] == [item["content"] for item in part["hashes"]], part["name"]
    assert {file.name for file in sbom.parents[1].glob("licenses/*")} == {"LICENSE", "NOTICE"}
    library, reason, tokens, openmp = run([python, "-c", ASK], **clean).splitlines()
    assert runs_on_its_tag(Path(library))
    assert Path(library).is_relative_to(packages) and not (home / "cache" / "native").exists()
    assert reason.startswith("native (") and len(openmp.split()) == 1, (reason, openmp)
    here = LLM("paceline/tiny")
    assert tokens == str(list(here.generate(PROMPT)[0].token_ids))


LOADER = """
#include <dlfcn.h>
#include <stdio.h>
int main(int, char** arguments) {
  dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL);
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) return puts(dlerror());
  puts(reinterpret_cast<const char* (*)()>(dlsym(library, "pl_instructions"))());
}
"""


@pytest.mark.slow
def test_the_library_for_aarch64_loads(tmp_path: Path) -> None:
    cross, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if cross is None or emulator is None:
        pytest.skip("Debian's g++-aarch64-linux-gnu and qemu-user are not here")
    (tmp_path / "loader.cpp").write_text(LOADER)
    loader = str(tmp_path / "loader")
    run([cross, f"{loader}.cpp", "-o", loader, "-ldl"], **os.environ)
    library = build_for_wheel("aarch64", tmp_path)
    assert runs_on_its_tag(library)
    said = run([emulator, "-L", "/usr/aarch64-linux-gnu", loader, str(library)], **os.environ)
    assert said.strip() in ("i8mm", "neon", "portable"), said
