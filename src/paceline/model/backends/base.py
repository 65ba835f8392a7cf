"""What backends are: ways to run a forward over the paged cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import nn

from paceline.core.batch import Batch, ModelOutput
from paceline.model.paged.pieces import KeyValueStore

NATIVE, REFERENCE = "native", "reference"
BACKENDS = ("auto", NATIVE, REFERENCE)


class Backend(Protocol):
    """Runs a model's whole forward over a packed batch, in place of its modules."""

    name: str

    def __call__(
        self,
        batch: Batch,
        cache: KeyValueStore,
        features: Sequence[int] = (),
        logits: bool = True,
    ) -> ModelOutput:
        """As CausalModel: keys and values go into the cache, ``features`` are known to exist."""
        ...

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., vocab]`` of final-norm outputs ``[..., hidden]``."""
        ...

    def scratch_bytes(self, rows: int) -> int:
        """Memory of a forward over so many rows, beside weights and cache."""
        ...

    def without(self, skipped: frozenset[int]) -> Backend:
        """The same with some layers left out; the others keep their numbers, so their cache."""
        ...


class Ranks(Protocol):
    """The processes that share a model's weights, as the one that decodes knows them."""

    size: int

    def whole(self, side: Literal["input", "output"]) -> nn.Module:
        """The embedding of the tokens or the language-model head, whole, on this process's
        device."""
        ...

    def free_memory(self) -> int:
        """Bytes that every rank has free."""
        ...

    def when_lost(self, told: Callable[[str], None]) -> None:
        """Call ``told`` once, on any thread, with the reason why the model cannot run any more."""
        ...

    def close(self) -> None:
        """End the other processes."""
        ...


class Attend(Protocol):
    """What the layers of `reference` call: stores the rows' keys and values, and attends."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        layer: int,
        scaling: float,
    ) -> torch.Tensor:
        """``query [1, heads, T, d]``, ``key`` and ``value`` ``[1, kv_heads, T, d]``, after rotary
        embedding, to ``[1, T, heads, d]``."""
        ...
