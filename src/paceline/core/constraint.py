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

    def permits(self, path: tuple[int, ...], token: int) -> bool:
        """Whether ``allowed`` has this token behind ``path``, in less time."""
        ...

    def forced(self, path: tuple[int, ...] = ()) -> Sequence[int]:
        """Tokens of the one text that may follow ``path``, as the tokenizer writes it; ``allowed``
        has no others then. Empty if there is a choice."""
        ...
