"""A copy of a model in 8 or 4 bits for the kernels: rounded matrix by matrix, or read from a file.

    quantised/KEY.forms    in the cache folder: a header and its checksum, the packed matrices

KEY is a hash of the model's matrices and of what they are rounded to. The files can be deleted at
any time. ``PACELINE_QUANTISED_CACHE`` bounds their total size ("off": no files are written); the
least recently used are deleted first. Matrices have no checksum: wrong ones cost speed, not text.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import zlib
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
from paceline.model.backends.base import BackendModel
from paceline.model.backends.native.packing import PackedFormat, PackedLinear, PackedMatrix
from paceline.model.quantised.convert import (
    Rounding,
    Scheme,
    copy_sharing_parameters,
    walk_children,
)
from paceline.model.quantised.rounding import round_to_nearest
from paceline.model.quantised.weights import LinearBase

SETTING = "PACELINE_QUANTISED_CACHE"
OFF = "off"
_OURS = b"Written by Paceline: quantised forms "
_MAGIC = _OURS + b"7\n"  # raise the version when the layout or the rounding changes
_MAX_BYTES = 8 << 30
_DISK_SHARE = 10  # at most this fraction (a tenth) of the disk


@dataclass(frozen=True)
class _Matrix:
    """One packed matrix of the model, and what it is rounded to. ``members``: its linear layers in
    the order of packing, each with its parent module and its name there."""

    members: tuple[tuple[PackedLinear, nn.Module, str], ...]
    rounding: Rounding

    @property
    def layers(self) -> list[PackedLinear]:
        return [layer for layer, _, _ in self.members]

    @property
    def packed(self) -> PackedMatrix:
        return self.members[0][0].packed

    @property
    def gated(self) -> bool:
        return self.members[0][0].part != PLAIN

    @property
    def key(self) -> list[Any]:
        """Identifies matrix and rounding; up to 64 parts are hashed, at the speed of memory."""
        packed, words = self.packed, self.packed.data.view(torch.int64)
        hashes = torch.hash_tensor(words.view(math.gcd(64, len(words)), -1), 1)
        return [hashes.tolist(), str(packed.dtype), packed.form, self.rounding]

    def empty(self, form: PackedFormat) -> PackedMatrix:
        return PackedMatrix.empty(self.layers, self.packed.dtype, self.gated, form)

    def rounded(self) -> PackedMatrix:
        linears = [
            round_to_nearest(layer.weight, *self.rounding).linear(name, layer.bias)
            for layer, _, name in self.members
        ]
        return PackedMatrix.pack(linears, self.packed.dtype, self.gated)


def rounded_copy(model: BackendModel, precision: str) -> Any:
    """A native model's modules with quantised matrices; None if no matrix divides into groups."""
    name = f"{model.name} in {precision}"
    hf = copy_sharing_parameters(
        model.hf, lambda m: m if isinstance(m, nn.Linear | LinearBase) else None
    )
    matrices = _matrices(hf, Scheme(precision, head="int8", finer=True))
    if not matrices:
        return None
    # Weights that were not loaded from files may be changed by the caller at any time: not cached.
    file = _cache_file(matrices) if model.checkpoint else None
    rounded = None if file is None else read(file, matrices)
    if rounded is None:
        with stage(f"quantising {name}", total=len(matrices), unit="matrices") as progress:
            rounded = []
            for matrix in matrices:
                rounded.append(matrix.rounded())
                progress.advance()
        if file is not None:
            write(file, rounded)
    for matrix, packed in zip(matrices, rounded, strict=True):
        for layer, parent, key in matrix.members:
            setattr(parent, key, PackedLinear(layer, packed, layer.part, layer.first))
    return hf


