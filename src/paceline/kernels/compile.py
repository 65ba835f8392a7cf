"""Building the kernels, on first use, with whatever C++ compiler the machine has.

The library lies under a hash of the sources and the options, so that one of other sources is never
used: in the package where a platform wheel brought it, else in the user's cache folder. There it is
built once, and found where there is no compiler, as in an image built with one.

    python -m paceline.kernels.compile    # builds it now, and prints where it is
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from filelock import FileLock

from paceline.core.stages import info, stage
from paceline.errors import PacelineError
from paceline.files import atomic_folder, cache_folder

SOURCES = Path(__file__).resolve().parent / "csrc"
PREBUILT = SOURCES.with_name("prebuilt")  # in a platform wheel, by the hash of the sources
OFF = "off"  # of PACELINE_NATIVE: no kernels
_COMPILERS = ("g++", "c++")
_OPTIONS = (
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden"),
    # Sums are as they are written: no product is joined with a sum unless the source says so.
    *("-ffp-contract=off", "-fno-math-errno"),
    # The second throws a kind of the first, and libstdc++ has it from GCC 11 on only.
    "-D__throw_bad_array_new_length=__throw_bad_alloc",
)
# On Linux OpenMP's functions are those of the library that torch has loaded (library.py).
_LINKED = ("-shared",) if sys.platform == "linux" else ("-shared", "-fopenmp")
_LIBRARY = "paceline_native.so"
_LIMIT = 300  # seconds for one compilation
_ROOM = 8 << 20  # bytes for the library, which has less than 2 MB

# What is compiled: object, source, options. Every source without options ...
_COMMON = tuple((file.stem, file.name, ()) for file in sorted(SOURCES.glob("*.cpp")))
# ... and the kernels for each set of instructions.
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-DPACELINE_AVX512")
_AVX2 = ("-mavx2", "-mfma", "-DPACELINE_AVX2")
_VNNI = (*_AVX512, "-mavx512vnni", "-mf16c")
# Not every compiler knows these.
_AMX = ("-mamx-tile", "-mamx-bf16", "-mamx-int8", "-mavx512bf16", "-DPACELINE_AMX")
_X86 = (
    ("avx512", "kernels.cpp", _AVX512),
    ("amx", "kernels.cpp", (*_AVX512, *_AMX)),
    ("dpbf16", "kernels.cpp", (*_AVX512, "-mavx512bf16", "-DPACELINE_DPBF16")),
    ("avx2", "kernels.cpp", _AVX2),
    ("quantised_amx", "quantised.cpp", (*_VNNI, *_AMX)),
    ("quantised_vnni", "quantised.cpp", _VNNI),
    ("quantised_avx2", "quantised.cpp", (*_AVX2, "-mf16c")),
)
# Scheduled before registers are given out, sums of a register tile leave them.
_NEON = ("-DPACELINE_NEON", "-fno-schedule-insns")
_I8MM = (*_NEON, "-DPACELINE_I8MM", "-march=armv8.2-a+i8mm+bf16")
_ARM = (
    ("neon", "kernels.cpp", _NEON),
    ("i8mm", "kernels.cpp", _I8MM),
    ("quantised_neon", "quantised.cpp", _NEON),
    ("quantised_dotprod", "quantised.cpp", (*_NEON, "-march=armv8.2-a+dotprod")),
    ("quantised_i8mm", "quantised.cpp", _I8MM),
)
_TABLES = {"x86_64": _X86, "AMD64": _X86, "aarch64": _ARM, "arm64": _ARM}
_OPTIONAL = {"amx", "quantised_amx", "dpbf16", "i8mm", "quantised_i8mm", "quantised_dotprod"}


class NativeUnavailableError(PacelineError):
    """The kernels cannot be built or loaded here; the message says why in a few words."""


def library_file() -> Path:
    """The compiled kernels, built now if this machine has not built them yet.

    Raises NativeUnavailableError."""
    file = _kept_file()
    if file.is_file():
        return file
    if why := _failure(_compiler(), file.parent):
        raise NativeUnavailableError(why)
    return file


@lru_cache
def _failure(compiler: str, folder: Path) -> str:
    """Build the library, once in a process: it fails after minutes. Returns why, or nothing."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder.parent).free < _ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder.parent))
        with FileLock(folder.with_suffix(".lock")):
            if not (folder / _LIBRARY).is_file():  # else another process has built it meanwhile
                _build(compiler, folder, platform.machine(), _OPTIONAL)
    except NativeUnavailableError as error:
        return str(error)
    except (OSError, PacelineError) as error:
        return f"the kernels cannot be built ({error}; PACELINE_CACHE=FOLDER names another folder)"
    return ""


