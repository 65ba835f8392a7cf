"""Cells of a chi-square test over token strings: likely strings alone, the others together.

A cell is a likely string, or all other continuations of a likely beginning, or what is left::

    ()  "the" -> "cat" | "dog" | other
        "a"   -> one cell: too rare to be split
        other
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

String = tuple[int, ...]
# Distributions [n, vocab] of the next token after each of n strings.
DistributionOf = Callable[[Sequence[String]], torch.Tensor]


@dataclass(frozen=True)
class Cells:
    """A partition of the strings of ``depth`` tokens.

    ``leaves``: cell of each likely string; ``children``: the likely next tokens of each string
    that is split; ``rest``: cell of its other next tokens. ``chances``: of each cell, under the
    distribution that the cells were made for.
    """

    depth: int
    leaves: dict[String, int]
    children: dict[String, tuple[int, ...]]
    rest: dict[String, int]
    chances: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.chances)

    def cell_of(self, string: String) -> int:
        for length in range(self.depth):
            head = string[: length + 1]
            if head in self.leaves:
                return self.leaves[head]
            if head not in self.children:
                return self.rest[head[:-1]]
        raise AssertionError(f"{string} has fewer than {self.depth} tokens")

    def counts(self, strings: Iterable[String]) -> list[int]:
        counted = [0] * len(self)
        for string in strings:
            counted[self.cell_of(string)] += 1
        return counted

    def chances_under(self, distribution_of: DistributionOf) -> list[float]:
        """Chances of the same cells under another distribution."""
        split = sorted(self.children, key=len)
        distributions = dict(zip(split, distribution_of(split), strict=True))
        reached: dict[String, float] = {(): 1.0}
        found = [0.0] * len(self)
        for string in split:
            left = 1.0
            for token in self.children[string]:
                chance = float(distributions[string][token])
                left -= chance
                child = (*string, token)
                reached[child] = reached[string] * chance
                if child in self.leaves:
                    found[self.leaves[child]] += reached[child]
            found[self.rest[string]] += reached[string] * max(0.0, left)
        return found


def make_cells(
    distribution_of: DistributionOf, depth: int, least: float, most_splits: int = 64
) -> Cells:
    """Cells of probability ``least`` or more for strings of ``depth`` tokens.

    A string is split if it is twice as likely as that; of each length at most ``most_splits``.
    """
    leaves: dict[String, int] = {}
    children: dict[String, tuple[int, ...]] = {}
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
            own = distribution.double() * chance
            likely = (own >= least).nonzero().flatten().tolist()
            children[string] = tuple(likely)
            following.update({(*string, token): float(own[token]) for token in likely})
            left_over[string] = max(0.0, chance - float(own[likely].sum()))
        splits = sorted(following, key=lambda s: -following[s]) if length < depth else []
        frontier = {s: following[s] for s in splits[:most_splits] if following[s] >= 2 * least}
        for string, chance in following.items():
            if string not in frontier:
                leaves[string] = len(chances)
                chances.append(chance)
    rest, chances = _pool(left_over, chances, least)
    return Cells(depth, leaves, children, rest, tuple(chances))


def _pool(
    left_over: dict[String, float], chances: list[float], least: float
) -> tuple[dict[String, int], list[float]]:
    """Cells for the unlikely: one for each beginning, or one together where they are rare."""
    rest: dict[String, int] = {}
    chances = list(chances)
    for string, chance in left_over.items():
        if chance >= least:
            rest[string] = len(chances)
            chances.append(chance)
    rare = [string for string in left_over if string not in rest]
    together = sum(left_over[string] for string in rare)
    if rare and (together >= least or not chances):
        place = len(chances)
        chances.append(together)
    elif rare:
        place = min(range(len(chances)), key=lambda cell: chances[cell])
        chances[place] += together
    rest.update((string, place) for string in rare)
    return rest, chances
