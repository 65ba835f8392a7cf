"""Several drafters for one sequence: each step the one drafts whose draft is worth most.

Members come in two kinds. Looking something up takes no forward, so those members propose first
and are judged by what they found: its size, and how sure they are of it. The others are judged
before they run, by how their earlier drafts fared::

    costless members propose --.
                               +--> tokens expected / seconds --> the best, or no draft
    the others' estimates -----'

Losslessness: which member drafts depends on the text so far, on earlier steps, and on proposals
that were chosen without chance (POINT). A tree that was sampled is never looked at before it is
kept: dropping it for what was drawn would bias the output. Members that sample take forwards, so
the choice falls before they draw; should a costless member's tree be sampled all the same, it
stays.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.tree import Draw, TokenTree, children_of
from paceline.draft.base import Drafter
from paceline.pace.choice import choose
from paceline.pace.cost import Draft
from paceline.pace.risk import Prospect, Risk

_MARGIN = 1.02  # by which a member must beat those before it: no changing about for noise
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # at which a proposal may be cut


class _Pick(NamedTuple):
    """Who drafts for a sequence in this step, and how many levels."""

    member: int
    length: int


@dataclass
class _Trial:
    """A proposal followed along the text, whoever drafts: how far it would have been right.

    So a costless member is known without being used. The next trial starts when this one has ended,
    as the next draft would. A ``kind`` is what acceptance is learnt for.
    """

    kind: Hashable
    tree: TokenTree
    accepted: int = 0
    ended: bool = False
    _tokens: list[int] = field(default_factory=list)
    _node: int = -1

    @property
    def reached(self) -> int:
        """Levels of which it is known whether they were right."""
        return min(self.accepted + self.ended, _levels(self.tree))

    def follow(self, tokens: Sequence[int]) -> None:
        """Go on with what was committed."""
        self._tokens = self._tokens or self.tree.tokens.tolist()
        children = children_of(self.tree.parents)
        for token in tokens:
            below = [c for c in children[self._node + 1] if self._tokens[c] == token]
            if not below:
                self.ended = True
                return
            self._node = below[0]
            self.accepted += 1
        self.ended = not children[self._node + 1]


class HybridDrafter:
    """The first of ``members`` whose draft is worth most for its measured cost, step by step.

    The order decides between equals. ``calibrate`` gives it the costs; until then, and with a
    fixed draft length, the first member drafts that has anything to propose. Members may say how
    sure they are of their last proposal, ``confidence(seq_id)``, a small number such as the length
    of the match: acceptance is then learnt for each case.
    """

    name = "hybrid"
    FADE = 0.998  # weight kept of what a sequence showed of a member, with each step without it

    def __init__(self, members: Sequence[Drafter], device: torch.device | str) -> None:
        self.members = tuple(members)
        self.features = tuple(sorted({layer for m in members for layer in m.features}))
        self._costless = tuple(not member.passes(1) for member in members)
        self._confidence = [
            getattr(member, "confidence", None) if costless else None
            for member, costless in zip(members, self._costless, strict=True)
        ]
        self._empty = TokenTree.empty(device)
        self._risk: Risk | None = None
        self._names: tuple[Hashable, ...] = ()
        self._trials: dict[int, dict[int, _Trial]] = {}  # by sequence and member

    def calibrate(self, risk: Risk, names: Sequence[Hashable]) -> None:
        """Be told what may be drafted; ``names`` of the members in the cost model."""
        self._risk, self._names = risk, tuple(names)

    def max_nodes(self, length: int) -> int:
        return max(member.max_nodes(length) for member in self.members)

    def passes(self, length: int) -> int:
        return max(member.passes(length) for member in self.members)

    # -- proposing ---------------------------------------------------------------------------------

    def propose(self, plan: Plan) -> list[TokenTree]:
        if self._idle(plan):
            return [self._empty] * len(plan.slices)
        start = time.perf_counter()
        shown = {
            index: member.propose(plan)
            for index, member in enumerate(self.members)
            if self._costless[index]
        }
        found = [
            {index: trees[place] for index, trees in shown.items() if len(trees[place])}
            for place in range(len(plan.slices))
        ]
        picks = self._settle(plan, found)
        if self._risk is not None:
            self._remember(plan, found, picks)
            self._risk.looked += time.perf_counter() - start
        return self._draft(plan, found, picks)

    def _idle(self, plan: Plan) -> bool:
        """Nothing is asked for, no prompt is to be followed, and all members know everybody."""
        if self._risk is None:
            return False
        known = all(item.seq.seq_id in self._trials for item in plan.slices)
        for item in plan.slices if not known else ():
            self._trials.setdefault(item.seq.seq_id, {})
        return known and all(item.decodes and not item.draft_length for item in plan.slices)

    def _draft(
        self, plan: Plan, found: Sequence[dict[int, TokenTree]], picks: Sequence[_Pick | None]
    ) -> list[TokenTree]:
        """The picked trees. A proposal that was not picked, or not to its end, is withdrawn."""
        trees = [self._empty] * len(plan.slices)
        for index, member in enumerate(self.members):
            lengths = [pick.length if pick and pick.member == index else 0 for pick in picks]
            places = list(range(len(picks)))
            if self._costless[index]:
                proposals = [own.get(index, self._empty) for own in found]
                kept = [length == _levels(t) for length, t in zip(lengths, proposals, strict=True)]
                trees = [
                    tree if keep and len(tree) else before
                    for tree, keep, before in zip(proposals, kept, trees, strict=True)
                ]
                places = [place for place in places if not kept[place]]
                if not places:
                    continue
            part = Plan(tuple(plan.slices[place] for place in places))
            part = _with_lengths(part, [lengths[place] for place in places])
            for place, tree in zip(places, member.propose(part), strict=True):
                if lengths[place]:
                    trees[place] = tree
        return trees

    # -- who drafts --------------------------------------------------------------------------------

    def _settle(self, plan: Plan, found: Sequence[dict[int, TokenTree]]) -> list[_Pick | None]:
        asked = [p for p, item in enumerate(plan.slices) if item.decodes and item.draft_length]
        picks: list[_Pick | None] = [None] * len(plan.slices)
        if self._risk is None:
            for place in asked:
                picks[place] = self._first(plan.slices[place], found[place])
        elif asked:
            prospects = [self._prospect(plan, place, found[place], self._risk) for place in asked]
            drafts = self._ruled(len(plan.slices), prospects, self._risk)
            for place, draft in zip(asked, drafts, strict=True):
                if draft.length:
                    picks[place] = _Pick(self._names.index(draft.name), draft.length)
                    self._risk.made[plan.slices[place].seq.seq_id] = draft
        return picks

    def _ruled(self, batch: int, prospects: Sequence[Prospect], risk: Risk) -> list[Draft]:
        """The best drafts, as far as they may be risked; a request's own length always may be."""
        if any(seq.params.draft_length is not None for seq, _ in prospects):
            return choose(risk.cost, batch, [options for _, options in prospects])
        followed = [n for n, costless in zip(self._names, self._costless, strict=True) if costless]
        ruling = risk.rule(batch, prospects, followed)
        risk.probed = risk.probed or ruling.probe
        for (seq, _), draft in zip(prospects, ruling.drafts, strict=True):
            for name in self._names:
                if name not in followed and name != draft.name:
                    risk.cost.acceptance.of(seq.seq_id, name).fade(self.FADE)
        return ruling.drafts

    def _first(self, item: Slice, found: dict[int, TokenTree]) -> _Pick | None:
        """Without costs the order decides."""
        for index, costless in enumerate(self._costless):
            if index in found:
                return _Pick(index, _levels(found[index]))
            if not costless:
                return _Pick(index, item.draft_length)
        return None

    def _prospect(
        self, plan: Plan, place: int, found: dict[int, TokenTree], risk: Risk
    ) -> Prospect:
        """No draft, and every member's drafts of every length."""
        seq, batch = plan.slices[place].seq, len(plan.slices)
        options = [risk.cost.none(batch)]
        for index, name in enumerate(self._names):
            kind, tree = self._kind(index, seq.seq_id), found.get(index)
            margin = _MARGIN**index
            if tree is not None:
                levels = min(_levels(tree), risk.cost.drafters[name].longest)
                some = sorted({n for n in _LENGTHS if n < levels} | {levels})
                own = risk.drafts(seq, name, batch, kind, some)
                nodes = _nodes_by_depth(tree)
                options += [
                    draft._replace(nodes=nodes[draft.length], seconds=draft.seconds * margin)
                    for draft in own
                ]
                if tree.draw is not Draw.POINT:
                    # Sampled: it must stay, and all of it.
                    return seq, [options[-1]._replace(length=_levels(tree))]
            elif not self._costless[index]:
                most = min(plan.slices[place].draft_length, risk.cost.drafters[name].longest)
                own = risk.drafts(seq, name, batch, kind, range(1, most + 1))
                options += [draft._replace(seconds=draft.seconds * margin) for draft in own]
        return seq, options

    def _kind(self, index: int, seq_id: int) -> Hashable:
        """What acceptance is learnt for: a member, and how sure it is."""
        name, confidence = self._names[index], self._confidence[index]
        return (name, confidence(seq_id)) if confidence is not None else name

    # -- observing ---------------------------------------------------------------------------------

    def _remember(
        self, plan: Plan, found: Sequence[dict[int, TokenTree]], picks: Sequence[_Pick | None]
    ) -> None:
        for item, proposals, pick in zip(plan.slices, found, picks, strict=True):
            trials = self._trials[item.seq.seq_id]
            for index, tree in proposals.items():
                if index not in trials or (pick and pick.member == index):
                    trials[index] = _Trial(self._kind(index, item.seq.seq_id), tree)

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        if self._risk is not None:
            for commit in commits:
                trials = self._trials.get(commit.seq_id)
                if trials and commit.tokens:
                    self._learn(commit, trials, self._risk)
        for member in self.members:
            member.observe(commits, out)

    def _learn(self, commit: Commit, trials: dict[int, _Trial], risk: Risk) -> None:
        for index, trial in list(trials.items()):
            known = trial.reached
            trial.follow(commit.tokens)
            risk.cost.acceptance.record(
                commit.seq_id, trial.kind, trial.reached, trial.accepted, known
            )
            if trial.ended:
                del trials[index]

    def rehearse(self, batch_size: int) -> None:
        for member in self.members:
            member.rehearse(batch_size)

    def forget(self, seq_id: int) -> None:
        for member in self.members:
            member.forget(seq_id)
        self._trials.pop(seq_id, None)
        if self._risk is not None:
            self._risk.forget(seq_id)


def _with_lengths(plan: Plan, lengths: Sequence[int]) -> Plan:
    if all(item.draft_length == n for item, n in zip(plan.slices, lengths, strict=True)):
        return plan
    return Plan(
        tuple(replace(item, draft_length=n) for item, n in zip(plan.slices, lengths, strict=True))
    )


def _levels(tree: TokenTree) -> int:
    return max(tree.depths, default=0)


def _nodes_by_depth(tree: TokenTree) -> tuple[int, ...]:
    """Nodes down to each depth; entry 0 is none."""
    depths = tree.depths
    each = [depths.count(depth) for depth in range(1, _levels(tree) + 1)]
    return (0, *accumulate(each))