def is_off() -> bool:
    """Whether the user wants no kernels: ``PACELINE_NATIVE=off``."""
    return os.environ.get("PACELINE_NATIVE") == OFF


def is_built() -> bool:
    """Whether the kernels are there already. Raises NativeUnavailableError where they cannot be."""
    return _kept_file().is_file() or not _compiler()


def are_kernels_here() -> bool:
    """Whether there are kernels on this machine, or a compiler to build them."""
    try:
        is_built()
    except NativeUnavailableError:
        return False
    return True


def origin() -> str:
    """Where the kernels of this machine come from, in a few words for people."""
    try:
        if not is_built():
            return "not built yet, the first run does it"
        return "from the wheel" if PREBUILT in _kept_file().parents else "built here"
    except NativeUnavailableError as error:
        return f"none ({error})"


def build_for_wheel(machine: str, folder: Path) -> Path:
    """The library that a wheel for Linux on ``machine`` (x86_64, aarch64) has under PREBUILT.

    It lies in ``folder`` under its hash. Raises NativeUnavailableError and WriteError."""
    cross = f"{machine}-linux-gnu-g++"
    compiler = _compiler() if machine == platform.machine() else shutil.which(cross)
    if compiler is None:
        raise NativeUnavailableError(f"no {cross} is there")
    _build(compiler, folder / _digest(machine), machine)
    return folder / _digest(machine) / _LIBRARY


def _digest(machine: str) -> str:
    """Of everything that a library is made of, but the compiler."""
    digest = hashlib.sha256()
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    digest.update(repr((machine, _OPTIONS, _TABLES, _LINKED)).encode())
    return digest.hexdigest()[:20]


def _kept_file() -> Path:
    """Where the library of these sources lies, or will once it is built.

    Raises NativeUnavailableError."""
    if is_off():
        raise NativeUnavailableError(f"PACELINE_NATIVE={OFF} asks for no kernels")
    if os.name != "posix":
        raise NativeUnavailableError("only Linux and macOS are supported")
    name = Path(_digest(platform.machine()), _LIBRARY)
    if (PREBUILT / name).is_file():
        return PREBUILT / name
    folder = os.environ.get("PACELINE_NATIVE_CACHE")
    return (Path(folder) if folder else cache_folder() / "native") / name


def _build(compiler: str, folder: Path, machine: str, optional: Set[str] = frozenset()) -> None:
    """Compile all kernels for a machine; a compiler need not know those of ``optional``."""
    began = time.perf_counter()
    parts = [*_COMMON, *_TABLES.get(machine, ())]
    with (
        stage("building the native kernels, once (a minute or two)"),
        tempfile.TemporaryDirectory() as scratch,
    ):

        def build(part: tuple[str, str, tuple[str, ...]]) -> list[str]:
            name, source, options = part
            into = str(Path(scratch) / f"{name}.o")
            try:
                _run([compiler, *_OPTIONS, *options, "-c", str(SOURCES / source), "-o", into])
            except NativeUnavailableError:
                if name not in optional:
                    raise
                return []
            return [into]

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [into for made in pool.map(build, parts) for into in made]
        with atomic_folder(folder, "the native kernels", damaged=True) as partial:
            _run([compiler, *_LINKED, *objects, "-o", str(partial / _LIBRARY)])
    seconds = time.perf_counter() - began
    info(f"built the native kernels with {compiler} in {seconds:.0f} s; kept in {folder}")


def _run(command: list[str]) -> str:
    """What the command writes. Raises NativeUnavailableError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"{command[0]} does not run ({error})") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise NativeUnavailableError(f"{command[0]} fails: {lines[0].strip()[:200]}")
    return done.stdout


def _compiler() -> str:
    """The path of ``$CXX`` or g++. Raises NativeUnavailableError if neither serves.

    clang's objects need an OpenMP library of its own beside the one that torch has loaded: two
    pools of threads, each of which waits for the other's processors."""
    wanted = os.environ.get("CXX")
    missing = "no g++ is there" if wanted is None else f"CXX={wanted} is not there"
    for name in (wanted,) if wanted else _COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        if "clang" not in _run([path, "--version"]):
            return path
        missing = f"{name} is clang, and the kernels need g++"
    raise NativeUnavailableError(missing)


if __name__ == "__main__":
    try:
        print(library_file())
    except NativeUnavailableError as error:
        sys.exit(f"the native kernels: {error}")
