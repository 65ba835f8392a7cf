"""What is expected to pay is drafted; what is not known is explored within a budget.

Every option of a step (no draft; a drafter and a draft length) has an expected goodput: tokens
(acceptance.py) by seconds (cost.py). The best is taken (choice.py), from a process's first step on.
Drafts that are made only to learn are paid for by a budget (exploration.py). Lookups cost nothing
to follow, so they are known without being used (following.py). What steps teach: learning.py.
Sources: HedgeSpec (arXiv 2510.20064), TapOut (2511.02017), BanditSpec (2505.15141).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import inf
from time import perf_counter

from paceline.control.acceptance import expected_tokens, is_sampled, kind_of
from paceline.control.choice import choose, fixed_length, longer
from paceline.control.controller import (
    MEASURING,
    NOT_ASKED,
    NOT_WORTH_IT,
    NOTHING_FOUND,
    Controller,
    Decision,
)
from paceline.control.cost import CostModel, DraftOption
from paceline.control.exploration import ExplorationBudget
from paceline.control.following import LookupFollower, Offers
from paceline.control.learning import BatchDecision, StepLearner
from paceline.core.batch import Commit
from paceline.core.sequence import SequenceState
from paceline.draft.base import LookupDrafter, Offer
from paceline.draft.collapse import CollapseWatch

_HOLD = 4  # steps for which models' drafts of the same batch keep their lengths
_HOLD_PLAIN = 8  # where nothing is drafted, so that nothing is learnt
_WAIT = 32  # the same where nothing can be explored before either
_YOUNG = 64  # steps in which nothing is held, and each is learnt from at once
_HORIZON = 256  # tokens at most over which reading a prompt is written off
_UNREAD = 8  # unread tokens that cost next to nothing
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # of several sequences' drafts, and what a lookup found


class AdaptiveController(Controller):
    """Per sequence and step: the draft with the most expected tokens a second.

    ``members``: by each name that a request may ask for, the drafters of the cost model that draft
    for it; requests that name none have the first. ``lookups``: those among them that are asked
    what they find before anything is decided. ``fair``: no request is slowed down
    for another's sake; else the tokens a second of the whole batch decide. ``watch`` says who has
    collapsed.
    """

    def __init__(
        self,
        cost: CostModel,
        members: Mapping[str, Sequence[Hashable]] | None = None,
        lookups: Mapping[Hashable, LookupDrafter] | None = None,
        fair: bool = True,
        watch: CollapseWatch | None = None,
    ) -> None:
        self.cost, self.budget = cost, ExplorationBudget()
        self.members = dict(members or {str(name): (name,) for name in cost.drafters})
        self._default = next(iter(self.members), "")
        self._fair, self._watch = fair, watch or CollapseWatch()
        self._lookups = LookupFollower(lookups or {}, cost)
        self.learner = StepLearner(cost, self.budget, self._lookups.drafters)
        self._step = 0
        self._until, self._hold = 0, 1  # the step of the next decision; steps that the last holds
        self._latest = 0  # the step at which all is decided anew, whatever the budget
        self._ids: list[int] = []
        self._choices: list[Decision] = []
        self._decided = BatchDecision()
        self._needed = 0.0  # seconds of the budget from which something is explored

    def lengths(self, seqs: Sequence[SequenceState]) -> Sequence[Decision]:
        self._step += 1
        ids = [seq.seq_id for seq in seqs]
        began = perf_counter()
        offers = self._lookups.lookup(seqs, self._members, self._step, ids == self._ids)
        asked = perf_counter()
        stands = ids == self._ids and self._step < self._until and self._have_room(seqs)
        if offers or not stands:
            self.learner.learn(at_once=self._step <= _YOUNG)
            saves = self._step < self._latest and self.budget.seconds < self._needed
            if saves and ids == self._ids and not offers:
                self._until = self._step + _HOLD_PLAIN  # what could be explored is too dear still
            else:
                self._decide(ids, seqs, offers or {})
        if offers is not None:
            self._lookups.spend((perf_counter() if stands else asked) - began, len(seqs))
        return self._choices

    def _have_room(self, seqs: Sequence[SequenceState]) -> bool:
        """Whether the drafts that are held leave a token of each sequence to the target."""
        made = self._decided.drafts
        return all(seq.remaining > made[seq.seq_id].length for seq in seqs if seq.seq_id in made)

    def _members(self, seq: SequenceState) -> Sequence[Hashable]:
        """Who may draft for it. In a hybrid none that has collapsed; one drafter alone, beside
        predictions, was asked for by name."""
        members = self.members.get(seq.params.drafter or self._default, ())
        if len(members) < 3 or not self._watch.collapsed:
            return members
        return [name for name in members if not self._watch.rests(name, seq)]

    def _models(self, seq: SequenceState) -> list[Hashable]:
        """Those of them that are no lookups."""
        return [name for name in self._members(seq) if name not in self._lookups.drafters]

    def _decide(
        self, ids: list[int], seqs: Sequence[SequenceState], offers: Mapping[int, Offers]
    ) -> None:
        batch, same = len(seqs), ids == self._ids
        fixed = any(seq.params.draft_length is not None for seq in seqs)
        self._ids, self._choices = ids, [Decision(0, None, NOT_ASKED)] * batch
        none = DraftOption(None, 0, 0.0, 1.0, self.cost.rest(batch) / batch)
        undecided: list[int] = []
        options: list[list[DraftOption]] = []
        for index, seq in enumerate(seqs):
            self.learner.tokens_read(seq)
            asked, offered = seq.params.draft_length, offers.get(seq.seq_id, {})
            if asked is not None and seq.params.may_draft:
                ways = self._options(seq, batch, offered)
                self._choices[index] = fixed_length(asked, ways)
            elif seq.params.may_draft:
                undecided.append(index)
                options.append([none, *self._options(seq, batch, offered, that_may_pay=True)])
        chosen, worth, self._needed = [none] * len(options), 0.0, 0.0
        if options:
            chosen, worth = self._select(batch, options, [seqs[index] for index in undecided])
        gain = max((draft.gain / draft.seconds for draft in chosen), default=0.0)
        measures = self.cost.wants_plain(batch, gain * none.seconds)
        if measures:
            chosen, worth = [none] * len(options), 0.0
        made = {ids[i]: d for i, d in zip(undecided, chosen, strict=True) if d.length}
        self._decided = BatchDecision(made, worth, measures, fixed)
        for index, draft in zip(undecided, chosen, strict=True):
            draftable = ids[index] in offers or bool(self._models(seqs[index]))
            self._choices[index] = self._decision(draft, none, draftable)
        self._hold = self._holds(same)
        self._until = self._step + self._hold
        waits = not (made or measures or fixed)
        self._latest = self._step + _WAIT * waits

    def _decision(self, draft: DraftOption, none: DraftOption, draftable: bool) -> Decision:
        if draft.length:
            speedup = draft.gain / draft.seconds * none.seconds
            reason = "exploration" if self._decided.worth else ""
            return Decision(draft.length, draft.name, reason, speedup)
        if self._decided.measures:
            return Decision(0, None, MEASURING)
        return Decision(0, None, NOT_WORTH_IT if draftable else NOTHING_FOUND)

    def _holds(self, same: bool) -> int:
        """Steps for which a decision stands, where no lookup finds anything: 1, 2, 4."""
        made, worth, measures, _ = self._decided
        if not made:
            return 1 if measures else _HOLD_PLAIN
        models = not any(self.cost.drafters[draft.name].costless for draft in made.values())
        stays = same and models and not worth and self._step > _YOUNG
        return min(2 * self._hold, _HOLD) if stays else 1

    def _options(
        self, seq: SequenceState, batch: int, offers: Offers, that_may_pay: bool = False
    ) -> list[DraftOption]:
        """Drafts of every length of the sequence's models, or of those that may pay, and what
        lookups found, cut at some lengths."""
        options, sampled = list[DraftOption](), is_sampled(seq.params)
        forced = seq.constraint.forced() or () if seq.constraint else ()
        for name in self._members(seq):
            if (offer := offers.get(name)) is not None:
                options += self.drafts(seq, name, batch, offer.certain, offer)
            elif name not in self._lookups.drafters:
                certain = len(forced) * (len(forced) <= self.cost.drafters[name].takes_forced)
                if certain or not that_may_pay or self.cost.may_pay(name, batch, sampled=sampled):
                    options += self.drafts(seq, name, batch, certain)
        return options

    def drafts(
        self,
        seq: SequenceState,
        name: Hashable,
        batch: int,
        certain: int = 0,
        offer: Offer | None = None,
        longest: int | None = None,
    ) -> list[DraftOption]:
        """What a drafter may draft for a sequence, of at most ``longest`` levels: of a lookup what
        its ``offer`` has. Nothing is learnt of the first ``certain`` levels. Reading that must come
        first is written off over the tokens to come."""
        cost, costs, left = self.cost, self.cost.drafters[name], seq.remaining
        most = min(longest or costs.longest, left - 1)
        most = min(most, offer.levels) if offer else most
        if batch > 1:  # at most twice as long as those before
            most = min(most, max(1, 2 * cost.longest_seen(name, batch)))
        if most < 1:
            return []
        lengths: Sequence[int] = range(1, 1 + most)
        if batch > 1 or offer:
            lengths = [*(n for n in _LENGTHS if n < most), most]
        kind = kind_of(offer.confidence) if offer else None
        sampled = is_sampled(seq.params)
        rates = cost.acceptance.rates(seq.seq_id, name, kind, sampled, most)
        expected = expected_tokens(([1.0] * certain + rates)[:most])
        gains = [min(gain, left) for gain in expected]  # what comes after the last token is no gain
        unread = len(seq.tokens) - 1 - self.learner.tokens_read(seq)[name] if costs.reads else 0
        first = unread * cost.reading(name) if unread > _UNREAD else 0.0
        first += 0.0 if costs.costless else self.learner.aftermath(batch) / batch
        tokens = min(left, _HORIZON)
        nodes: Sequence[float] = offer.nodes if offer else cost.nodes(name, batch)
        fill = 1.0 if offer else cost.fill[name]
        if offer:
            table = [cost.rest(batch, nodes[n]) / batch for n in lengths]
        else:
            priced = cost.priced(name, batch, expected, sampled, certain > 0)
            table = [priced[n] for n in lengths]
        options = list[DraftOption]()
        for n, seconds in zip(lengths, table, strict=True):
            reading = first * gains[n] / tokens
            price = seconds + reading, reading, first, sampled, min(certain, n)
            options.append(DraftOption(name, n, fill * nodes[n], gains[n], *price))
        return options

    def _select(
        self, batch: int, options: Sequence[list[DraftOption]], seqs: Sequence[SequenceState]
    ) -> tuple[list[DraftOption], float]:
        """The options with the most goodput; or drafts to learn from, and the seconds in which a
        token of each sequence is gained otherwise.
        Start-up measures one sequence best: a model's first drafts for several are exploration."""
        best, plain = choose(self.cost, batch, options, self._fair), self.cost.rest(batch)
        self._needed = 0.0 if self.budget.seconds <= 0 else inf
        if self.budget.seconds > 0 and (more := longer(self.cost, batch, options, best)):
            return more, plain
        names = dict.fromkeys(draft.name for draft in best if draft.length)
        used = [name for name in names if not self.cost.drafters[name].costless]
        if batch == 1 and names:
            self.budget.used(used)
            other = self._beside(best[0], options[0], seqs[0])
            return ([other], best[0].seconds / best[0].gain) if other else (best, 0.0)
        unseen = [name for name in used if not self.cost.longest_seen(name, batch)]
        models = dict.fromkeys(name for seq in seqs for name in self._models(seq))
        for name in (unseen if names else models) if self.budget.seconds > 0 else ():
            if drafts := self._exploration(name, batch, options, seqs):
                return drafts, plain
        if unseen:
            seen = [[d for d in ways if d.name not in unseen] or ways for ways in options]
            best = choose(self.cost, batch, seen, self._fair)
        return best, 0.0

    def _beside(
        self, best: DraftOption, ways: Sequence[DraftOption], seq: SequenceState
    ) -> DraftOption | None:
        """While one drafter is best: another's best draft, to learn from, if the budget pays what
        is expected to be lost by it. Start-up may have taken it for too dear, or it was unlucky."""
        for name in self._models(seq) if self.budget.seconds > 0 else ():
            if name == best.name or not self.budget.is_due(name, self._step):
                continue
            drafts = [draft for draft in ways if draft.name == name]
            drafts = drafts or self.drafts(seq, name, 1, longest=1)
            if drafts:
                other = max(drafts, key=lambda draft: draft.gain / draft.seconds)
                seconds = other.seconds - other.reading + other.first
                if seconds - other.gain * best.seconds / best.gain <= self.budget.seconds:
                    self.budget.explored(name, self._step)
                    return other
        return None

    def _exploration(
        self,
        name: Hashable,
        batch: int,
        options: Sequence[list[DraftOption]],
        seqs: Sequence[SequenceState],
    ) -> list[DraftOption]:
        """Drafts to learn from, if the budget pays for them should none of them be right: one level
        for each of the drafter's sequences that have nothing to be read first, or for the one that
        has least. Empty if it does not pay for them."""
        drafts: dict[int, DraftOption] = {}
        for index, (seq, ways) in enumerate(zip(seqs, options, strict=True)):
            if seq.remaining <= 1:
                continue
            first = next((draft for draft in ways if draft.name == name), None)
            if first is None and name in self._models(seq):
                (first,) = self.drafts(seq, name, batch, longest=1)
            if first is not None:
                drafts[index] = first
        if not drafts:
            return []
        least = min(drafts, key=lambda index: drafts[index].first)
        drafts = {i: draft for i, draft in drafts.items() if i == least or not draft.first}
        expense = self.cost.step(batch, drafts.values()) - self.cost.rest(batch)
        expense += drafts[least].first
        if expense > self.budget.seconds:
            self._needed = min(self._needed, expense)
            return []
        return [drafts.get(index, ways[0]) for index, ways in enumerate(options)]

    def observe(
        self, commits: Sequence[Commit], seconds: float, drafting: float | None = None
    ) -> None:
        if self._decided.drafts:
            self._lookups.earn(commits, self._decided.drafts, seconds)
        self.learner.observe(self._decided, commits, seconds, drafting)

    def forget(self, seq_id: int) -> None:
        self._lookups.forget(seq_id)
        self.learner.forget(seq_id)
        if seq_id in self._ids:  # a plain decision for the others stands
            del self._choices[self._ids.index(seq_id)]
            self._ids.remove(seq_id)
        made = self._decided.drafts
        self._until = 0 if made else self._until
        left = {key: draft for key, draft in made.items() if key != seq_id}
        self._decided = self._decided._replace(drafts=left)
