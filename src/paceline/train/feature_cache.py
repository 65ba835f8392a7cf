"""An optional cache on disk of what the target says about a fixed set of training windows.

A run over a small set of windows meets each of them many times; the target's forward is then done
once for each. Of the logits only the last hidden states are kept: the target's own head makes
them again. A window of 256 tokens of a model of width 4096 takes 8 MB with three feature layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from paceline.errors import ConfigError, ModelLoadError
from paceline.files import replace_files, telling
from paceline.model.tensorfile import as_bytes, verify
from paceline.train.observed import Observed


class FeatureCache:
    """Windows by number under ``folder``, one file each, written when first seen."""

    def __init__(
        self,
        folder: Path,
        observe: Callable[[torch.Tensor], Observed],
        embedding: nn.Module,
        head: nn.Module,
    ) -> None:
        self._folder = folder
        self._observe = observe
        self._embedding = embedding
        self._head = head
        with telling("the cached features", folder):
            folder.mkdir(parents=True, exist_ok=True)

    @torch.no_grad()
    def look(self, ids: torch.Tensor, numbers: Sequence[int]) -> Observed:
        """What the target says about the windows ``ids [B, W]``, which have these numbers."""
        parts = [self._window(number, ids[row : row + 1]) for row, number in enumerate(numbers)]
        final = torch.cat([part["final"] for part in parts])
        # Heads that read nothing but the final hidden states have no features of their own.
        features = torch.cat([part.get("features", part["final"]) for part in parts])
        return Observed(ids, self._embedding(ids), features, self._head(final), final)

    def _window(self, number: int, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        file = self._folder / f"{number:07d}.safetensors"
        if file.is_file():
            with suppress(ModelLoadError):  # damaged: it is made again
                verify(file)
                return load_file(file, device=str(ids.device))
        seen = self._observe(ids)
        self._check(seen)
        tensors = {"final": seen.final.contiguous()}
        if not torch.equal(seen.features, seen.final):
            tensors["features"] = seen.features.contiguous()
        replace_files({file: as_bytes(tensors)[0]}, "the cached features", durable=False)
        return tensors

    def _check(self, seen: Observed) -> None:
        again = self._head(seen.final).float()
        wanted = seen.logits.float()
        if not torch.allclose(again, wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max())):
            raise ConfigError(
                "the logits of this target are more than its head's product (scaled or capped), "
                "so they cannot be made again from cached features; train without --cache-windows"
            )
