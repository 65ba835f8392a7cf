"""Chains along a grammar: text that it forces is taken in without passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.core.adapter import Adapter
from paceline.core.batch import Slice, Span
from paceline.core.draws import draw_of
from paceline.core.transfer import to_device
from paceline.core.tree import Draw, TokenTree, chain_parents
from paceline.draft.trees.grow import Growing
from paceline.model.backends.base import GrownTree


class GrammarChain(Growing):
    """A chain along a request's grammar. What that forces needs no pass of its own: it is run with
    the token before it."""

    samples = True

    def __init__(self, item: Slice, length: int, device: torch.device, base: int = 0) -> None:
        super().__init__(item, 1, device, base)
        self._length, self._draw = length, draw_of(item.seq)
        self._path: list[int] = []
        self._run = 0  # tokens of the path that the drafter has run
        self._probs: list[torch.Tensor] = []  # of a sampled chain: of each drawn token
        self._drawn: list[int] = []  # where these stand
        self._force(length - 1)

    def _force(self, most: int) -> None:
        constraint = self.item.seq.constraint
        assert constraint is not None
        left = most - len(self._path)
        self._path += constraint.forced(tuple(self._path))[:left] if left > 0 else ()

    @property
    def rows(self) -> int:
        return 1

    @property
    def depth(self) -> int:
        return len(self._path)

    def first(self, span: Span) -> Span:
        tokens = [*span.tokens, *self._path]
        self._run = len(self._path)
        return Span.of(span.seq_id, span.context, tokens, adapter=span.adapter)

    def newest(self, nodes: torch.Tensor | None = None, adapter: Adapter | None = None) -> Span:
        begin, self._run = self._run, len(self._path)
        tokens = self._path[begin:]
        return Span.of(self.item.seq.seq_id, self.base + begin, tokens, adapter=adapter)

    def path_of_rows(self) -> torch.Tensor:
        return to_device([self._path], self.fresh.device)

    def extend(self, tokens: torch.Tensor, weights: torch.Tensor | None) -> bool:
        if self._draw is not Draw.POINT:
            assert weights is not None
            self._probs.append(weights)
            self._drawn.append(len(self._path))
        self._path.append(int(tokens[0, 0]))  # a grammar is followed on the host
        self._force(self._length)
        return len(self._path) < self._length

    def finish(self, chosen: Sequence[int]) -> GrownTree:
        tokens, q = to_device(self._path, self.fresh.device), None
        if self._probs:
            drawn = torch.cat(self._probs)
            q = torch.nn.functional.one_hot(tokens, drawn.shape[1]).to(drawn.dtype)
            q[to_device(self._drawn, q.device)] = drawn
        parents, slots = chain_parents(len(tokens)), range(len(tokens))
        tree = TokenTree(tokens, parents, self._draw, q, known=tuple(self._path))
        return GrownTree(tree, tuple(slot if slot < self._run else -1 for slot in slots))
