"""Reading texts through the engine's own kernels, several times as fast as through the module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from paceline.core.batch import Span
from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.files import replace_files, telling
from paceline.files.ownership import claim, is_claimed
from paceline.model.paged.cache import PagedCache
from paceline.model.target import CausalModel
from paceline.model.tensorfile import as_bytes, read_table, verify
from paceline.train.documents import Observed, Windows

_BLOCK = 16  # tokens of a cache block


class NativeReader:
    """Hidden states of a frozen target, by the kernels that decode with it.

    It holds its own, packed copy of the weights; what it reads is what a head is given in use.
    """

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._cache: PagedCache | None = None
        self._tokens = 0

    @classmethod
    def of(cls, target: Any, name: str) -> NativeReader | None:
        """Of a transformers module, which stays as it is; None where the kernels do not run it."""
        try:
            model = CausalModel(copy.deepcopy(target), name).optimised()
        except UnsupportedModelError:  # it can be trained for, if not be decoded with
            return None
        return None if model.backend.runs_torch else cls(model)

    @torch.no_grad()
    def read(self, ids: torch.Tensor, layers: Sequence[int]) -> list[torch.Tensor]:
        """The inputs of ``layers`` for windows ``ids`` int64 ``[B, W]``, each ``[B, W, hidden]``;
        the number of layers stands for the final norm's output."""
        cache = self._room(ids.numel() + len(ids) * _BLOCK)
        spans = []
        for number, window in enumerate(ids.tolist()):
            cache.admit(number, [], share=False)
            cache.reserve(number, len(window))
            spans.append(Span.of(number, 0, window, wants_logits=False))
        try:
            result = self._model(cache.batch_of(spans), cache, sorted(set(layers))).features
        finally:
            for span in spans:
                cache.free(span.seq_id)
        return [result[layer].view(*ids.shape, -1) for layer in layers]

    def _room(self, tokens: int) -> PagedCache:
        if self._cache is None or tokens > self._tokens:
            self._tokens = tokens
            self._cache = self._model.new_cache(-(-tokens // _BLOCK), _BLOCK, share=False)
        return self._cache


def _is_cached(file: Path) -> bool:
    return is_claimed(file.parents[1]) or bool(read_table(file).sums)


class FeatureCache:
    """Pieces by number under ``folder``, one file each, written when first seen.

    A run meets each piece several times; the target's forward is then done once for each. Of the
    logits only the last hidden states are kept: the target's own head makes them again. A piece of
    256 tokens of a model of width 4096 takes 8 MB with three feature layers.
    """

    def __init__(
        self, folder: Path, observe: Callable[[Windows], Observed], embedding: nn.Module
    ) -> None:
        self._folder = folder
        self._observe = observe
        self._embedding = embedding
        with telling("the cached features", folder):
            claim(folder)

    @torch.no_grad()
    def look(self, windows: Windows) -> Observed:
        """What the target says about the windows, each of which is a numbered piece."""
        device = self._embedding.weight.device
        assert isinstance(device, torch.device)
        parts = [self._read(number, device) for number in windows.numbers]
        if any(part is None for part in parts):
            seen = self._observe(windows)
            for row, number in enumerate(windows.numbers):
                if parts[row] is None:
                    self._write(number, seen, row, windows.lengths[row])
            return seen
        width = windows.ids.shape[1]

        def padded(name: str) -> torch.Tensor:
            # Heads that read nothing but the final hidden states have no features of their own.
            rows = [part.get(name, part["final"]) for part in parts if part is not None]
            return torch.stack([F.pad(row, (0, 0, 0, width - len(row))) for row in rows])

        ids, learn = windows.ids.to(device), windows.learn.to(device)
        features = padded("features")
        return Observed(ids, learn, self._embedding(ids), features, padded("final"), None)

    def _file(self, number: int) -> Path:
        return self._folder / f"{number // 1000:04d}" / f"{number:07d}.safetensors"

    def _read(self, number: int, device: torch.device) -> dict[str, torch.Tensor] | None:
        file = self._file(number)
        if file.is_file():
            with suppress(ModelLoadError):  # damaged: it is made again
                verify(file)
                return load_file(file, device=str(device))
        return None

    def _write(self, number: int, seen: Observed, row: int, length: int) -> None:
        tensors = {"final": seen.final[row, :length].contiguous()}
        if seen.features is not seen.final:
            tensors["features"] = seen.features[row, :length].contiguous()
        file = self._file(number)
        with telling("the cached features", file):
            file.parent.mkdir(exist_ok=True)
        content = {file: as_bytes(tensors)[0]}
        replace_files(content, "the cached features", _is_cached, durable=False)
