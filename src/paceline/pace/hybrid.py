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

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.sequence import SequenceView
from paceline.core.tree import Draw, TokenTree
from paceline.draft.base import Drafter
from paceline.pace.prices import DEARER, HURT
from paceline.pace.shadow import ShadowDraft
from paceline.pace.steptime import StepTime
from paceline.pace.worth import AcceptanceTracker, Profile, RetryBackoff, best, levels_tried

_MARGIN = 1.02  # by which a member must beat those before it: no changing about for noise


@runtime_checkable
class Confident(Protocol):
    """A drafter that says how sure it is, so that acceptance can be learnt for each case."""

    def confidence(self, seq_id: int) -> int:
        """A small number for its last proposal, such as the length of the match."""
        ...


class _Pick(NamedTuple):
    """Who drafts for a sequence in this step, and how many levels."""

    member: int
    length: int


class _Option(NamedTuple):
    """One way to spend a step on a sequence."""

    pick: _Pick | None
    gain: float
    seconds: float  # this sequence's part of the step
    nodes: int = 0


@dataclass
class _State:
    """What is remembered of a sequence: this step's pick, probes and trials by member."""

    picked: _Pick | None = None
    probes: dict[int, RetryBackoff] = field(default_factory=dict)
    trials: dict[int, ShadowDraft] = field(default_factory=dict)


