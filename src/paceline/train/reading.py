"""The features and logits of a frozen target. The engine's kernels compute them several times as
fast as the module of transformers; they can be cached on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from paceline.core.batch import Span
from paceline.errors import UnsupportedModelError
from paceline.model.paged.cache import PagedCache
from paceline.model.target import CausalModel
from paceline.train.data import Windows, load_cached, store_cached

_BLOCK = 16  # tokens per cache block
_GROUP = 64  # values of a cached feature that share a scale, if the width is a multiple


@dataclass(frozen=True)
class TargetOutputs:
    """The outputs of the target for token ids ``[B, W]``. ``loss_mask`` bool ``[B, W]``: the tokens
    that a head learns to draft. ``features`` ``[B, W, layers * hidden]``: the inputs of the feature
    layers, concatenated. ``final`` ``[B, W, hidden]``: the output of the final norm. ``logits``
    ``[B, W, vocab]``, or None if they are the product of the lm_head with ``final`` and are
    computed for the rows that need them."""

    ids: torch.Tensor
    loss_mask: torch.Tensor
    features: torch.Tensor
    final: torch.Tensor
    logits: torch.Tensor | None


class NativeReader:
    """Computes hidden states of a frozen target with the kernels, on a packed copy of weights."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._cache: PagedCache | None = None

    @classmethod
    def of(cls, target: Any, name: str) -> NativeReader | None:
        """A reader for a module of transformers; None if the native kernels cannot run it."""
        try:
            model = CausalModel.from_module(target, name)
        except UnsupportedModelError:  # the engine cannot decode it, but training works
            return None
        return None if model.backend.runs_torch else cls(model)

    @torch.no_grad()
    def read(
        self, ids: torch.Tensor, lengths: Sequence[int], layers: Sequence[int]
    ) -> list[torch.Tensor]:
        """The inputs of ``layers`` (their number: the final norm's output) for ``ids`` int64 ``[B,
        W]`` of the given lengths, each ``[B, W, hidden]`` with zeros as padding."""
        blocks, spans = -(-ids.numel() // _BLOCK) + len(ids), []
        if self._cache is None or blocks > self._cache.num_blocks:
            self._cache = self._model.new_cache(blocks, _BLOCK, share=False)
        cache = self._cache
        for number, (window, length) in enumerate(zip(ids.tolist(), lengths, strict=True)):
            cache.admit(number, [], share=False)
            cache.reserve(number, length)
            spans.append(Span.of(number, 0, window[:length], wants_logits=False))
        try:
            result = self._model(cache.batch_of(spans, sorted(set(layers))), cache).features
        finally:
            for span in spans:
                cache.free(span.seq_id)
        split = [list(torch.split(result[layer], list(lengths))) for layer in layers]
        return [pad_sequence(rows, batch_first=True) for rows in split]


@dataclass(frozen=True)
class FeatureCache:
    """Caches the target's outputs for pieces of text on disk. Each piece has a file in ``folder``,
    whose name is a hash of its token ids and the ``origin`` (target and feature layers), so several
    runs can share the folder, of different precision too: it returns values in ``dtype``.

    Instead of logits the final hidden states (width ``hidden``) are stored, from which the lm_head
    computes them again. All values are rounded to 8 bits, with a scale for every 64 values. A piece
    of 256 tokens of a model of width 4096 takes 4.3 MB with three feature layers."""

    folder: Path
    run_target: Callable[..., TargetOutputs]
    device: torch.device
    hidden: int
    origin: str = ""
    dtype: torch.dtype = torch.float32

    @torch.no_grad()
    def get(self, windows: Windows) -> TargetOutputs:
        """The target's outputs for a batch; sequences that are not cached are computed first."""
        pieces = [row[:length] for row, length in zip(windows.ids, windows.lengths, strict=True)]
        stored = [load_cached(self._file(piece)) for piece in pieces]
        kept = {
            row: _decoded(**parts)
            for row, parts in enumerate(stored)
            if parts is not None and _is_whole(parts, windows.lengths[row])
        }
        missing = [row for row in range(len(pieces)) if row not in kept]
        if missing:
            lengths = tuple(windows.lengths[row] for row in missing)
            target_out = self.run_target(windows.ids[missing], windows.loss_mask[missing], lengths)
            parts = [target_out.final]
            if target_out.features is not target_out.final:
                parts.insert(0, target_out.features)
            for row, values, length in zip(missing, torch.cat(parts, -1), lengths, strict=True):
                kept[row] = self._write(self._file(pieces[row]), values[:length])
        rows = [kept[row].to(self.dtype) for row in range(len(pieces))]
        values = pad_sequence(rows, batch_first=True).to(self.device)
        final = values[..., -self.hidden :]
        features = values[..., : -self.hidden] if values.shape[-1] > self.hidden else final
        ids, loss_mask = windows.ids.to(self.device), windows.loss_mask.to(self.device)
        return TargetOutputs(ids, loss_mask, features, final, None)

    def _file(self, ids: torch.Tensor) -> Path:
        content = self.origin.encode() + ids.numpy().tobytes()
        name = hashlib.blake2b(content, digest_size=12).hexdigest()
        return self.folder / name[:2] / f"{name}.safetensors"

    def _write(self, file: Path, values: torch.Tensor) -> torch.Tensor:
        """Store values ``[tokens, width]``; returns them rounded."""
        groups = values.reshape(len(values), -1, gcd(_GROUP, values.shape[-1])).float()
        scales = (groups.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-12).to(values.dtype)
        kept = {"codes": (groups / scales).round_().clamp_(-127, 127).to(torch.int8)}
        kept["scales"] = scales
        store_cached(file, "the cached features", kept)
        return _decoded(**kept)


def _decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (codes * scales).flatten(-2)


def _is_whole(parts: Mapping[str, torch.Tensor], tokens: int) -> bool:
    """Whether a file holds codes and scales of so many tokens; a damaged one is written again."""
    codes, scales = parts.get("codes"), parts.get("scales")
    if codes is None or scales is None or len(parts) != 2:
        return False
    shapes = codes.ndim == 3 and scales.shape == (tokens, codes.shape[1], 1)
    return shapes and len(codes) == tokens and not codes.is_floating_point()
