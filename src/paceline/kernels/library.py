"""The compiled kernels as Python sees them: csrc/paceline_native.h in ctypes."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Mapping
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint64,
    c_void_p,
)
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from paceline.core.cgroup import processors
from paceline.kernels.compile import NativeUnavailableError, library_file

FLOAT32, BFLOAT16 = 0, 1
SCALE_FLOAT, SCALE_BFLOAT16, SCALE_HALF = 0, 1, 2
OFFSETS_NONE, OFFSETS_MIDDLE, OFFSETS_LEAST = 0, 1, 2
PLAIN, GATE, UP = 0, 1, 2  # parts of a packed matrix
DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
SILU, GELU_TANH = 0, 1
_ARM = platform.machine() in ("aarch64", "arm64")
INSTRUCTIONS = (*(("i8mm", "neon") if _ARM else ("amx", "dpbf16", "avx512", "avx2")), "portable")
SAME_BITS = tuple(name for name in INSTRUCTIONS if name != "dpbf16")


def fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    """Fields of one type in the order of the header."""
    return tuple((name, kind) for name in names.split())


class CWeight(Structure):
    _fields_ = (
        *fields(c_void_p, "data bias"),
        *fields(c_int64, "outputs inputs bits repeat scale_kind offsets wide"),
    )


class CNorm(Structure):
    _fields_ = (("weight", c_void_p), ("eps", c_float))


class CLayer(Structure):
    _fields_ = (
        *fields(CWeight, "qkv out gate_up down"),
        *fields(CNorm, "attention_norm mlp_norm attention_after mlp_after q_norm k_norm"),
        *fields(c_int64, "window rope experts chosen"),
        ("router", CWeight),
        *fields(POINTER(CWeight), "expert_gate_up expert_down"),
    )


class CModel(Structure):
    _fields_ = (
        *fields(c_int64, "dtype hidden vocab words layers heads kv_heads head_dim ffn activation"),
        *fields(c_float, "embedding_scale scaling attention_cap logit_cap"),
        ("embedding", c_void_p),
        ("layer", POINTER(CLayer)),
        ("final_norm", CNorm),
        *fields(CWeight, "head fuse"),
        ("hidden_norm", CNorm),
        ("residual_normed", c_int64),
    )


class CMedusa(Structure):
    _fields_ = (
        *fields(c_int64, "dtype width vocab heads blocks shared"),
        ("logit_cap", c_float),
        *fields(POINTER(CWeight), "block head"),
    )


class CBatch(Structure):
    _fields_ = (
        *fields(c_int64, "rows spans logit_rows features block_size threads"),
        *fields(c_void_p, "ids positions slots span tables parents wanted logits"),
        ("columns", c_int64),
        *fields(c_void_p, "feature_layers feature keys values"),
        ("int8_cache", c_int64),
        *fields(c_void_p, "skipped rope hidden"),
        ("fused", c_int64),
        *fields(c_void_p, "outputs greedy"),
    )


class CTree(Structure):
    _fields_ = (
        *fields(c_int32, "depth width nodes base table sampled top_k"),
        *fields(c_float, "sharpness top_p min_p least"),
        ("position", c_int64),
        ("seed", c_uint64),
    )


class CGrowth(Structure):
    _fields_ = (
        *fields(c_int64, "trees block_size threads"),
        *fields(c_void_p, "tree tables first logits"),
        *fields(c_int64, "stride columns"),
        *fields(c_void_p, "ids outputs keys values"),
        ("int8_cache", c_int64),
        *fields(c_void_p, "skipped rope"),
        ("most", c_int64),
        *fields(c_void_p, "tokens parents slots counts scores"),
    )


_N, _P = c_int64, c_void_p  # numbers and addresses
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "pl_instructions": (c_char_p, ()),
    "pl_choose": (c_int, (c_char_p,)),
    "pl_processors": (None, (_N,)),
    "pl_patience": (_N, (_N,)),
    "pl_packed_bytes": (_N, (_N, _N, _N)),
    "pl_pack": (None, (_N, _N, _P, _N, _N, _N, _P)),
    "pl_unpack": (None, (_N, _N, _P, _N, _N, _N, _P)),
    "pl_quantised_bytes": (_N, (POINTER(CWeight),)),
    "pl_copy_quantised": (None, (_N, _N, _P, _P, _P, _N, _N, POINTER(CWeight))),
    "pl_round": (c_int, (_N, _P, _N, _N, _N, _N, _N, _P, _P, _P, _N)),
    "pl_product": (c_int, (_N, POINTER(CWeight), _P, _N, c_float, _P, _N)),
    "pl_repeat_product": (c_int, (_N, POINTER(CWeight), _P, _N, _N, _N, _P, _N)),
    "pl_open": (_P, (POINTER(CModel),)),
    "pl_close": (None, (_P,)),
    "pl_forward": (c_int, (_P, POINTER(CBatch))),
    "pl_grow": (c_int, (_P, POINTER(CGrowth))),
    "pl_medusa_logits": (c_int, (POINTER(CMedusa), _P, _N, _N, _P, _N)),
}


def declare(loaded: Any, signatures: Mapping[str, tuple[Any, tuple[Any, ...]]]) -> None:
    """Say what functions of the library take and return."""
    for name, (result, arguments) in signatures.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments


def _load_openmp() -> None:
    """Have OpenMP's functions there for the kernels: those of torch's own library, as two pools of
    threads in one process would wait for each other's processors. Raises OSError."""
    if sys.platform != "linux":
        return  # it is linked
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        maps = ""
    files = {Path(line.split(maxsplit=5)[-1]) for line in maps.splitlines()}
    loaded = sorted(str(f) for f in files if f.name.startswith("libgomp") and f.is_file())
    ctypes.CDLL((loaded or ["libgomp.so.1"])[0], ctypes.RTLD_GLOBAL)


@lru_cache(maxsize=1)
def library() -> Any:
    """The loaded library, built first where needed. Raises NativeUnavailableError.

    ``PACELINE_NATIVE`` names the instruction set to use, one of INSTRUCTIONS, instead of the best
    that the processor has; "off" leaves the kernels out.
    """
    try:
        file = library_file()
        _load_openmp()
        loaded = ctypes.CDLL(str(file))
    except OSError as error:
        raise NativeUnavailableError(f"the kernels cannot be loaded ({error})") from None
    declare(loaded, _SIGNATURES)
    loaded.pl_processors(processors())
    wanted = os.environ.get("PACELINE_NATIVE")
    if wanted and loaded.pl_choose(wanted.encode()):
        raise NativeUnavailableError(
            f"PACELINE_NATIVE={wanted} cannot run here; use {', '.join(INSTRUCTIONS)} or off"
        )
    return loaded


def instructions() -> str:
    """The instruction set of the kernels in use. Raises NativeUnavailableError."""
    name: bytes = library().pl_instructions()
    return name.decode()


def choose(name: str) -> bool:
    """Use the kernels for this instruction set from now on; false if they cannot run here."""
    return not library().pl_choose(name.encode())


def pointer(tensor: torch.Tensor | None) -> int | None:
    """The address of its first number; None without a tensor."""
    return None if tensor is None else tensor.data_ptr()


def check(status: int, work: str = "a forward of this size") -> None:
    """Raises MemoryError and IndexError."""
    if status == 2:
        raise IndexError("a token id or a position is out of range")
    if status:
        raise MemoryError(f"no memory for {work}")
