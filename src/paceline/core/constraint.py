"""Constrained decoding: which tokens a request may take next, at every node of a draft.

A constraint is part of a request's distribution, like a penalty: what it forbids has probability
zero. The verifier and every drafter that has a distribution apply it along the tree's paths, so
constrained output is as lossless as any other; a drafter that knows nothing of it merely proposes
some tokens in vain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from paceline.core.transfer import to_device, upload


class Reader(Protocol):
    """Follows one sequence's tokens and knows where it ends: a grammar, or stop strings."""

    def read(self, tokens: Sequence[int]) -> int | None:
        """Follow the next tokens, up to the one after which none can follow. How many those are, or
        None if it goes on behind all of them."""
        ...


class Constraint(Reader, Protocol):
    """A grammar along one sequence; see request/grammar.py for the one."""

    def allowed(self, path: tuple[int, ...]) -> torch.Tensor | None:
        """bool [vocab] on the CPU: tokens that may follow the committed ones and then ``path``.
        None where nothing is forbidden, also behind a path that is itself forbidden or final: no
        text leads there."""
        ...


def forbid(
    scores: torch.Tensor,
    constraints: Sequence[Constraint | None],
    depths: Sequence[int],
    paths: torch.Tensor | None,
    known: Sequence[Sequence[int]] | None = None,
) -> torch.Tensor:
    """float32 ``[R, V]``: minus infinity where the constraint of a row forbids the token. ``paths``
    int64 ``[R, D]``, of which row r knows ``depths[r]`` entries. A grammar is walked on the host:
    where the paths are not ``known`` there, this waits for the device."""
    host = known
    if host is None:
        host = paths.tolist() if paths is not None else [[]] * len(constraints)
    rows: list[int] = []
    masks: list[torch.Tensor] = []
    for row, (constraint, depth) in enumerate(zip(constraints, depths, strict=True)):
        allowed = None if constraint is None else constraint.allowed(tuple(host[row][:depth]))
        if allowed is not None:
            rows.append(row)
            # Padding of the logits beyond the vocabulary is forbidden, too.
            masks.append(torch.nn.functional.pad(allowed, (0, scores.shape[1] - len(allowed))))
    if not rows:
        return scores
    forbidden = ~upload(torch.stack(masks), scores.device)
    if len(rows) == len(scores):
        return scores.masked_fill(forbidden, -torch.inf)
    index = to_device(rows, scores.device)
    constrained = scores.index_select(0, index).masked_fill(forbidden, -torch.inf)
    return scores.index_copy(0, index, constrained)
