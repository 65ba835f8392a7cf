"""What a frozen target says about windows of text: read through the engine's own kernels, several
times as fast as through the module, and kept on disk where that is asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence

from paceline.core.batch import Span
from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.files import write_cached
from paceline.model.paged.cache import PagedCache
from paceline.model.target import CausalModel
from paceline.model.tensorfile import as_bytes, verify
from paceline.train.data import Windows

_BLOCK = 16  # tokens of a cache block
_GROUP = 64  # values of a kept feature that share a scale, if the width divides


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
    """Hidden states of a frozen target, by the kernels that decode with a packed copy of it."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._cache: PagedCache | None = None
        self._tokens = 0

    @classmethod
    def of(cls, target: Any, name: str) -> NativeReader | None:
        """Of a module of transformers; None where the kernels do not run it."""
        try:
            model = CausalModel.around(target, name)
        except UnsupportedModelError:  # it can be trained for, if not be decoded with
            return None
        return None if model.backend.runs_torch else cls(model)

    @torch.no_grad()
    def read(
        self, ids: torch.Tensor, lengths: Sequence[int], layers: Sequence[int]
    ) -> list[torch.Tensor]:
        """The inputs of ``layers`` for windows ``ids`` int64 ``[B, W]``, of which ``lengths`` are
        read, each ``[B, W, hidden]``, zeros at the end; the number of layers: the final norm's."""
        cache = self._room(ids.numel() + len(ids) * _BLOCK)
        spans = []
        for number, (window, length) in enumerate(zip(ids.tolist(), lengths, strict=True)):
            cache.admit(number, [], share=False)
            cache.reserve(number, length)
            spans.append(Span.of(number, 0, window[:length], wants_logits=False))
        try:
            result = self._model(cache.batch_of(spans, sorted(set(layers))), cache).features
        finally:
            for span in spans:
                cache.free(span.seq_id)
        kept = [list(torch.split(result[layer], list(lengths))) for layer in layers]
        return [pad_sequence(rows, batch_first=True) for rows in kept]

    def _room(self, tokens: int) -> PagedCache:
        if self._cache is None or tokens > self._tokens:
            self._tokens = tokens
            self._cache = self._model.new_cache(-(-tokens // _BLOCK), _BLOCK, share=False)
        return self._cache


@dataclass(frozen=True)
class FeatureCache:
    """What the target says about pieces of text, under ``folder`` in one file each, by the piece's
    ids and its ``origin`` (target and layers): several runs can share it.

    Of the logits only the last hidden states (width ``hidden``) are kept: the target's head makes
    them again. All are rounded to 8 bits, a scale for each run of at most 64 values. A piece of 256
    tokens of a model of width 4096 takes 4.3 MB with three feature layers.
    """

    folder: Path
    observe: Callable[[Windows], Observed]
    device: torch.device
    hidden: int
    origin: str = ""

    @torch.no_grad()
    def look(self, windows: Windows) -> Observed:
        """What the target says about the windows; those that are not kept yet are read first."""
        pieces = [row[:length] for row, length in zip(windows.ids, windows.lengths, strict=True)]
        kept = {row: self._read(self._file(piece)) for row, piece in enumerate(pieces)}
        missing = [row for row, values in kept.items() if values is None]
        if missing:
            lengths = tuple(windows.lengths[row] for row in missing)
            seen = self.observe(Windows(windows.ids[missing], windows.learn[missing], lengths))
            parts = (seen.final,) if seen.features is seen.final else (seen.features, seen.final)
            for row, values, length in zip(missing, torch.cat(parts, -1), lengths, strict=True):
                kept[row] = self._write(self._file(pieces[row]), values[:length])
        rows = [values for values in kept.values() if values is not None]
        values = pad_sequence(rows, batch_first=True).to(self.device)
        final = values[..., -self.hidden :]
        features = values[..., : -self.hidden] if values.shape[-1] > self.hidden else final
        ids, learn = windows.ids.to(self.device), windows.learn.to(self.device)
        return Observed(ids, learn, features, final, None)

    def _file(self, ids: torch.Tensor) -> Path:
        content = self.origin.encode() + ids.numpy().tobytes()
        name = hashlib.blake2b(content, digest_size=12).hexdigest()
        return self.folder / name[:2] / f"{name}.safetensors"

    def _read(self, file: Path) -> torch.Tensor | None:
        with suppress(ModelLoadError):  # damaged: it is made again
            if file.is_file():
                verify(file)
                return _decoded(**load_file(file))
        return None

    def _write(self, file: Path, values: torch.Tensor) -> torch.Tensor:
        """Keep ``[tokens, width]``; returns it rounded, as it is read again."""
        groups = values.reshape(len(values), -1, gcd(_GROUP, values.shape[-1])).float()
        scales = (groups.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-12).to(values.dtype)
        kept = {"codes": (groups / scales).round_().clamp_(-127, 127).to(torch.int8)}
        kept["scales"] = scales
        with write_cached(file, self.folder, "the cached features") as sink:
            sink.write(as_bytes(kept)[0])
        return _decoded(**kept)


def _decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (codes * scales).flatten(-2)
