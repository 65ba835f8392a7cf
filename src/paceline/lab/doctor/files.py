"""What a model's folder says of itself: config.json, and the tensors of its weights, which are
mapped into memory: their tables are read at once, values only where somebody looks at them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from paceline.errors import ModelLoadError
from paceline.model.gguf import GgufFile, gguf_file, read_gguf
from paceline.model.hub import SMALL, check_hub_name, hub_message, is_path
from paceline.model.loading import check_folder
from paceline.model.names import resolve
from paceline.model.tensorfile import verify

# By their names on the hub; of all others only the number of bytes matters.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16}
_DTYPES |= {"BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32}


@dataclass(frozen=True)
class ModelFiles:
    """A folder, or what of it could be fetched. ``tensors`` by their names in the files; those of
    weights on the hub have no values (they are on the meta device).

    ``absent``: files that an index names and the folder lacks. ``damaged``: what is wrong with
    which file. ``pickled``: weights that cannot be looked into. ``remote``: weights not here yet.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    pickled: list[str] = field(default_factory=list)
    remote: bool = False
    gguf: GgufFile | None = None  # then ``folder`` is that file, and ``tensors`` are not named

    @property
    def parameters(self) -> int:
        floating = (t for t in self.tensors.values() if t.is_floating_point())
        return sum(tensor.numel() for tensor in floating)

    @property
    def stored_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def whole(self) -> bool:
        """Whether all tensors are known."""
        return bool(self.tensors) and not (self.absent or self.damaged or self.pickled)

    def has(self, *names: str) -> bool:
        return any((self.folder / name).is_file() for name in names)


def read_files(name: str, weights: Iterable[str] = ()) -> ModelFiles:
    """Look into a built-in, a local folder or a hub name; ``weights`` are file names that count.

    By default those of a model: model.safetensors or the shards of an index. What carries checksums
    is held against them. Raises ModelLoadError, in one line, if there is no such folder or no
    readable config.json in it, and UnsupportedModelError on a GGUF file of a kind that is not read.
    """
    path = resolve(name)
    if path.startswith("~"):
        path = str(Path(path).expanduser())
    gguf = gguf_file(path)
    if gguf is not None:
        file = read_gguf(gguf)
        return ModelFiles(name, gguf, {"model_type": file.architecture}, gguf=file)
    folder = Path(path) if is_path(path) else _fetch(name)
    config = check_folder(name, folder)
    files = ModelFiles(name, folder, config)
    for weight in _weights(files, tuple(weights)):
        if not weight.is_file():
            files.absent.append(weight.name)
        elif weight.suffix != ".safetensors":
            files.pickled.append(weight.name)
        else:
            try:
                verify(weight)
                with safe_open(weight, framework="pt") as opened:
                    names = opened.keys()
                    files.tensors.update({key: opened.get_tensor(key) for key in names})
            except ModelLoadError as error:
                files.damaged.append(str(error).partition("; ")[0])  # kinds.md has a cure
    if is_path(path) or files.tensors or files.absent or files.damaged or files.pickled:
        return files
    return ModelFiles(name, folder, config, _remote_tensors(name), remote=True)


def _weights(files: ModelFiles, wanted: tuple[str, ...]) -> list[Path]:
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
        return Path(snapshot_download(name, allow_patterns=list(SMALL)))
    except (OSError, ValueError) as error:
        raise ModelLoadError(hub_message(name, error)) from None


def _remote_tensors(name: str) -> dict[str, torch.Tensor]:
    """By the headers on the hub; empty if there are none to be read."""
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    try:
        headers = get_safetensors_metadata(name).files_metadata.values()
    except (OSError, ValueError, NotASafetensorsRepoError, SafetensorsParsingError):
        return {}
    entries = {key: entry for header in headers for key, entry in header.tensors.items()}
    dtypes = {key: _DTYPES.get(str(entry.dtype), torch.int8) for key, entry in entries.items()}
    with torch.device("meta"):
        return {key: torch.empty(entries[key].shape, dtype=dtypes[key]) for key in entries}
