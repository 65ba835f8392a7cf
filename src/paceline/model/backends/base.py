"""The one protocol that every forward goes through.

    forward(batch, cache) -> logits, features        keys and values go into the cache
    head(hidden) -> logits                            the language-model head alone
    without(layers) -> a backend                      a view that leaves layers out
    growth -> trees                                   whole drafts in one call, if it can
    eagle(head), medusa(heads) -> their steps         heads on the target's features
    quantised(model, precision) -> modules, backend   the same model in fewer bits

What a backend does not do itself, torch's own modules do: the defaults here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import nn

from paceline.core.batch import Batch, ModelOutput
from paceline.files.stamps import FileStamp
from paceline.model.backends.growing import Growth
from paceline.model.backends.heads import DraftingHeads, EagleStep, ModuleEagle
from paceline.model.paged.cache import LayerShape
from paceline.model.paged.masks import Pattern
from paceline.model.paged.segments import KeyValueStore

NATIVE, REFERENCE = "native", "reference"


class Adapted(Protocol):
    """A model as ``CausalModel`` adapts it: what backends read of it. ``hf`` is the module of
    transformers, whose attention goes through our paged cache; ``cache_shapes`` and ``patterns``
    (windows, chunks) are by layer; ``checkpoint``: the files that it was loaded from."""

    hf: Any
    name: str
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    num_layers: int
    max_positions: int
    checkpoint: tuple[FileStamp, ...]

    @property
    def cache_shapes(self) -> list[LayerShape]: ...

    @property
    def patterns(self) -> tuple[Pattern, ...]: ...

    def __call__(self, batch: Batch, cache: KeyValueStore) -> ModelOutput: ...

    def embedding(self, side: Literal["input", "output"]) -> Any: ...


class Backend(ABC):
    """Runs a model's forward over a packed batch."""

    name: str
    runs_torch = True  # forwards run operators of torch
    same_bits = False  # a row's results depend on that row alone, whatever rides along
    runs_quantised = False  # weights in 8 and 4 bits are multiplied as they are, not unpacked
    head_share = 0.0  # of the bytes of all matrices, the language-model head's

    @property
    def description(self) -> str:
        """The name, and what it computes with."""
        return self.name

    @abstractmethod
    def __call__(
        self,
        batch: Batch,
        cache: KeyValueStore,
        features: Sequence[int] = (),
        logits: bool = True,
    ) -> ModelOutput:
        """One forward: ``logits [R, vocab]`` of ``batch.logit_rows``, keys and values of all rows
        into ``batch.slots`` of the cache, and the ``features``, which are known to exist. Without
        ``logits`` a backend that chooses greedily by itself leaves them out."""

    @abstractmethod
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., vocab]`` of final-norm outputs ``[..., hidden]``."""

    @abstractmethod
    def without(self, skipped: frozenset[int]) -> Backend:
        """The same with some layers left out; the others keep their numbers, so their cache.
        Raises ConfigError or UnsupportedModelError where that cannot be."""

    def scratch_bytes(self, rows: int) -> int:
        """Memory of a forward over so many rows, beside weights, cache and torch's own."""
        return 0

    @property
    def growth(self) -> Growth | None:
        """Grows whole drafts with this model; None: drafters do, by a forward a level."""
        return None

    def eagle(self, head: Any, model: Adapted) -> EagleStep:
        """A step of an EAGLE ``head`` on features of ``model``; may lay out its weights anew."""
        return ModuleEagle(head, head.embed_tokens or model.embedding("input"))

    def medusa(self, heads: Any) -> DraftingHeads:
        """All Medusa ``heads`` in one call; may lay out their weights anew."""

        def run(features: torch.Tensor, count: int) -> torch.Tensor:
            return torch.stack(
                [heads.logits(head, features, self.head) for head in range(count)], 1
            )

        return run

    def quantised(self, model: Adapted, precision: str) -> tuple[Any, Backend] | None:
        """Modules that share all of ``model`` but its matrices, which are in ``precision``, and
        what runs them. None: the library's modules are rounded, and given to this backend."""
        return None


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

    def when_lost(self, callback: Callable[[str], None]) -> None:
        """Call once, on any thread, with the reason why the model cannot run any more."""
        ...

    def close(self) -> None:
        """End the other processes."""
        ...
