"""Builds the native kernels on first use, with the g++ of this machine.

The library's folder is named by a hash of the sources and options, so that a library of other
sources is never used. It lies in the package if a platform wheel brought it, otherwise in the
user's cache folder. There it is built once, and a machine without a compiler can use it, such as a
container image that was built with one.

    python -m paceline.kernels.compile    # builds it now, and prints where it is
"""

from __future__ import annotations

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
PREBUILT = SOURCES.with_name("prebuilt")  # the libraries that a platform wheel brings
OFF = "off"  # value of PACELINE_NATIVE that disables the kernels
_COMPILERS = ("g++", "c++")
_OPTIONS = (
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden"),
    # Rounding as written: the compiler fuses no multiplication with an addition by itself.
    *("-ffp-contract=off", "-fno-math-errno"),
    # __throw_bad_array_new_length exists in libstdc++ from GCC 11 on only. It throws a subclass of
    # what __throw_bad_alloc throws.
    "-D__throw_bad_array_new_length=__throw_bad_alloc",
)
# On Linux the OpenMP library is not linked: library.py loads the one that torch uses.
_LINKED = ("-shared",) if sys.platform == "linux" else ("-shared", "-fopenmp")
_LIBRARY = "paceline_native.so"
_LIMIT = 300  # seconds for one compilation

# Compilation units: (object, source, options). Every source is compiled for the baseline
# instruction set of the machine ...
_COMMON = tuple((file.stem, file.name, ()) for file in sorted(SOURCES.glob("*.cpp")))


# ... and the kernels also for each further instruction set, whose table they are.
def _table(source: str, name: str, *options: str) -> tuple[str, str, tuple[str, ...]]:
    return f"{source}_{name}", f"{source}.cpp", (*options, f"-DPACELINE_TABLE={name}")


_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-DPACELINE_AVX512")
_AVX2 = ("-mavx2", "-mfma", "-DPACELINE_AVX2")
_VNNI = (*_AVX512, "-mavx512vnni", "-mf16c")
# Some compilers do not know these (_OPTIONAL).
_AMX = ("-mamx-tile", "-mamx-bf16", "-mamx-int8", "-mavx512bf16", "-DPACELINE_AMX")
_X86 = (
    _table("kernels", "avx512", *_AVX512),
    _table("kernels", "amx", *_AVX512, *_AMX),
    _table("kernels", "dpbf16", *_AVX512, "-mavx512bf16", "-DPACELINE_DPBF16"),
    _table("kernels", "avx2", *_AVX2),
    _table("quantised", "amx", *_VNNI, *_AMX),
    _table("quantised", "vnni", *_VNNI),
    _table("quantised", "avx2", *_AVX2, "-mf16c"),
)
# If GCC schedules before it allocates registers, it spills the sums of a register tile.
_NEON = ("-DPACELINE_NEON", "-fno-schedule-insns")
_I8MM = (*_NEON, "-DPACELINE_I8MM", "-march=armv8.2-a+i8mm+bf16")
_ARM = (
    _table("kernels", "neon", *_NEON),
    _table("kernels", "i8mm", *_I8MM),
    _table("quantised", "neon", *_NEON),
    _table("quantised", "dotprod", *_NEON, "-march=armv8.2-a+dotprod"),
    _table("quantised", "i8mm", *_I8MM),
)
_UNITS = {"x86_64": _X86, "AMD64": _X86, "aarch64": _ARM, "arm64": _ARM}
_OPTIONAL = {"kernels_amx", "quantised_amx", "kernels_dpbf16"}
_OPTIONAL |= {"kernels_i8mm", "quantised_i8mm", "quantised_dotprod"}


class NativeUnavailableError(PacelineError):
    """The kernels cannot be built or loaded here. The message says why in a few words."""


def library_file() -> Path:
    """The path of the compiled kernels, which are built now if they are not there yet.

    Raises NativeUnavailableError."""
    file = _kept_file()
    if file.is_file():
        return file
    if why := _failure(_compiler(), file.parent):
        raise NativeUnavailableError(why)
    return file


