"""Loads the compiled kernels with ctypes. Structures and functions are read from
csrc/paceline_native.h, so that they cannot differ from it."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Iterator
from ctypes import POINTER, Structure, c_char_p, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from paceline.core.memory import processors
from paceline.kernels.compile import SOURCES, NativeUnavailableError, library_file

FLOAT32, BFLOAT16 = 0, 1
SCALE_FLOAT, SCALE_BFLOAT16, SCALE_HALF = 0, 1, 2
OFFSETS_NONE, OFFSETS_SIGNED, OFFSETS_UNSIGNED = 0, 1, 2
PLAIN, GATE, UP = 0, 1, 2  # parts of a packed matrix
DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
SILU, GELU_TANH, CLAMPED_SILU = 0, 1, 2
_ARM = platform.machine() in ("aarch64", "arm64")
INSTRUCTIONS = (*(("i8mm", "neon") if _ARM else ("amx", "dpbf16", "avx512", "avx2")), "portable")
SAME_BITS = tuple(name for name in INSTRUCTIONS if name != "dpbf16")


# -- csrc/paceline_native.h in ctypes --------------------------------------------------------------

_HEADER = re.sub(r"//.*|\bconst\b", "", (SOURCES / "paceline_native.h").read_text("utf-8"))
_TYPES: dict[str, Any] = {"void": None}


def _declared(text: str) -> Iterator[tuple[str, Any]]:
    """Names and ctypes of a declaration such as ``float *a, *b``. A pointer to a structure of the
    header is a ``POINTER`` to it, any other pointer an address."""
    (_, kind), *names = re.findall(r"([\s*]*)(\w+)", text)
    if kind not in _TYPES:
        _TYPES[kind] = getattr(ctypes, f"c_{kind.removesuffix('_t')}")
    for stars, name in names:
        pointers = stars.count("*")
        if pointers == 1 and kind.startswith("pl_"):
            yield name, POINTER(_TYPES[kind])
        elif pointers:
            yield name, c_char_p if kind == "char" else c_void_p
        else:
            yield name, _TYPES[kind]


def _structure(body: str, name: str) -> Any:
    fields = [field for line in body.split(";") if line.strip() for field in _declared(line)]
    # Without slots a misspelt field would be stored beside the structure.
    _TYPES[name] = type(name, (Structure,), {"_fields_": fields, "__slots__": ()})
    return _TYPES[name]


_STRUCTURES: list[Any] = [
    _structure(*definition)
    for definition in re.findall(r"typedef struct {([^}]*)} (\w+);", _HEADER)
]
CWeight, CNorm, CLayer, CModel, CMedusa, CSpan = _STRUCTURES[:6]
CLora, CAdapterRows, CBatch, CTree, CGrowth, CRecurrence, CVerification, CLookup = _STRUCTURES[6:]


def declare(loaded: Any) -> None:
    """Set the argument and result types of the library's functions."""
    for result, arguments in re.findall(r"^ *(\w[\w *]*pl_\w+)\(([^)]*)\);", _HEADER, re.MULTILINE):
        ((name, kind),) = _declared(result)
        function = getattr(loaded, name)
        function.restype = kind
        function.argtypes = [kind for part in arguments.split(",") for _, kind in _declared(part)]


def _load_openmp() -> None:
    """Load the OpenMP library for the kernels: the one that torch uses, since two thread pools in
    one process would wait for each other's processors. Raises OSError."""
    if sys.platform != "linux":
        return  # there the kernels are linked to it
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        maps = ""
    files = {Path(line.split(maxsplit=5)[-1]) for line in maps.splitlines()}
    loaded = sorted(str(f) for f in files if f.name.startswith("libgomp") and f.is_file())
    ctypes.CDLL((loaded or ["libgomp.so.1"])[0], ctypes.RTLD_GLOBAL)


@lru_cache(maxsize=1)
def library() -> Any:
    """The loaded library, built first if needed. Raises NativeUnavailableError.

    ``PACELINE_NATIVE`` names the instruction set to use, one of INSTRUCTIONS, instead of the best
    that the processor has; "off" disables the kernels."""
    try:
        file = library_file()
        _load_openmp()
        loaded = ctypes.CDLL(str(file))
    except OSError as error:
        raise NativeUnavailableError(f"the kernels cannot be loaded ({error})") from None
    declare(loaded)
    loaded.pl_limit_processors(processors())
    wanted = os.environ.get("PACELINE_NATIVE")
    if wanted and loaded.pl_choose_kernels(wanted.encode()):
        raise NativeUnavailableError(
            f"PACELINE_NATIVE={wanted} cannot run here; use {', '.join(INSTRUCTIONS)} or off"
        )
    return loaded


def instructions() -> str:
    """The name of the instruction set in use. Raises NativeUnavailableError."""
    name: bytes = library().pl_instructions()
    return name.decode()


def choose(name: str) -> bool:
    """Use this instruction set from now on. False if it is not available here."""
    return not library().pl_choose_kernels(name.encode())


def active_threads() -> int:
    """How many threads the next forward takes, of torch's: fewer while other processes are busy.
    Raises NativeUnavailableError."""
    return int(library().pl_active_threads(torch.get_num_threads()))


def pointer(tensor: torch.Tensor | None) -> int | None:
    """The address of a tensor's first element; None without a tensor."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "the kernels read contiguous tensors"
    return tensor.data_ptr()


def check(status: int, work: str = "a forward of this size") -> None:
    """Raise MemoryError or IndexError if a call of the library did not return 0."""
    if status == 2:
        raise IndexError("a token id or a position is out of range")
    if status:
        raise MemoryError(f"no memory for {work}")
