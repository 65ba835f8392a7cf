"""What a model's folder says of itself: config.json, and the headers of its weights.

A safetensors file begins with a table of its tensors. Reading it takes milliseconds for any
model, and values can be read from where they lie, so no weight is ever loaded here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ModelLoadError
from paceline.model.gguf import GgufFile, gguf_file, read_gguf
from paceline.model.hub import check_hub_name, hub_message, is_path
from paceline.model.loading import check_folder
from paceline.model.names import resolve
from paceline.model.tensorfile import read_table

_SMALL = ("*.json", "*.jinja", "*.model", "*.txt")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorEntry:
    """One line of a header. ``file`` is None where the weights are on the hub only."""

    dtype: str
    shape: tuple[int, ...]
    file: Path | None = None
    start: int = 0
    length: int = 0  # bytes

    @property
    def count(self) -> int:
        return prod(self.shape)

    def read(self, first: int = 0, count: int | None = None) -> torch.Tensor | None:
        """``count`` values from the ``first`` on, flat; None if they cannot be had here."""
        dtype = _DTYPES.get(self.dtype)
        if dtype is None or self.file is None:
            return None
        number = min(self.count - first, self.count if count is None else count)
        with self.file.open("rb") as file:
            file.seek(self.start + first * dtype.itemsize)
            data = bytearray(file.read(number * dtype.itemsize))
        return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)

    def stand_in(self) -> torch.Tensor:
        """A tensor of the same shape and dtype without values."""
        return torch.empty(self.shape, dtype=_DTYPES.get(self.dtype, torch.float32), device="meta")


@dataclass(frozen=True)
class ModelFiles:
    """A folder, or what of it could be fetched. ``tensors`` by their names in the files.

    ``absent``: files that an index names and the folder lacks. ``damaged``: what is wrong with
    which file. ``pickled``: weights that cannot be looked into. ``remote``: weights not here yet.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    pickled: list[str] = field(default_factory=list)
    remote: bool = False
    gguf: GgufFile | None = None  # then ``folder`` is that file, and ``tensors`` are not named

    @cached_property
    def parameters(self) -> int:
        return sum(t.count for t in self.tensors.values() if t.dtype[0] in "FB")

    @property
    def stored_bytes(self) -> int:
        return sum(t.length for t in self.tensors.values())

    @property
    def whole(self) -> bool:
        """Whether all tensors are known."""
        return bool(self.tensors) and not (self.absent or self.damaged or self.pickled)

    def has(self, *names: str) -> bool:
        return any((self.folder / name).is_file() for name in names)


def read_files(name: str, weights: Iterable[str] = ()) -> ModelFiles:
    """Look into a built-in, a local folder or a hub name; ``weights`` are file names that count.

    By default those of a model: model.safetensors or the shards of an index. Raises
    ModelLoadError, in one line, if there is no such folder or no readable config.json in it, and
    UnsupportedModelError on a GGUF file of a kind that is not read.
    """
    path = resolve(name)
    if path.startswith("~"):
        path = str(Path(path).expanduser())
    gguf = gguf_file(path)
    if gguf is not None:
        file = read_gguf(gguf)
        return ModelFiles(name, gguf, {"model_type": file.architecture}, gguf=file)
    local = is_path(path)
    folder = Path(path) if local else _fetch(name)
    files = ModelFiles(name, folder, check_folder(name, folder))
    for weight in _weights(files, tuple(weights)):
        if not weight.is_file():
            files.absent.append(weight.name)
        elif weight.suffix == ".safetensors":
            try:
                files.tensors.update(read_header(weight))
            except ModelLoadError as error:
                files.damaged.append(str(error).partition("; ")[0])  # kinds.md has a cure
        else:
            files.pickled.append(weight.name)
    if local or files.tensors or files.absent or files.damaged or files.pickled:
        return files
    return replace(files, tensors=_remote_headers(name), remote=True)


def _weights(files: ModelFiles, wanted: Sequence[str]) -> list[Path]:
    """The files that weights are read from, whether they are there or not."""
    folder = files.folder
    if wanted:
        return [f for f in (folder / n for n in wanted) if f.is_file()][:1]
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        try:
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return [folder / file for file in sorted(set(named.values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            files.damaged.append(f"{index.name} is no index of weights ({error})")
            return []
    single = sorted(folder.glob("*.safetensors"))
    named_model = [file for file in single if file.name == "model.safetensors"]
    return named_model or single or sorted(folder.glob("pytorch_model*.bin"))


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The table of a safetensors file, checked against the file's length.

    Raises ModelLoadError, saying what is wrong with the file.
    """
    return {
        key: TensorEntry(entry.dtype, entry.shape, file, entry.start, entry.end - entry.start)
        for key, entry in read_table(file).entries.items()
    }


# -- the hub -----------------------------------------------------------------------------------


def _fetch(name: str) -> Path:
    """The snapshot of a hub model that is on this machine, or its small files. ModelLoadError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    check_hub_name(name)
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except HFValidationError as error:
        raise ModelLoadError(hub_message(name, error)) from None
    except (OSError, ValueError):
        pass  # not downloaded: look at the small files
    try:
        return Path(snapshot_download(name, allow_patterns=list(_SMALL)))
    except (OSError, ValueError) as error:
        raise ModelLoadError(hub_message(name, error)) from None


def _remote_headers(name: str) -> dict[str, TensorEntry]:
    """Tensors by the headers on the hub; empty if there are none to be read."""
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    try:
        files = get_safetensors_metadata(name).files_metadata.values()
    except (OSError, ValueError, NotASafetensorsRepoError, SafetensorsParsingError):
        return {}
    return {
        key: TensorEntry(
            str(entry.dtype),
            tuple(entry.shape),
            length=entry.data_offsets[1] - entry.data_offsets[0],
        )
        for file in files
        for key, entry in file.tensors.items()
    }
