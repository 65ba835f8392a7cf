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
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.transfer import Arrival
from paceline.core.tree import Draw, TokenTree, children_of
from paceline.draft.base import Drafter
from paceline.pace.controller import AdaptiveLength, Prospect
from paceline.pace.cost import Draft

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
    node: int = -1

    @property
    def reached(self) -> int:
        """Levels of which it is known whether they were right."""
        return min(self.accepted + self.ended, _levels(self.tree))

    def __post_init__(self) -> None:
        # On their way while the step's forward runs; what the host knows need not come.
        self._arrival = None if self.tree.known is not None else Arrival(self.tree.tokens)

    def _guesses(self) -> Sequence[int]:
        return self.tree.known or (self._arrival.values() if self._arrival else ())

    def follow(self, tokens: Sequence[int]) -> None:
        """Go on with what was committed."""
        guesses, children = self._guesses(), children_of(self.tree.parents)
        for token in tokens:
            below = [c for c in children[self.node + 1] if guesses[c] == token]
            if not below:
                self.ended = True
                return
            self.node = below[0]
            self.accepted += 1
        self.ended = not children[self.node + 1]


class HybridDrafter:
    """The first of ``members`` whose draft is worth most for its measured cost, step by step.

    The order decides between equals. ``calibrate`` gives it the costs; until then, and with a
    fixed draft length, the first member drafts that has anything to propose. Members may say how
    sure they are of their last proposal, ``confidence(seq_id)``, a small number such as the length
    of the match: acceptance is then learnt for each case.
    """

    name = "hybrid"

    def __init__(self, members: Sequence[Drafter], device: torch.device | str) -> None:
        self.members = tuple(members)
        self.features = tuple(sorted({layer for m in members for layer in m.features}))
        self._costless = tuple(not member.passes(1) for member in members)
        self._empty = TokenTree.empty(device)
        self._control: AdaptiveLength | None = None
        self._names: tuple[Hashable, ...] = ()
        self._trials: dict[int, dict[int, _Trial]] = {}  # by sequence and member

    def calibrate(self, control: AdaptiveLength, names: Sequence[Hashable]) -> None:
        """Be told what may be drafted; ``names`` of the members in the cost model."""
        self._control, self._names = control, tuple(names)

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
        if self._control is not None:
            self._remember(plan, found, picks)
            self._control.decision.looked += time.perf_counter() - start
        return self._draft(plan, found, picks)

    def _idle(self, plan: Plan) -> bool:
        """Nothing is asked for, no prompt is to be followed, and all members know everybody."""
        if self._control is None:
            return False
        new = [item.seq.seq_id for item in plan.slices if item.seq.seq_id not in self._trials]
        self._trials.update((seq_id, {}) for seq_id in new)
        return not new and all(item.decodes and not item.draft_length for item in plan.slices)

    def _draft(
        self, plan: Plan, found: Sequence[dict[int, TokenTree]], picks: Sequence[_Pick | None]
    ) -> list[TokenTree]:
        """The picked trees. A proposal that was not picked, or not to its end, is withdrawn."""
        trees = [self._empty] * len(plan.slices)
        for index, member in enumerate(self.members):
            lengths = [pick.length if pick and pick.member == index else 0 for pick in picks]
            asked = []
            for place, length in enumerate(lengths):
                shown = found[place].get(index, self._empty)
                if not self._costless[index] or length != _levels(shown):
                    asked.append(place)
                elif length:
                    trees[place] = shown
            items = tuple(replace(plan.slices[p], draft_length=lengths[p]) for p in asked)
            for place, tree in zip(
                asked, member.propose(Plan(items)) if items else (), strict=True
            ):
                if lengths[place]:
                    trees[place] = tree
        return trees

    # -- who drafts --------------------------------------------------------------------------------

    def _settle(self, plan: Plan, found: Sequence[dict[int, TokenTree]]) -> list[_Pick | None]:
        picks: list[_Pick | None] = [None] * len(plan.slices)
        asked = [p for p, item in enumerate(plan.slices) if item.decodes and item.draft_length]
        if self._control is None:
            for place in asked:
                picks[place] = self._first(plan.slices[place], found[place])
        elif asked:
            prospects = [self._prospect(plan, p, found[p], self._control) for p in asked]
            drafts = self._ruled(len(picks), prospects, self._control)
            for place, draft in zip(asked, drafts, strict=True):
                if draft.length:
                    picks[place] = _Pick(self._names.index(draft.name), draft.length)
                    self._control.decision.made[plan.slices[place].seq.seq_id] = draft
        return picks

    def _ruled(
        self, batch: int, prospects: Sequence[Prospect], control: AdaptiveLength
    ) -> list[Draft]:
        """The best drafts, as far as they may be risked. Where a request has a length of its own,
        the member whose draft of it is worth most; shorter ones only if it found no more."""
        free = [place for place in prospects if place[0].params.draft_length is None]
        drafts, probe = control.rule(batch, free) if free else ([], False)
        control.decision.probe |= probe
        ruled = iter(drafts)
        return [
            next(ruled) if seq.params.draft_length is None else _longest_best(options)
            for seq, options in prospects
        ]

    def _first(self, item: Slice, found: dict[int, TokenTree]) -> _Pick | None:
        """Without costs the order decides."""
        for index, costless in enumerate(self._costless):
            if index in found:
                return _Pick(index, _levels(found[index]))
            if not costless:
                return _Pick(index, item.draft_length)
        return None

    def _prospect(
        self, plan: Plan, place: int, found: dict[int, TokenTree], control: AdaptiveLength
    ) -> Prospect:
        """No draft, and every member's drafts of every length."""
        seq, batch, cost = plan.slices[place].seq, len(plan.slices), control.cost
        options = [cost.none(batch)]
        for index, name in enumerate(self._names):
            tree, most = found.get(index), cost.drafters[name].longest
            if tree is None and self._costless[index]:
                continue
            most = min(most, _levels(tree) if tree else plan.slices[place].draft_length)
            lengths = [n for n in (_LENGTHS if tree else range(1, most)) if n < most] + [most]
            nodes = _nodes_by_depth(tree) if tree else None
            for draft in control.drafts(seq, name, batch, self._kind(index, seq.seq_id), lengths):
                size = nodes[draft.length] if nodes else draft.nodes
                options.append(draft._replace(seconds=draft.seconds * _MARGIN**index, nodes=size))
            if tree is None:
                continue
            if tree.draw is not Draw.POINT:
                # Sampled: it must stay, and all of it.
                return seq, [options[-1]._replace(length=_levels(tree))]
        return seq, options

    def _kind(self, index: int, seq_id: int) -> Hashable:
        """What acceptance is learnt for: a member, and how sure it is."""
        name, member = self._names[index], self.members[index]
        if not self._costless[index] or not hasattr(member, "confidence"):
            return name
        return name, member.confidence(seq_id)

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
        for commit in commits if self._control is not None else ():
            if commit.tokens:
                self._learn(commit, self._trials.get(commit.seq_id, {}))
        for member in self.members:
            member.observe(commits, out)

    def _learn(self, commit: Commit, trials: dict[int, _Trial]) -> None:
        assert self._control is not None
        learn = self._control.cost.acceptance.record
        for index, trial in list(trials.items()):
            known = trial.reached
            trial.follow(commit.tokens)
            learn(commit.seq_id, trial.kind, trial.reached, trial.accepted, known)
            if trial.ended:
                del trials[index]

    def rehearse(self, batch_size: int) -> None:
        for member in self.members:
            member.rehearse(batch_size)

    def forget(self, seq_id: int) -> None:
        for member in self.members:
            member.forget(seq_id)
        self._trials.pop(seq_id, None)


def _longest_best(options: Sequence[Draft]) -> Draft:
    """Of every member's longest draft the one that is worth most, if any proposes something."""
    longest = {draft.name: draft for draft in options if draft.length}
    return max(longest.values(), key=lambda draft: draft.gain / draft.seconds, default=options[0])


def _levels(tree: TokenTree) -> int:
    return max(tree.depths, default=0)


def _nodes_by_depth(tree: TokenTree) -> tuple[int, ...]:
    """Nodes down to each depth; entry 0 is none."""
    depths = tree.depths
    each = [depths.count(depth) for depth in range(1, _levels(tree) + 1)]
    return (0, *accumulate(each))
