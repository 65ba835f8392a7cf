"""Several drafters in one engine: every request is drafted for by the one it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.core.batch import Commit, ModelOutput, Plan
from paceline.core.tree import TokenTree
from paceline.draft.base import Drafter


class Router:
    """Gives each of ``members`` the part of a plan that asks for it by name.

    Requests that name none get the first. They all share the engine, its steps and its cache; a
    member sees the commits of all requests, for some learn from any text. A request whose drafter
    is not among the members, such as "none", is decoded plainly.
    """

    name = "router"

    def __init__(self, members: Mapping[str, Drafter], device: torch.device | str) -> None:
        self.members = dict(members)
        self.features = tuple(sorted({n for m in self.members.values() for n in m.features}))
        self.reads_logits = any(getattr(m, "reads_logits", True) for m in members.values())
        self._default = next(iter(self.members))
        self._empty = TokenTree.empty(device)

    def max_nodes(self, length: int) -> int:
        return max(member.max_nodes(length) for member in self.members.values())

    def passes(self, length: int) -> int:
        return max(member.passes(length) for member in self.members.values())

    def propose(self, plan: Plan) -> list[TokenTree]:
        trees = [self._empty] * len(plan.slices)
        places: dict[str, list[int]] = {}
        for index, item in enumerate(plan.slices):
            places.setdefault(item.seq.params.drafter or self._default, []).append(index)
        for name, indices in places.items():
            if name in self.members:
                part = Plan(tuple(plan.slices[position] for position in indices))
                for index, tree in zip(indices, self.members[name].propose(part), strict=True):
                    trees[index] = tree
        return trees

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        for member in self.members.values():
            member.observe(commits, out)

    def warm_up(self, batch_size: int) -> None:
        for member in self.members.values():
            member.warm_up(batch_size)

    def forget(self, seq_id: int) -> None:
        for member in self.members.values():
            member.forget(seq_id)