@lru_cache
def _failure(compiler: str, folder: Path) -> str:
    """Build the library and return why that failed, or nothing. A process tries only once, since a
    failure may take minutes."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not (folder / _LIBRARY).is_file():  # another process may have built it meanwhile
                _build(compiler, folder, platform.machine(), _OPTIONAL)
    except NativeUnavailableError as error:
        return str(error)
    except (OSError, PacelineError) as error:
        return f"the kernels cannot be built ({error}; PACELINE_CACHE=FOLDER names another folder)"
    return ""


def is_off() -> bool:
    """Whether ``PACELINE_NATIVE=off`` disables the kernels."""
    return os.environ.get("PACELINE_NATIVE") == OFF


def is_built() -> bool:
    """Whether the library exists already. Raises NativeUnavailableError if it cannot be built."""
    return _kept_file().is_file() or not _compiler()


def are_kernels_here() -> bool:
    """Whether the library exists on this machine, or there is a compiler to build it."""
    try:
        is_built()
    except NativeUnavailableError:
        return False
    return True


def origin() -> str:
    """Where the kernels of this machine come from, in a few words for users."""
    try:
        if not is_built():
            return "not built yet, the first run does it"
        return "from the wheel" if PREBUILT in _kept_file().parents else "built here"
    except NativeUnavailableError as error:
        return f"none ({error})"


def build_for_wheel(machine: str, folder: Path) -> Path:
    """Build the library of a wheel for Linux on ``machine`` (x86_64, aarch64), and return its path
    below ``folder``, which is that below PREBUILT. Raises NativeUnavailableError and WriteError."""
    cross = f"{machine}-linux-gnu-g++"
    compiler = _compiler() if machine == platform.machine() else shutil.which(cross)
    if compiler is None:
        raise NativeUnavailableError(f"no {cross} is there")
    _build(compiler, folder / _digest(machine), machine)
    return folder / _digest(machine) / _LIBRARY


def _digest(machine: str) -> str:
    """A hash of everything that determines a library, except the compiler."""
    digest = hashlib.sha256()
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    digest.update(repr((machine, _OPTIONS, _UNITS, _LINKED)).encode())
    return digest.hexdigest()[:20]


def _kept_file() -> Path:
    """The path of the library of these sources, whether it is built yet or not.

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
    """Compile the library for a machine. Units of ``optional`` are left out if the compiler does
    not know their instructions."""
    began = time.perf_counter()
    units = [*_COMMON, *_UNITS.get(machine, ())]
    with (
        stage("building the native kernels, once (a minute or two)"),
        tempfile.TemporaryDirectory() as scratch,
    ):

        def build(unit: tuple[str, str, tuple[str, ...]]) -> list[str]:
            name, source, options = unit
            file = str(Path(scratch) / f"{name}.o")
            try:
                _run([compiler, *_OPTIONS, *options, "-c", str(SOURCES / source), "-o", file])
            except NativeUnavailableError:
                if name not in optional:
                    raise
                return []
            return [file]

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [file for built in pool.map(build, units) for file in built]
        with atomic_folder(folder, "the native kernels") as partial:
            _run([compiler, *_LINKED, *objects, "-o", str(partial / _LIBRARY)])
    seconds = time.perf_counter() - began
    info(f"built the native kernels with {compiler} in {seconds:.0f} s; kept in {folder}")


def _run(command: list[str]) -> str:
    """Run a command and return its output. Raises NativeUnavailableError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"{command[0]} does not run ({error})") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise NativeUnavailableError(f"{command[0]} fails: {lines[0].strip()[:200]}")
    return done.stdout


def _compiler() -> str:
    """The path of ``$CXX``, or of g++. Raises NativeUnavailableError if there is none.

    clang is refused: its objects need an OpenMP library of their own beside the one that torch has
    loaded, and two thread pools in one process wait for each other's processors."""
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
