"""Constrained decoding: which tokens may follow at every node of a draft.

What a constraint forbids has probability zero. Verifier and drafters with distributions apply it
along the tree's paths, so constrained output is lossless, too; other drafters propose some tokens
in vain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Reader(Protocol):
    """Follows a sequence's tokens and knows where it ends: a grammar, or stop strings."""

    def read(self, tokens: Sequence[int]) -> int | None:
        """Follow the next tokens; how many up to the one that ends the text, None if it goes on."""
        ...


class Constraint(Reader, Protocol):
    """A grammar along one sequence (request/grammar.py)."""

    def allowed(self, path: tuple[int, ...]) -> torch.Tensor | None:
        """bool [vocab] on the CPU: tokens that may follow the committed ones and then ``path``.
        None if nothing is forbidden, also after a path that is forbidden or final."""
        ...

    def forced(self) -> Sequence[int]:
        """Tokens of the one text that may follow, as the tokenizer writes it; empty if there is a
        choice. Other tokens may spell the same text, so these are drafted, not committed."""
        ...


class Behind:
    """What a grammar allows behind some tokens."""

    def __init__(self, constraint: Constraint, tokens: Sequence[int]) -> None:
        self._constraint, self._tokens = constraint, tuple(tokens)

    def allowed(self, path: tuple[int, ...]) -> torch.Tensor | None:
        return self._constraint.allowed((*self._tokens, *path))

    def read(self, tokens: Sequence[int]) -> int | None:
        raise AssertionError("these tokens are drafts: nothing is committed behind them")

    def forced(self) -> Sequence[int]:
        return ()
