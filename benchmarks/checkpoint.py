"""Reading and writing safetensors checkpoints tensor by tensor, in little memory."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 1 << 30


def has_weights(folder: Path) -> bool:
    """Whether the folder holds safetensors files."""
    return any(folder.glob("*.safetensors"))


class Reader:
    """Tensors of a checkpoint folder by name, each read when asked for."""

    def __init__(self, folder: Path) -> None:
        self._files = [safe_open(p, "pt") for p in sorted(folder.glob("*.safetensors"))]  # type: ignore[no-untyped-call]
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118
        self.dtype: torch.dtype = self.get("model.embed_tokens.weight").dtype

    def get(self, name: str) -> Tensor:
        """One tensor; raises KeyError for a name that the checkpoint lacks."""
        tensor: Tensor = self._where[name].get_tensor(name)
        return tensor


class ShardWriter:
    """Collects tensors and writes a shard whenever about `limit` bytes have come together."""

    def __init__(self, folder: Path, limit: int = SHARD_BYTES) -> None:
        self._folder, self._limit = folder, limit
        self._held: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._bytes = self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor."""
        size = tensor.numel() * tensor.element_size()
        if self._held and self._bytes + size > self._limit:
            self._flush()
        self._held[name] = tensor.contiguous()
        self._bytes += size
        self._total += size

    def close(self) -> None:
        """Write what is left, name the shards as transformers does, and write their index."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            self._part(0).rename(self._folder / "model.safetensors")
            return
        where: dict[str, str] = {}
        for index, names in enumerate(self._shards):
            final = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            self._part(index).rename(self._folder / final)
            where |= dict.fromkeys(names, final)
        content = {"metadata": {"total_size": self._total}, "weight_map": where}
        path = self._folder / "model.safetensors.index.json"
        path.write_text(json.dumps(content, indent=2) + "\n")

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index:05d}.safetensors"

    def _flush(self) -> None:
        save_file(self._held, self._part(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._held))
        self._held, self._bytes = {}, 0
