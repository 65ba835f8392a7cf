"""Cells of a chi-square test over token strings: likely strings alone, the others together.

A cell is a likely string, or all other continuations of a likely beginning, or what is left::

    ()  "the" -> "cat" | "dog" | other
        "a"   -> one cell: too rare to be split
        other
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

String = tuple[int, ...]
# Distributions [n, vocab] of the next token after each of n strings.
DistributionOf = Callable[[Sequence[String]], torch.Tensor]


@dataclass(frozen=True)
class Cells:
    """A partition of the strings of ``depth`` tokens.

    ``leaves``: cell of each likely string; ``rest``: of each string that is split, the cell of
    what else may follow it. ``chances``: of each cell, under the distribution that the cells were
    made for.
    """

    depth: int
    leaves: dict[String, int]
    rest: dict[String, int]
    chances: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.chances)

    def cell_of(self, string: String) -> int:
        for length in range(1, self.depth + 1):
            head = string[:length]
            if head in self.leaves:
                return self.leaves[head]
            if head not in self.rest:
                return self.rest[head[:-1]]
        raise AssertionError(f"{string} has fewer than {self.depth} tokens")

    def counts(self, strings: Iterable[String]) -> list[int]:
        counted = Counter(map(self.cell_of, strings))
        return [counted[cell] for cell in range(len(self))]

    def chances_under(self, distribution_of: DistributionOf) -> list[float]:
        """Chances of the same cells under another distribution."""
        split = list(self.rest)
        after = dict(zip(split, distribution_of(split), strict=True))
        reached: dict[String, float] = {(): 1.0}
        left = dict.fromkeys(split, 1.0)
        for string in sorted({*self.leaves, *self.rest} - {()}, key=len):
            head = string[:-1]
            chance = float(after[head][string[-1]])
            reached[string] = reached[head] * chance
            left[head] -= chance
        counts = [0.0] * len(self)
        for string, cell in self.leaves.items():
            counts[cell] += reached[string]
        for string, cell in self.rest.items():
            counts[cell] += reached[string] * max(0.0, left[string])
        return counts


def make_cells(
    distribution_of: DistributionOf, depth: int, least: float, most_splits: int = 64
) -> Cells:
    """Cells of probability ``least`` or more for strings of ``depth`` tokens.

    A string is split if it is twice as likely as that; of each length at most ``most_splits``.
    """
    leaves: dict[String, int] = {}
    chances: list[float] = []
    left_over: dict[String, float] = {}
    frontier: dict[String, float] = {(): 1.0}
    for length in range(1, depth + 1):
        if not frontier:
            break
        following: dict[String, float] = {}
        for (string, chance), distribution in zip(
            frontier.items(), distribution_of(list(frontier)), strict=True
        ):
            weighted = distribution.double() * chance
            likely = (weighted >= least).nonzero().flatten().tolist()
            following.update({(*string, token): float(weighted[token]) for token in likely})
            left_over[string] = max(0.0, chance - float(weighted[likely].sum()))
        splits = sorted(following, key=lambda s: -following[s]) if length < depth else []
        frontier = {s: following[s] for s in splits[:most_splits] if following[s] >= 2 * least}
        for string, chance in following.items():
            if string not in frontier:
                leaves[string] = len(chances)
                chances.append(chance)
    # Cells for the unlikely: one for each beginning, or one together where they are rare.
    rest: dict[String, int] = {}
    for string, chance in left_over.items():
        if chance >= least:
            rest[string] = len(chances)
            chances.append(chance)
    rare = {string: chance for string, chance in left_over.items() if string not in rest}
    together = sum(rare.values())
    if rare and (together >= least or not chances):
        chances.append(0.0)
    cell = len(chances) - 1 if together >= least else chances.index(min(chances))
    if rare:
        chances[cell] += together
    return Cells(depth, leaves, rest | dict.fromkeys(rare, cell), tuple(chances))
