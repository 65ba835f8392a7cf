"""Several drafters for one sequence: in each step the member drafts that was chosen for it.

Who that is says the plan (``Slice.drafter``); a controller chooses by what each member is expected
to gain (control/adaptive.py). A plan that names nobody, as with a fixed draft length, takes the
first member that has anything to propose.

Losslessness: the choice falls before a member draws. Lookups may be looked at before, because what
they find is found without chance (POINT). A tree that was sampled is never dropped for what was
drawn.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from paceline.core.batch import Commit, ModelOutput, Plan
from paceline.core.tree import TokenTree
from paceline.draft.base import Drafter
from paceline.draft.spec import DraftSpec, Loading, NoDraft, Prepared
from paceline.errors import ConfigError


@dataclass(frozen=True, init=False)
class Hybrid(DraftSpec):
    """Drafters that take turns, as in ``Hybrid(NGram(min=2), Eagle3(path))``; in a spec they are
    joined by ``+``. The order decides between equals."""

    kind = "hybrid"
    page = "hybrid.md"
    default_draft_length = 8
    examples = (
        "hybrid:ngram:max=3+model:{draft}",
        "hybrid:suffix+ngram+medusa:{medusa}+eagle3:{eagle3}+tree:{draft}",
    )

    parts: tuple[DraftSpec, ...]

    def __init__(self, *parts: DraftSpec) -> None:
        if not parts or any(isinstance(part, (NoDraft, Hybrid)) for part in parts):
            raise ConfigError("draft 'hybrid': join drafters that propose something by themselves")
        object.__setattr__(self, "parts", parts)

    def members(self) -> tuple[DraftSpec, ...]:
        return self.parts

    def prepare(self, loading: Loading) -> Prepared:
        members = [part.prepare(loading) for part in self.parts]
        return Prepared(
            lambda context: HybridDrafter(
                [m.build(context) for m in members], context.cache.device
            ),
            sum(member.cache_bytes for member in members),
            feature_bytes=sum(member.feature_bytes for member in members),
        )

    def variants(self) -> dict[str, Hybrid]:
        return {"": self}

    @classmethod
    def read(cls, rest: str, kinds: Mapping[str, type[DraftSpec]]) -> Hybrid:
        """A ``+`` parts members only before a known kind, so that paths may contain it."""
        usable = [kind for kind in kinds if kind not in (NoDraft.kind, cls.kind)]
        parts = re.split(rf"\+(?=(?:{'|'.join(map(re.escape, usable))})(?:[:+]|$))", rest)
        for part in parts:
            if part.partition(":")[0] not in usable:
                raise ConfigError(
                    f"draft 'hybrid': member {part!r} begins with no known kind; join members "
                    f"with +, as in hybrid:ngram+model:PATH (kinds: {', '.join(usable)})"
                )
        words = (part.partition(":") for part in parts)
        return cls(*(kinds[kind].read(word, kinds) for kind, _, word in words))

    def argument(self) -> str:
        return "+".join(map(str, self.parts))


class HybridDrafter:
    """Hands each slice to one of ``members``; all of them see every prompt and every commit.

    ``names`` are those by which a plan calls the members; by default their own.
    """

    name = "hybrid"

    def __init__(self, members: Sequence[Drafter], device: torch.device | str) -> None:
        self.members = tuple(members)
        self.names: tuple[Hashable, ...] = tuple(member.name for member in members)
        self.features = tuple(sorted({layer for m in members for layer in m.features}))
        self.reads_logits = any(getattr(m, "reads_logits", True) for m in members)
        self._empty = TokenTree.empty(device)
        self._known: set[int] = set()

    def max_nodes(self, length: int) -> int:
        return max(member.max_nodes(length) for member in self.members)

    def passes(self, length: int) -> int:
        return max(member.passes(length) for member in self.members)

    def propose(self, plan: Plan) -> list[TokenTree]:
        trees = [self._empty] * len(plan.slices)
        if self._idle(plan):
            return trees
        for index, member in enumerate(self.members):
            name = self.names[index]
            items = tuple(
                item
                if item.drafter == name or (item.drafter is None and not len(tree))
                else replace(item, draft_length=0)
                for item, tree in zip(plan.slices, trees, strict=True)
            )
            for number, tree in enumerate(member.propose(Plan(items))):
                if len(tree):
                    trees[number] = tree
        return trees

    def _idle(self, plan: Plan) -> bool:
        """Nothing is asked for, no prompt is to be followed, and all members know everybody."""
        ids = {item.seq.seq_id for item in plan.slices}
        known = ids <= self._known
        self._known |= ids
        return known and not any(item.draft_length or not item.decodes for item in plan.slices)

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        for member in self.members:
            member.observe(commits, out)

    def warm_up(self, batch_size: int) -> None:
        for member in self.members:
            member.warm_up(batch_size)

    def forget(self, seq_id: int) -> None:
        for member in self.members:
            member.forget(seq_id)
        self._known.discard(seq_id)
