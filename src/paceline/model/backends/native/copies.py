"""A model's copy in 8 or 4 bits for the kernels: rounded matrix by matrix, or read from the cache.

    quantised/KEY.forms    in the cache folder: a header, then the packed matrices

A key is made of the model's matrices as they lie in memory, and of the codes. The files can be
deleted at any time. ``PACELINE_QUANTISED_CACHE`` bounds their size ("off": no files); the least
recently used go first. They have no checksums: a wrong copy costs a draft's speed alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.core.memory import parse_bytes
from paceline.core.stages import info, stage
from paceline.errors import PacelineError, WriteError
from paceline.files import atomic_write, cache_folder
from paceline.kernels.library import PLAIN
from paceline.model.backends.base import Adapted
from paceline.model.backends.native.packing import Form, Packed, PackedLinear
from paceline.model.quantised.convert import Code, Scheme, children, copy_beside
from paceline.model.quantised.rounding import round_to_nearest
from paceline.model.quantised.weights import LinearBase, QuantisedLinear

SETTING = "PACELINE_QUANTISED_CACHE"
OFF = "off"
_OURS = b"Written by Paceline: quantised forms "
_MAGIC = _OURS + b"5\n"  # version of layout and numbers
_MOST = 8 << 30
_SHARE = 10  # of the disk, if that is less


@dataclass(frozen=True)
class _Matrix:
    """The linear layers of one packed matrix, in its order, with their parents and names."""

    members: tuple[tuple[PackedLinear, nn.Module, str], ...]
    code: Code

    @property
    def layers(self) -> list[PackedLinear]:
        return [layer for layer, _, _ in self.members]

    @property
    def packed(self) -> Packed:
        return self.members[0][0].packed

    @property
    def gated(self) -> bool:
        return self.members[0][0].part != PLAIN

    @property
    def key(self) -> list[Any]:
        """What it is and becomes: hashes of at most 64 parts of its numbers, as fast as memory."""
        packed, words = self.packed, self.packed.data.view(torch.int64)
        hashes = torch.hash_tensor(words.view(math.gcd(64, len(words)), -1), 1)
        return [hashes.tolist(), str(packed.dtype), packed.form, self.code]

    def blank(self, form: Form) -> Packed:
        return Packed.blank(self.layers, self.packed.dtype, self.gated, form)

    def rounded(self) -> Packed:
        linears = [
            QuantisedLinear(round_to_nearest(layer.weight, *self.code).of_layer(name), layer.bias)
            for layer, _, name in self.members
        ]
        return Packed.of(linears, self.packed.dtype, self.gated)


def rounded_copy(model: Adapted, precision: str) -> Any:
    """A native model's modules with other matrices; None if none divides into groups."""
    name = f"{model.name} in {precision}"
    hf = copy_beside(model.hf, lambda m: m if isinstance(m, nn.Linear | LinearBase) else None)
    matrices = _matrices(hf, Scheme(precision, head="int8", finer=True))
    if not matrices:
        return None
    # A module of the caller's may change at any time: what is not from a file is not kept.
    file = _file_of(matrices) if model.checkpoint else None
    made = None if file is None else read(file, matrices)
    if made is None:
        with stage(f"quantising {name}", total=len(matrices), unit="matrices") as progress:
            made = []
            for matrix in matrices:
                made.append(matrix.rounded())
                progress.advance()
        if file is not None:
            write(file, made)
    for matrix, packed in zip(matrices, made, strict=True):
        for layer, parent, key in matrix.members:
            setattr(parent, key, PackedLinear(layer, packed, layer.part, layer.first))
    return hf


def _matrices(hf: Any, scheme: Scheme) -> list[_Matrix]:
    head = hf.get_output_embeddings()
    by_matrix: dict[int, list[tuple[PackedLinear, nn.Module, str]]] = {}
    for parent, key, child in children(hf):
        if isinstance(child, PackedLinear):
            by_matrix.setdefault(id(child.packed), []).append((child, parent, key))
    result = []
    for members in by_matrix.values():
        members.sort(key=lambda member: (member[0].part, member[0].first))
        layer = members[0][0]
        code = scheme.code_of(layer.in_features, layer is head)
        if code is not None:
            result.append(_Matrix(tuple(members), code))
    return result


# -- in the cache folder -----------------------------------------------------------------------


def _file_of(matrices: Sequence[_Matrix]) -> Path | None:
    """The cache file, if there can be one. Raises ConfigError for a setting that is no size."""
    folder = cache_folder() / "quantised"
    if os.environ.get(SETTING) and not _limit():
        return None
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    writable = folder.is_dir() and os.access(folder, os.W_OK)
    if not writable and not any(folder.glob("*.forms")):
        info(
            f"the quantised form is not kept for the next start: {folder} cannot be written to; "
            "PACELINE_CACHE=FOLDER names another place"
        )
        return None
    keys = json.dumps([matrix.key for matrix in matrices])
    return folder / f"{hashlib.sha256(keys.encode()).hexdigest()[:40]}.forms"


def read(file: Path, matrices: Sequence[_Matrix]) -> list[Packed] | None:
    """The matrices in a file; None, and a line that says so, if it is cut or not ours."""
    try:
        with file.open("rb") as stream:
            if stream.readline() != _MAGIC:
                raise ValueError("it begins otherwise")
            forms: list[dict[str, Any]] = json.loads(stream.readline())
            made = [m.blank(Form(**form)) for form, m in zip(forms, matrices, strict=True)]
            for packed in made:
                buffer = packed.data.numpy().data
                if stream.readinto(buffer) != len(buffer):
                    raise ValueError("it is cut")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        info(f"{file} is damaged ({error}) and is made anew")
        return None
    with suppress(OSError):
        os.utime(file)
    return made


def write(file: Path, made: Sequence[Packed]) -> None:
    """Keep matrices for the next start; if that fails a line says so."""
    size = sum(packed.data.nbytes for packed in made)
    try:
        room = min(_limit(), shutil.disk_usage(file.parent).free // 2)
        if size > room:
            raise WriteError(
                f"{file.parent} has room for {room / 1e6:,.0f} MB, it takes {size / 1e6:,.0f} MB; "
                "make room there, or PACELINE_CACHE=FOLDER names another"
            )
        _evict(file.parent, _limit() - size)
        forms = [packed.form._asdict() for packed in made if packed.form is not None]
        with (
            stage(f"keeping it in {file.parent}"),
            atomic_write(file, "the quantised form", _is_ours, durable=False) as stream,
        ):
            stream.write(_MAGIC + json.dumps(forms).encode() + b"\n")
            for packed in made:
                stream.write(packed.data.numpy().data)
    except (OSError, PacelineError) as error:
        info(f"the quantised form is not kept for the next start: {error}")


def _limit() -> int:
    """Bytes of all files. Raises ConfigError for a setting that is no size."""
    limit = os.environ.get(SETTING)
    if limit:
        return 0 if limit == OFF else parse_bytes(limit)
    try:
        return min(_MOST, shutil.disk_usage(cache_folder()).total // _SHARE)
    except OSError:
        return 0


def _evict(folder: Path, limit: int) -> None:
    """Delete the least recently used forms until so many bytes are left."""
    ours = [file for file in folder.glob("*.forms") if _is_ours(file)]
    for file in sorted(ours, key=lambda file: file.stat().st_mtime_ns, reverse=True):
        limit -= file.stat().st_size
        if limit < 0:
            file.unlink(missing_ok=True)


def _is_ours(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(_OURS)) == _OURS
