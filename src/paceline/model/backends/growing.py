"""Growing whole drafts in one call: what is wanted, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.core.batch import Batch
from paceline.core.params import SamplingParams
from paceline.model.paged.segments import KeyValueStore


@dataclass(frozen=True)
class WantedTree:
    """A tree below a committed token; the cache holds ``base`` rows in front of its nodes.

    The ``width`` likeliest candidates after each expanded node, of which as many of a level are
    expanded; the ``nodes`` likeliest stay. A width of 1 is a chain, which ends behind the first
    token whose path has a probability below ``least``. ``position``: the absolute index of its
    first token, on which a seeded request's noise depends.
    """

    depth: int
    width: int
    nodes: int
    base: int
    table: Sequence[int]  # the sequence's blocks, with room for what is expanded
    params: SamplingParams
    position: int
    least: float = 0.0


@dataclass(frozen=True)
class GrownTree:
    """``tokens`` int64 ``[n]``, and of each node its parent, its number among the expanded ones,
    -1 if it was not, and the log-probability of its path (0 in chains that end nowhere)."""

    tokens: torch.Tensor
    parents: tuple[int, ...]
    slots: tuple[int, ...]
    scores: tuple[float, ...]


class Growth(Protocol):
    """Grows drafts with a model or a head, as draft/trees/grow.py does level by level."""

    def __call__(
        self,
        cache: KeyValueStore,
        wanted: Sequence[WantedTree],
        logits: torch.Tensor,
        ids: torch.Tensor | None = None,
        outputs: torch.Tensor | None = None,
        first: Batch | None = None,
    ) -> list[GrownTree]:
        """From ``logits [trees, columns]`` after the committed tokens, and an EAGLE head's
        ``outputs [trees, hidden]`` there, both of the model's dtype. ``ids`` int64 ``[columns]``,
        ascending: the tokens of the columns, if not their numbers. ``first``: a forward that writes
        the logits in the same call. Raises IndexError where a table has no room for a tree, or
        ``first`` names a token or a position that is out of range."""
        ...
