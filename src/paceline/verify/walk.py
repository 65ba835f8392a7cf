"""From decisions to the accepted path: plain Python over one small tree."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.tree import children_of


def first_accepted(parents: tuple[int, ...], accepted: Sequence[bool | int]) -> tuple[int, ...]:
    """Down from the root, each time to the first accepted child."""
    children = children_of(parents)
    path: list[int] = []
    row = 0
    while True:
        for child in children[row]:
            if accepted[child]:
                path.append(child)
                row = child + 1
                break
        else:
            return tuple(path)


def last_accepted(parents: tuple[int, ...], accepted: Sequence[bool | int]) -> tuple[int, ...]:
    """Along a chain to the LAST accepted node, past refused ones."""
    for node in range(len(parents) - 1, -1, -1):
        if accepted[node]:
            return tuple(range(node + 1))
    return ()


def matching(
    parents: tuple[int, ...], tokens: Sequence[int], choices: Sequence[int]
) -> tuple[int, ...]:
    """Down from the root while the row's own choice is among its children.

    ``choices[0]`` is the token chosen after the last committed one, ``choices[i + 1]`` after
    node i.
    """
    children = children_of(parents)
    path: list[int] = []
    row = 0
    while True:
        choice = choices[row]
        for child in children[row]:
            if tokens[child] == choice:
                path.append(child)
                row = child + 1
                break
        else:
            return tuple(path)
