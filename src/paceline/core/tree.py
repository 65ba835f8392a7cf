"""Token trees: the draft of one sequence as a tree of candidates after the last committed token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

import torch

from paceline.errors import ConfigError


class Draw(Enum):
    """How the children of a node were chosen. Each way has its own lossless acceptance rule."""

    POINT = "point"  # chosen deterministically, or with the seeded request's coupled noise
    IID = "iid"  # sampled from q; a node has at most one child
    WITHOUT_REPLACEMENT = "without_replacement"  # siblings sampled one after another from q


@lru_cache(maxsize=4096)
def depths_of(parents: tuple[int, ...]) -> tuple[int, ...]:
    """The depth of each node; children of the last committed token have depth 1. Raises ConfigError
    if a parent does not come before its child."""
    depths: list[int] = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ConfigError(
                "a tree's parents must come before their children, and are -1 behind the last "
                f"committed token: node {node} has parent {parent}"
            )
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return tuple(depths)


@lru_cache(maxsize=4096)
def is_chain(parents: tuple[int, ...]) -> bool:
    """Whether every node is the only child of the node before it."""
    return parents == tuple(range(-1, len(parents) - 1))


@lru_cache(maxsize=4096)
def children_of(parents: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Children of each node in the order they were drawn; entry 0 belongs to the root (the last
    committed token), entry i + 1 to node i."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        children[parent + 1].append(node)
    return tuple(tuple(nodes) for nodes in children)


@lru_cache(maxsize=4096)
def paths_of(parents: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Nodes on the path from the root: entry 0 is (), entry i + 1 the path to node i, included."""
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(parents):
        paths.append((*paths[parent + 1], node))
    return tuple(paths)


@lru_cache(maxsize=1024)
def ancestor_mask(parents: tuple[int, ...]) -> torch.Tensor:
    """Tree attention mask, bool [n, n]: (i, j) is true if j is node i or one of its ancestors."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def parents_of(ancestors: torch.Tensor) -> tuple[int, ...]:
    """The parent of each node, from an ``ancestor_mask``."""
    numbers = torch.arange(1, len(ancestors) + 1, device=ancestors.device)
    return tuple(((ancestors.tril(-1) * numbers).amax(1) - 1).tolist())


def chain_parents(length: int) -> tuple[int, ...]:
    """The parents of a chain of ``length`` nodes."""
    return tuple(range(-1, length - 1))


@dataclass(frozen=True)
class TokenTree:
    """Candidates in topological order; siblings keep the order in which they were drawn.

    ``tokens`` int64 ``[n]`` may be on the device only, as the host needs the shape alone.
    ``parents[i] < i``; -1 is the last committed token. ``q`` float32 ``[n, vocab]``, needed for
    sampled draws: row i is the draft distribution, after temperature and truncation, that node i
    and its siblings were drawn from, before any of them was drawn. ``wants_choices``: the drafter
    learns from the target's token at every row, so the verifier must compute all of them.
    ``host_copy``: the tokens, if the host has them."""

    tokens: torch.Tensor
    parents: tuple[int, ...]
    draw: Draw = Draw.POINT
    q: torch.Tensor | None = None
    wants_choices: bool = False
    host_copy: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        n, q = len(self.parents), self.q
        if self.tokens.shape != (n,):
            shape = tuple(self.tokens.shape)
            raise ConfigError(f"a tree has one token for each parent: {n} parents, tokens {shape}")
        depths_of(self.parents)
        if self.draw is not Draw.POINT and n:
            if q is None:
                raise ConfigError("a sampled draft needs q, the distribution it was drawn from")
            if q.shape[0] != n or q.dtype != torch.float32:
                held = f"{str(q.dtype).removeprefix('torch.')} {list(q.shape)}"
                raise ConfigError(f"q must be float32 [{n} nodes, vocab]; it is {held}")
        if self.draw is Draw.IID and not is_chain(self.parents):
            raise ConfigError("independent draws (Draw.IID) must be a chain: parents -1, 0, 1 ...")

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depths(self) -> tuple[int, ...]:
        return depths_of(self.parents)

    def host_tokens(self) -> Sequence[int]:
        """The tokens on the host; waits for the device if only the device has them."""
        if self.host_copy is None:
            tokens: list[int] = self.tokens.tolist()
            return tokens
        return self.host_copy

    def on(self, device: torch.device) -> TokenTree:
        """The tree with its tensors on ``device``; itself if they are there."""
        if self.tokens.device == device:
            return self
        q = None if self.q is None else self.q.to(device)
        return replace(self, tokens=self.tokens.to(device), q=q)

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> TokenTree:
        """A tree without candidates, which means plain decoding."""
        return cls(torch.empty(0, dtype=torch.int64, device=device), (), host_copy=())

    @classmethod
    def chain(
        cls, tokens: Sequence[int] | torch.Tensor, device: torch.device | str = "cpu"
    ) -> TokenTree:
        """A chain of deterministically chosen tokens, each the child of the one before."""
        ids = torch.as_tensor(tokens, dtype=torch.int64, device=device)
        return cls(ids, chain_parents(len(ids)))
