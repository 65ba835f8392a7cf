"""Candidate continuations that begin alike share nodes: from lists of tokens to one tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def merge(
    candidates: Iterable[Sequence[int]],
    max_nodes: int | None = None,
    max_branch: int | None = None,
) -> tuple[list[int], tuple[int, ...]]:
    """Tokens and parents of the trie over ``candidates``, in the order they were added.

    Earlier candidates come first: they keep all their nodes, and a node's children stand in the
    order of the first candidate that went there. The trie ends with its ``max_nodes``-th node.
    Every candidate but the first is cut after ``max_branch`` nodes of its own: a hedge close to
    where it leaves the others. Parents are topologically ordered, -1 is the root, so the result
    is what a TokenTree with POINT draw takes. Candidates may be empty, equal, or beginnings of
    one another.
    """
    tokens: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    for number, candidate in enumerate(candidates):
        node, before = -1, len(tokens)
        for token in candidate:
            child = children.get((node, token))
            if child is None:
                if max_nodes is not None and len(tokens) >= max_nodes:
                    return tokens, tuple(parents)
                if number and max_branch is not None and len(tokens) - before >= max_branch:
                    break
                child = children[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = child
    return tokens, tuple(parents)
