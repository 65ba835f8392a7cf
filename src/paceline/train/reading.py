"""What a frozen target says about windows of text: read through the engine's own kernels, several
times as fast as through the module, and kept on disk where that is asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from paceline.core.batch import Span
from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.files import write_cached
from paceline.model.paged.cache import PagedCache
from paceline.model.target import CausalModel
from paceline.model.tensorfile import as_bytes, verify
from paceline.train.documents import Windows

_BLOCK = 16  # tokens of a cache block


@dataclass(frozen=True)
class Observed:
    """What the target says about windows of text ``ids [B, W]``.

    ``learn`` bool ``[B, W]``: the tokens that a head shall learn to draft. ``features
    [B, W, layers * hidden]`` (side by side), ``final [B, W, hidden]``, the output of the final
    norm, and ``logits [B, W, vocab]``, or None where they are the head's product with ``final``
    and are made for the rows that are asked for.
    """

    ids: torch.Tensor
    learn: torch.Tensor
    features: torch.Tensor
    final: torch.Tensor
    logits: torch.Tensor | None


class NativeReader:
    """Hidden states of a frozen target, by the kernels that decode with it, over a packed copy of
    the weights."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._cache: PagedCache | None = None
        self._tokens = 0

    @classmethod
    def of(cls, target: Any, name: str) -> NativeReader | None:
        """Of a module of transformers; None where the kernels do not run it."""
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
            result = self._model(cache.batch_of(spans, sorted(set(layers))), cache).features
        finally:
            for span in spans:
                cache.free(span.seq_id)
        return [result[layer].view(*ids.shape, -1) for layer in layers]

    def _room(self, tokens: int) -> PagedCache:
        if self._cache is None or tokens > self._tokens:
            self._tokens = tokens
            self._cache = self._model.new_cache(-(-tokens // _BLOCK), _BLOCK, share=False)
        return self._cache


class FeatureCache:
    """Pieces by number under ``folder``, one file each, written when first seen.

    Of the logits only the last hidden states are kept: the target's head makes them again. A piece
    of 256 tokens of a model of width 4096 takes 8 MB with three feature layers.
    """

    def __init__(
        self, folder: Path, observe: Callable[[Windows], Observed], device: torch.device
    ) -> None:
        self._folder, self._observe, self._device = folder, observe, device

    @torch.no_grad()
    def look(self, windows: Windows) -> Observed:
        """What the target says about the windows, each of which is a numbered piece."""
        files = [self._file(number) for number in windows.numbers]
        kept = [self._read(file) for file in files]
        pieces = [piece for piece in kept if piece is not None]
        if len(pieces) < len(kept):
            seen = self._observe(windows)
            for row, piece in enumerate(kept):
                if piece is None:
                    self._write(files[row], seen, row, windows.lengths[row])
            return seen
        width = windows.ids.shape[1]

        def padded(name: str) -> torch.Tensor:
            # Heads that read nothing but the final hidden states have no features of their own.
            rows = [piece.get(name, piece["final"]) for piece in pieces]
            rows = [F.pad(row, (0, 0, 0, width - len(row))) for row in rows]
            return torch.stack(rows).to(self._device)

        ids, learn = windows.ids.to(self._device), windows.learn.to(self._device)
        return Observed(ids, learn, padded("features"), padded("final"), None)

    def _file(self, number: int) -> Path:
        return self._folder / f"{number // 1000:04d}" / f"{number:07d}.safetensors"

    def _read(self, file: Path) -> dict[str, torch.Tensor] | None:
        with suppress(ModelLoadError):  # damaged: it is made again
            if file.is_file():
                verify(file)
                return load_file(file)
        return None

    def _write(self, file: Path, seen: Observed, row: int, length: int) -> None:
        tensors = {"final": seen.final[row, :length].contiguous()}
        if seen.features is not seen.final:
            tensors["features"] = seen.features[row, :length].contiguous()
        with write_cached(file, self._folder, "the cached features") as sink:
            sink.write(as_bytes(tensors)[0])