def _matrices(hf: Any, scheme: Scheme) -> list[_Matrix]:
    head = hf.get_output_embeddings()
    by_matrix: dict[int, list[tuple[PackedLinear, nn.Module, str]]] = {}
    for parent, key, child in walk_children(hf):
        if isinstance(child, PackedLinear):
            by_matrix.setdefault(id(child.packed), []).append((child, parent, key))
    result = []
    for members in by_matrix.values():
        members.sort(key=lambda member: (member[0].part, member[0].first))
        layer = members[0][0]
        rounding = scheme.rounding_of(layer.in_features, layer is head)
        if rounding is not None:
            result.append(_Matrix(tuple(members), rounding))
    return result


# -- in the cache folder -----------------------------------------------------------------------


def _cache_file(matrices: Sequence[_Matrix]) -> Path | None:
    """The file for the rounded matrices; None if files are off. Raises ConfigError for a setting
    that is no size."""
    if os.environ.get(SETTING) and not _max_bytes():
        return None
    keys = json.dumps([matrix.key for matrix in matrices])
    return cache_folder() / "quantised" / f"{hashlib.sha256(keys.encode()).hexdigest()[:40]}.forms"


def read(file: Path, matrices: Sequence[_Matrix]) -> list[PackedMatrix] | None:
    """The matrices in a file; None, with a log line, if it is cut short or not of this version."""
    try:
        with file.open("rb") as stream:
            if stream.readline() != _MAGIC:
                raise ValueError("it does not begin as such a file")
            checksum, _, header = stream.readline().partition(b" ")
            if checksum != _checksum(header):  # the kernels rely on it
                raise ValueError("its header does not match its checksum")
            forms: list[dict[str, Any]] = json.loads(header)
            stored = [
                m.empty(PackedFormat(**form)) for form, m in zip(forms, matrices, strict=True)
            ]
            for packed in stored:
                buffer = packed.data.numpy().data
                if stream.readinto(buffer) != len(buffer):
                    raise ValueError("it is cut short")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError) as error:
        info(f"{file} is damaged ({error}); the copy is made again")
        return None
    with suppress(OSError):
        os.utime(file)  # marks the file as used, for _evict
    return stored


def _checksum(header: bytes) -> bytes:
    return b"%08x" % zlib.crc32(header)


def write(file: Path, matrices: Sequence[PackedMatrix]) -> None:
    """Write the matrices to ``file`` for the next start; if that fails, a log line says why."""
    size = sum(packed.data.nbytes for packed in matrices)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        room = min(_max_bytes(), shutil.disk_usage(file.parent).free // 2)
        if size > room:
            raise WriteError(
                f"{file.parent} has room for {room / 1e6:,.0f} MB, it takes {size / 1e6:,.0f} MB"
            )
        _evict(file.parent, _max_bytes() - size)
        forms = [packed.form._asdict() for packed in matrices if packed.form is not None]
        with (
            stage(f"keeping it in {file.parent}"),
            atomic_write(file, "the quantised copy", durable=False) as stream,
        ):
            header = json.dumps(forms).encode() + b"\n"
            stream.write(_MAGIC + _checksum(header) + b" " + header)
            for packed in matrices:
                stream.write(packed.data.numpy().data)
    except (OSError, PacelineError) as error:
        info(
            f"the quantised copy is not kept for the next start: {error} (PACELINE_CACHE=FOLDER "
            "names another place)"
        )


def _max_bytes() -> int:
    """How many bytes all files may take. Raises ConfigError for a setting that is no size."""
    limit = os.environ.get(SETTING)
    if limit:
        return 0 if limit == OFF else parse_bytes(limit)
    try:
        return min(_MAX_BYTES, shutil.disk_usage(cache_folder()).total // _DISK_SHARE)
    except OSError:
        return 0


def _evict(folder: Path, limit: int) -> None:
    """Delete the least recently used files until the others take at most ``limit`` bytes."""
    files = folder.glob("*.forms")
    for file in sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True):
        limit -= file.stat().st_size
        if limit < 0:
            file.unlink(missing_ok=True)