class Hybrid:
    """The first of ``members`` whose draft is worth most for its measured cost, step by step.

    The order decides between equals. ``calibrate`` gives it the costs; until then, and with a
    fixed draft length, the first member drafts that has anything to propose.
    """

    name = "hybrid"
    MAX_WAIT = 512.0  # steps between probes of a member that is not used

    def __init__(self, members: Sequence[Drafter], device: torch.device | str) -> None:
        self.members = tuple(members)
        self.features = tuple(sorted({layer for m in members for layer in m.features}))
        self._costless = tuple(not member.passes(1) for member in members)
        self._empty = TokenTree.empty(device)
        self._steps: StepTime | None = None
        self._profiles: tuple[Profile, ...] = ()
        self._acceptance = AcceptanceTracker(0)
        self._states: dict[int, _State] = {}

    def calibrate(self, steps: StepTime, profiles: Sequence[Profile]) -> None:
        """Learn what steps and the members' drafts cost; ``profiles`` in their order."""
        self._steps, self._profiles = steps, tuple(profiles)
        self._acceptance = AcceptanceTracker(max(profile.longest for profile in profiles))

    def max_nodes(self, length: int) -> int:
        return max(member.max_nodes(length) for member in self.members)

    def passes(self, length: int) -> int:
        return max(member.passes(length) for member in self.members)

    # -- proposing ---------------------------------------------------------------------------

    def propose(self, plan: Plan) -> list[TokenTree]:
        if self._idle(plan):
            return [self._empty] * len(plan.slices)
        shown = {
            index: member.propose(self._bounded(plan, index))
            for index, member in enumerate(self.members)
            if self._costless[index]
        }
        found = [
            {index: trees[place] for index, trees in shown.items() if len(trees[place])}
            for place in range(len(plan.slices))
        ]
        picks = self._settle(plan, found)
        for item, proposals, pick in zip(plan.slices, found, picks, strict=True):
            self._remember(item.seq.seq_id, proposals, pick)
        return self._draft(plan, found, picks)

    def _idle(self, plan: Plan) -> bool:
        """Nothing is asked for, no prompt is to be followed, and all members know everybody."""
        if self._steps is None:
            return False
        known = all(item.seq.seq_id in self._states for item in plan.slices)
        idle = known and all(item.decodes and not item.draft_length for item in plan.slices)
        for item in plan.slices if not known else ():
            self._state(item.seq.seq_id)
        if idle:
            for item in plan.slices:
                self._state(item.seq.seq_id).picked = None
        return idle

    def _bounded(self, plan: Plan, index: int) -> Plan:
        """The plan with the lengths that one member may draft."""
        if not self._profiles:
            return plan
        longest = self._profiles[index].longest
        return _with_lengths(plan, [min(item.draft_length, longest) for item in plan.slices])

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

    # -- who drafts --------------------------------------------------------------------------

    def _settle(self, plan: Plan, found: Sequence[dict[int, TokenTree]]) -> list[_Pick | None]:
        asked = [
            place for place, item in enumerate(plan.slices) if item.decodes and item.draft_length
        ]
        picks: list[_Pick | None] = [None] * len(plan.slices)
        if self._steps is None:
            for place in asked:
                picks[place] = self._first(plan.slices[place], found[place])
            return picks
        batch = len(plan.slices)
        options = [self._options(plan.slices[p], found[p], batch, self._steps) for p in asked]
        chosen = self._unharmed(options, batch, self._steps)
        for place, own, option in zip(asked, options, chosen, strict=True):
            picks[place] = self._probed(plan.slices[place].seq, own, option)
        self._begin(picks, self._steps)
        return picks

    def _first(self, item: Slice, found: dict[int, TokenTree]) -> _Pick | None:
        """Without costs the order decides."""
        for index, costless in enumerate(self._costless):
            if index in found:
                return _Pick(index, _levels(found[index]))
            if not costless:
                return _Pick(index, item.draft_length)
        return None

    def _options(
        self, item: Slice, found: dict[int, TokenTree], batch: int, steps: StepTime
    ) -> list[_Option]:
        """No draft, and every member's drafts of every length."""
        options = [_Option(None, 1.0, steps.step(batch, 0, 0.0) / batch)]
        for index, profile in enumerate(self._profiles):
            levels, nodes = min(item.draft_length, profile.longest), profile.nodes
            if profile.costless:
                if index not in found:
                    continue
                levels, nodes = _levels(found[index]), _nodes_by_depth(found[index])
            kind = self._kind(index, item.seq.seq_id)
            expected = self._acceptance.of(item.seq.seq_id, kind).expected_tokens()
            own = []
            for length in range(1, levels + 1):
                drafting = profile.drafting(length, batch)
                seconds = steps.step(batch, nodes[length], drafting, (id(self), index)) / batch
                seconds *= _MARGIN**index
                own.append(_Option(_Pick(index, length), expected[length], seconds, nodes[length]))
            if profile.costless and found[index].draw is not Draw.POINT:
                return own[-1:]  # sampled: it must stay, and all of it
            options += own
        return options

    def _paid(
        self,
        options: list[list[_Option]],
        chosen: list[_Option],
        batch: int,
        steps: StepTime,
    ) -> list[_Option]:
        """A pass costs nearly as much for few sequences as for all: it must pay for those few."""
        for index, costless in enumerate(self._costless):
            served = sum(o.pick is not None and o.pick.member == index for o in chosen)
            if costless or not 0 < served < batch:
                continue
            left = [[o for o in own if not o.pick or o.pick.member != index] for own in options]
            without = _best_of(left)
            if self._rate(without, batch, steps) > self._rate(chosen, batch, steps):
                options, chosen = left, without
        return chosen

    def _unharmed(self, options: list[list[_Option]], batch: int, steps: StepTime) -> list[_Option]:
        """The best for all of which nobody becomes slower; as little as possible if there is none.

        Where the best would slow down those that gain little by it, time is made dearer.
        """
        plain = steps.step(batch, 0, 0.0)
        chosen = self._paid(options, _best_of(options), batch, steps)
        for dearer in DEARER:
            least = min((option.gain for option in chosen), default=1.0)
            if self._seconds(chosen, batch, steps) <= (1 + HURT) * plain * least:
                return chosen
            rate = dearer * self._rate(chosen, batch, steps)
            cheaper = [max(own, key=lambda o: o.gain - rate * o.seconds) for own in options]
            chosen = self._paid(options, cheaper, batch, steps)
        return [own[0] for own in options]

    def _seconds(self, chosen: Sequence[_Option], batch: int, steps: StepTime) -> float:
        """The whole step."""
        seconds = plain = steps.step(batch, 0, 0.0)
        for index, profile in enumerate(self._profiles):
            own = [option for option in chosen if option.pick and option.pick.member == index]
            if own:
                longest = max(option.pick.length for option in own if option.pick)
                nodes = sum(option.nodes for option in own) / batch
                drafting = profile.drafting(longest, len(own))
                seconds += steps.step(batch, nodes, drafting, (id(self), index)) - plain
        return seconds

    def _rate(self, chosen: Sequence[_Option], batch: int, steps: StepTime) -> float:
        """Tokens a second of the whole step."""
        return sum(option.gain for option in chosen) / self._seconds(chosen, batch, steps)

    def _kind(self, index: int, seq_id: int) -> tuple[int, int]:
        """What acceptance is learnt for: a member, and how sure it is."""
        member = self.members[index]
        return index, member.confidence(seq_id) if isinstance(member, Confident) else 0

    def _probed(
        self, seq: SequenceView, options: Sequence[_Option], chosen: _Option
    ) -> _Pick | None:
        """The choice, or a member that takes forwards and has long not been used."""
        state = self._state(seq.seq_id)
        rate = chosen.gain / chosen.seconds
        for index, costless in enumerate(self._costless):
            if costless:
                continue  # known from its trials
            probe = state.probes.setdefault(index, RetryBackoff())
            if chosen.pick and chosen.pick.member == index:
                probe.used()
                continue
            own = [o for o in options if o.pick and o.pick.member == index]
            if not own:
                continue
            likeliest = max(own, key=lambda option: option.gain / option.seconds)
            # Where the draft at hand is much better, a probe is dear: such steps count for less.
            if probe.due(min(1.0, likeliest.gain / likeliest.seconds / rate)):
                probe.tried(self.MAX_WAIT)
                return likeliest.pick
        return chosen.pick

    def _begin(self, picks: Sequence[_Pick | None], steps: StepTime) -> None:
        """Announce the drafts of this step, with the seconds of the members' passes."""
        for index, profile in enumerate(self._profiles):
            lengths = [pick.length for pick in picks if pick and pick.member == index]
            if lengths:
                steps.begin((id(self), index), profile.drafting(max(lengths), len(lengths)))

    # -- observing ---------------------------------------------------------------------------

    def _state(self, seq_id: int) -> _State:
        return self._states.setdefault(seq_id, _State())

    def _remember(self, seq_id: int, found: dict[int, TokenTree], pick: _Pick | None) -> None:
        if self._steps is None:
            return
        state = self._state(seq_id)
        state.picked = pick
        for index, tree in found.items():
            if index not in state.trials or (pick and pick.member == index):
                state.trials[index] = ShadowDraft(self._kind(index, seq_id), tree)

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        for commit in commits:
            state = self._states.get(commit.seq_id)
            if state is not None and commit.tokens:
                self._learn(state, commit)
        for member in self.members:
            member.observe(commits, out)

    def _learn(self, state: _State, commit: Commit) -> None:
        seq_id, pick = commit.seq_id, state.picked
        for index, trial in list(state.trials.items()):
            known = trial.reached
            trial.follow(commit.tokens)
            self._acceptance.record(seq_id, trial.kind, trial.reached, trial.accepted, known)
            if trial.ended:
                del state.trials[index]
        if pick and not self._costless[pick.member] and commit.drafted:
            reached = levels_tried(commit, pick.length)
            self._acceptance.record(seq_id, (pick.member, 0), reached, len(commit.path))
        state.picked = None

    def rehearse(self, batch_size: int) -> None:
        for member in self.members:
            member.rehearse(batch_size)

    def forget(self, seq_id: int) -> None:
        for member in self.members:
            member.forget(seq_id)
        self._acceptance.forget(seq_id)
        self._states.pop(seq_id, None)


def _best_of(options: Sequence[Sequence[_Option]]) -> list[_Option]:
    chosen = best(
        [[option.gain for option in own] for own in options],
        [[option.seconds for option in own] for own in options],
    )
    return [own[number] for own, number in zip(options, chosen, strict=True)]


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
