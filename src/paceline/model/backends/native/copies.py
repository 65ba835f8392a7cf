"""A copy of a model in 8 or 4 bits for the kernels: rounded matrix by matrix, or read from a file.

    quantised/KEY.safetensors    in the cache folder: the packed matrices, their formats as metadata

KEY is a hash of the model's matrices and of what they are rounded to. The files can be deleted at
any time. ``PACELINE_QUANTISED_CACHE`` bounds their total size ("off": no files are written); the
least recently used are deleted first.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from paceline.core.memory import parse_bytes
from paceline.core.stages import info, stage
from paceline.errors import PacelineError
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
_VERSION = 8  # part of the names: raise it when the layout or the rounding changes
_MAX_BYTES = 8 << 30


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
    if not _max_bytes():
        return None
    keys = json.dumps([_VERSION, *(matrix.key for matrix in matrices)])
    name = hashlib.sha256(keys.encode()).hexdigest()[:40]
    return cache_folder() / "quantised" / f"{name}.safetensors"


def read(file: Path, matrices: Sequence[_Matrix]) -> list[PackedMatrix] | None:
    """The matrices in a file; None if there is none, and, with a log line, if it is damaged."""
    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="pt") as opened:
            checksum, _, text = opened.metadata()["forms"].partition(" ")
            if checksum != _crc32(text):  # the kernels rely on the formats
                raise ValueError("its formats do not match their checksum")
            forms: list[dict[str, Any]] = json.loads(text)
            stored = [
                m.empty(PackedFormat(**form)) for form, m in zip(forms, matrices, strict=True)
            ]
            for index, packed in enumerate(stored):
                packed.data.copy_(opened.get_tensor(str(index)))
    except Exception as error:  # a damaged file may lead to any
        info(f"{file} is damaged ({error}); the copy is made again")
        return None
    with suppress(OSError):
        os.utime(file)  # marks the file as used, for _evict; fails in the folder of another user
    return stored


def write(file: Path, matrices: Sequence[PackedMatrix]) -> None:
    """Write the matrices to ``file`` for the next start; if that fails, a log line says why."""
    tensors = {str(index): packed.data for index, packed in enumerate(matrices)}
    forms = json.dumps([packed.form._asdict() for packed in matrices if packed.form is not None])
    room = _max_bytes() - sum(data.nbytes for data in tensors.values())
    if room < 0:
        return info(f"the quantised copy is not kept: it is larger than {SETTING}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _evict(file.parent, room)
        with (
            stage(f"keeping it in {file.parent}"),
            atomic_write(file, "the quantised copy", durable=False) as stream,
        ):
            save_file(tensors, stream.name, {"forms": f"{_crc32(forms)} {forms}"})
    except (OSError, PacelineError, SafetensorError) as error:
        info(
            f"the quantised copy is not kept for the next start: {error} (PACELINE_CACHE=FOLDER "
            "names another place)"
        )


def _crc32(text: str) -> str:
    return str(zlib.crc32(text.encode()))


def _max_bytes() -> int:
    """How many bytes all files may take. Raises ConfigError for a setting that is no size."""
    limit = os.environ.get(SETTING)
    return _MAX_BYTES if not limit else 0 if limit == OFF else parse_bytes(limit)


def _evict(folder: Path, limit: int) -> None:
    """Delete the least recently used files until the others take at most ``limit`` bytes."""
    files = filter(Path.is_file, folder.iterdir())  # also those of other versions
    for file in sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True):
        limit -= file.stat().st_size
        if limit < 0:
            file.unlink(missing_ok=True)
