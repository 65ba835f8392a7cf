"""Drafters that combine others. The members of a hybrid take turns; of a router, requests name one.

In a hybrid the controller chooses the member that drafts, ``Slice.drafter``. Without its choice, as
with a fixed draft length, the first member with a non-empty proposal drafts. To stay lossless, the
choice comes before a member samples: it depends only on offers of lookups, which are deterministic
(POINT). A sampled tree is never dropped because of its tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from paceline.core.batch import Commit, ModelOutput, Plan
from paceline.core.tree import TokenTree
from paceline.draft.base import (
    Drafter,
    DrafterTraits,
    can_extend_forced,
    forced_tokens,
    with_members,
)
from paceline.draft.spec import DraftSpec, LoadContext, NoDraft, PreparedDraft
from paceline.errors import ConfigError


@dataclass(frozen=True, init=False)
class Hybrid(DraftSpec):
    """Drafters that take turns: ``Hybrid(NGram(min=2), Eagle3(path))``, in a spec joined by ``+``.
    Of members that are equally good the first one drafts."""

    kind = "hybrid"
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

    def prepare(self, loading: LoadContext) -> PreparedDraft:
        return joined([part.prepare(loading) for part in self.parts], HybridDrafter)

    @classmethod
    def read(cls, rest: str, kinds: Mapping[str, type[DraftSpec]]) -> Hybrid:
        """A ``+`` separates members only if a known kind follows: paths may contain one, too."""
        usable = [kind for kind in kinds if kind not in (NoDraft.kind, cls.kind)]
        parts = re.split(rf"\+(?=(?:{'|'.join(map(re.escape, usable))})(?:[:+]|$))", rest)
        for part in parts:
            if part.partition(":")[0] not in usable:
                unknown = next(w for w in part.split("+") if w.partition(":")[0] not in usable)
                raise ConfigError(
                    f"draft 'hybrid': member {unknown!r} begins with no known kind; join members "
                    f"with +, as in hybrid:ngram+model:PATH (kinds: {', '.join(usable)})"
                )
        words = (part.partition(":") for part in parts)
        return cls(*(kinds[kind].read(word, kinds) for kind, _, word in words))

    def argument(self) -> str:
        return "+".join(map(str, self.parts))


def joined(
    members: Sequence[PreparedDraft], make: Callable[[list[Drafter], torch.device], Drafter]
) -> PreparedDraft:
    """Several prepared drafters as one, which ``make`` builds from the built members."""
    return PreparedDraft(
        lambda context: make([m.build(context) for m in members], context.cache.device),
        sum(member.cache_bytes for member in members),
        feature_bytes=sum(member.feature_bytes for member in members),
        notes=tuple(note for member in members for note in member.notes),
        state_bytes=sum(member.state_bytes for member in members),
    )


class _Joined:
    """Several drafters as one. All members observe every commit, because some learn from any text.
    ``names``: the members' names in plans or requests."""

    name: str

    def __init__(
        self, members: Sequence[Drafter], names: Sequence[Hashable], device: torch.device | str
    ) -> None:
        self.members, self.names = tuple(members), tuple(names)
        self.features = tuple(sorted({layer for m in members for layer in m.features}))
        self.reads_logits = any(DrafterTraits.of(member).reads_logits for member in members)
        self._empty = TokenTree.empty(device)

    def max_nodes(self, length: int) -> int:
        return max(member.max_nodes(length) for member in self.members)

    def passes(self, length: int) -> int:
        return max(member.passes(length) for member in self.members)

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        for member in self.members:
            member.observe(commits, out)

    def warm_up(self, batch_size: int) -> None:
        for member in self.members:
            member.warm_up(batch_size)

    def forget(self, seq_id: int) -> None:
        for member in self.members:
            member.forget(seq_id)


class HybridDrafter(_Joined):
    """Lets one member draft for each slice. All members see the steps with a new sequence or a
    prompt; in others, members without a slice to draft for are skipped: each gets draft length 0
    where another one drafts. Where a grammar forces text, only members that can extend it are
    asked."""

    name = "hybrid"

    def __init__(self, members: Sequence[Drafter], device: torch.device | str) -> None:
        super().__init__(members, [member.name for member in members], device)
        self.max_forced_tokens = max(DrafterTraits.of(m).max_forced_tokens for m in members)
        self.drafted: dict[int, Hashable] = {}  # the member that drafted last, by sequence
        self._known: set[int] = set()

    def propose(self, plan: Plan) -> list[TokenTree]:
        trees = [self._empty] * len(plan.slices)
        ids = {item.seq.seq_id for item in plan.slices}
        seen_by_all = not ids <= self._known or not all(item.decodes for item in plan.slices)
        if not seen_by_all and not any(item.draft_length for item in plan.slices):
            return trees
        self._known |= ids
        forced = [forced_tokens(item) for item in plan.slices]
        for name, member in zip(self.names, self.members, strict=True):
            items = []
            for item, tree, run in zip(plan.slices, trees, forced, strict=True):
                available = not len(tree) and can_extend_forced(member, run, item)
                drafts = item.drafter == name or (item.drafter is None and available)
                asked = item if drafts or not item.draft_length else replace(item, draft_length=0)
                items.append(asked)
            if seen_by_all or any(item.draft_length for item in items):
                for number, tree in enumerate(member.propose(Plan(tuple(items)))):
                    if len(tree):
                        trees[number] = tree
                        self.drafted[items[number].seq.seq_id] = name
        return trees

    def forget(self, seq_id: int) -> None:
        super().forget(seq_id)
        self._known.discard(seq_id)
        self.drafted.pop(seq_id, None)


def member_that_drafted(drafter: Drafter, seq_id: int) -> Hashable:
    """The member of a hybrid that drafted last for a sequence; None if no hybrid did."""
    hybrids = (part for part in with_members(drafter) if isinstance(part, HybridDrafter))
    return next((part.drafted[seq_id] for part in hybrids if seq_id in part.drafted), None)


class Router(_Joined):
    """Gives each member the slices whose requests name it; the first one gets those that name none.
    All share the engine and its cache. Another name, such as "none", means no drafts."""

    def __init__(self, members: Mapping[str, Drafter], device: torch.device | str) -> None:
        super().__init__(list(members.values()), list(members), device)
        self.name = next(iter(members))  # of the drafts of requests that name no drafter

    def propose(self, plan: Plan) -> list[TokenTree]:
        trees = [self._empty] * len(plan.slices)
        for name, member in zip(self.names, self.members, strict=True):
            rows = [
                row
                for row, item in enumerate(plan.slices)
                if (item.seq.params.drafter or self.names[0]) == name
            ]
            if rows:
                proposed = member.propose(Plan(tuple(plan.slices[row] for row in rows)))
                for row, tree in zip(rows, proposed, strict=True):
                    trees[row] = tree
        return trees
