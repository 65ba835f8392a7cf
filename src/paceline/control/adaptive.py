"""What is expected to pay is drafted; what is not known is explored within a budget.

Every option of a step (no draft; a drafter and a draft length) has an expected goodput: tokens by
seconds. Tokens follow from acceptance (acceptance.py), seconds from prices (cost.py); both begin
with a prior and learn from every step. The option with the most goodput is taken (choice.py), also
in the first step of a fresh process. Drafts that are made only to learn are paid for by a budget::

    SHARE of all seconds, START at first --> exploration budget --> a draft that is to teach

Lookups cost nothing to follow, so they are known without being used (following.py). Sources:
HedgeSpec (arXiv 2510.20064), TapOut (2511.02017), BanditSpec (2505.15141).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from math import inf

from paceline.control.acceptance import GOES_ON, expected_tokens, kind_of, levels_tried
from paceline.control.choice import choose, given_length
from paceline.control.controller import (
    MEASURING,
    NOT_ASKED,
    NOT_WORTH_IT,
    NOTHING_FOUND,
    Controller,
    Decision,
)
from paceline.control.cost import CostModel
from paceline.control.exploration import ExplorationBudget
from paceline.control.following import LookupFollower, Offers
from paceline.control.options import DraftOption
from paceline.core.batch import Commit
from paceline.core.sequence import SequenceState
from paceline.draft.base import LookupDrafter

_Options = tuple[SequenceState, Sequence[DraftOption]]  # of a sequence, none first

_HOLD = 4  # steps for which drafts of the same batch keep their lengths
_HOLD_PLAIN = 8  # where nothing is drafted, so that nothing is learnt
_LEARN = 4  # steps that are learnt from at once
_YOUNG = 64  # steps after which that begins
_PRICED = 4  # drafts after which prices are believed by which a drafter cannot pay
_IN_VAIN = 8  # steps without anything found that might pay, from which lookups are asked
_RARELY = 4  # only in one of so many steps
_HORIZON = 256  # tokens at most over which reading a prompt is written off
_UNREAD = 8  # unread tokens that cost next to nothing
_MARGIN = 1.02  # by which a drafter must beat those before it: no changing about for noise
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # at which what a lookup found may be cut


class AdaptiveController(Controller):
    """Per sequence and step: the draft with the most expected tokens a second.

    ``members``: by each name that a request may ask for, the drafters of the cost model that draft
    for it; requests that name none have the ``default``, the first. ``lookups``: those among them
    that are asked what they find before anything is decided. ``fair``: no request is slowed down
    for another's sake; else the tokens a second of the whole batch decide.
    """

    def __init__(
        self,
        cost: CostModel,
        members: Mapping[str, Sequence[Hashable]] | None = None,
        lookups: Mapping[Hashable, LookupDrafter] | None = None,
        default: str | None = None,
        fair: bool = True,
    ) -> None:
        self.cost, self.budget = cost, ExplorationBudget()
        self.members = dict(members or {str(name): (name,) for name in cost.drafters})
        self._default = default or next(iter(self.members), "")
        self._fair = fair
        self._lookups = LookupFollower(lookups or {}, cost.acceptance)
        self._step = 0
        self._until = 0  # the step from which the decision is made anew
        self._hold = 1
        self._in_vain = 0  # steps since a lookup found anything that might pay
        self._ids: list[int] = []
        self._choices: list[Decision] = []
        self._made: dict[int, DraftOption] = {}  # by sequence: what was decided on
        self._explores = self._given = self._measures = False
        self._seen: list[_Step] = []
        self._read: dict[int, dict[Hashable, int]] = {}  # tokens of a sequence, seen by a drafter
        self._joined: dict[int, int] = {}  # tokens that a sequence came with, and are prefilled

    # -- deciding ----------------------------------------------------------------------------------

    def lengths(self, seqs: Sequence[SequenceState]) -> Sequence[Decision]:
        self._step += 1
        ids = [seq.seq_id for seq in seqs]
        offers = self._offers(seqs, ids == self._ids)
        if offers or self._step >= self._until or ids != self._ids:
            if self._explores or len(self._seen) >= (_LEARN if self._step > _YOUNG else 1):
                self._learn_all()
            self._decide(ids, seqs, offers)
        return self._choices

    def _offers(self, seqs: Sequence[SequenceState], same: bool) -> dict[int, Offers]:
        """What lookups found that might pay. Where nothing did for some steps, they are asked less
        often; many sequences, where nothing of it was drafted: asking takes time for each."""
        batch = len(seqs)
        self._in_vain = self._in_vain + 1 if same or batch > 1 else 0
        rarely = self._in_vain > _IN_VAIN and self._step % max(_RARELY, batch // 2)
        if rarely or not self._lookups.drafters:
            return {}
        worth: dict[int, Offers] = {}
        for seq_id, offers in self._lookups.look(seqs, self._may).items():
            pay = {n: o for n, o in offers.items() if self._may_pay(seq_id, n, batch, o.confidence)}
            if pay:
                worth[seq_id] = pay
        if worth and batch == 1:
            self._in_vain = 0
        return worth

    def _may_pay(self, seq_id: int, name: Hashable, batch: int, match: int | None = None) -> bool:
        kind = None if match is None else kind_of(match)
        return self.cost.may_pay(name, batch, kind) or self.cost.acceptance.better(seq_id, name)

    def _members(self, seq: SequenceState) -> Sequence[Hashable]:
        """Who may draft for it."""
        return self.members.get(seq.params.drafter or self._default, ())

    def _may(self, seq: SequenceState, name: Hashable) -> bool:
        return seq.params.may_draft and name in self._members(seq)

    def _decide(
        self, ids: list[int], seqs: Sequence[SequenceState], offers: Mapping[int, Offers]
    ) -> None:
        batch, cost, same = len(seqs), self.cost, ids == self._ids
        for seq in seqs:
            self._joined.setdefault(seq.seq_id, len(seq.tokens))
        none = cost.none(batch)
        self._choices = [Decision(0, None, NOT_ASKED)] * batch
        self._given = any(seq.params.draft_length is not None for seq in seqs)
        settles, wants_plain = cost.settles(batch), cost.wants_plain(batch)
        self._measures = settles or wants_plain
        hopeless = self._hopeless(seqs, settles)
        open_: list[int] = []  # places that are to be decided
        options: list[_Options] = []
        for index, seq in enumerate(seqs):
            if not seq.params.may_draft:
                continue
            given, offered = seq.params.draft_length, offers.get(seq.seq_id, {})
            ways = self._options(seq, batch, none, offered, hopeless if given is None else ())
            if given is None:
                open_.append(index)
                options.append((seq, ways))
            else:
                self._choices[index] = given_length(given, ways)
        chosen = self._select(batch, options) if options and not wants_plain else []
        cost.compare(batch, chosen)
        self._made = {}
        for index, draft in zip(open_, chosen or [none] * len(open_), strict=True):
            self._choices[index] = self._choice(draft, none, offers, seqs[index])
            if draft.length:
                self._made[ids[index]] = draft
        drafted = [draft for draft in chosen if draft.length]
        if any(draft.name in self._lookups.drafters for draft in drafted):
            self._in_vain = 0
        self._hold = self._holds(drafted, same and bool(self._made))
        self._until, self._ids = self._step + self._hold, ids

    def _choice(
        self,
        draft: DraftOption,
        none: DraftOption,
        offers: Mapping[int, Offers],
        seq: SequenceState,
    ) -> Decision:
        if draft.length:
            speedup = draft.gain / draft.seconds * none.seconds
            reason = "exploration" if self._explores else ""
            return Decision(draft.length, draft.name, reason, speedup)
        names = self._members(seq)
        draftable = offers.get(seq.seq_id) or any(n not in self._lookups.drafters for n in names)
        reason = MEASURING if self._measures else NOT_WORTH_IT if draftable else NOTHING_FOUND
        return Decision(0, None, reason)

    def _holds(self, drafted: Sequence[DraftOption], same: bool) -> int:
        """Steps for which a decision stands, where no lookup finds anything: 1, 2, 4."""
        if not drafted:
            return 1 if self._measures else _HOLD_PLAIN
        if self._explores or any(draft.name in self._lookups.drafters for draft in drafted):
            return 1
        return min(2 * self._hold, _HOLD) if same else 1

    def _hopeless(self, seqs: Sequence[SequenceState], settles: bool) -> set[Hashable]:
        """Drafters that run a model and can pay for no sequence; all while steps are measured."""
        names = {n for seq in seqs for n in self._members(seq) if n not in self._lookups.drafters}
        if settles:
            return names
        return {n for n in names if not any(self._may_pay(s.seq_id, n, len(seqs)) for s in seqs)}

    def _options(
        self,
        seq: SequenceState,
        batch: int,
        none: DraftOption,
        offers: Offers,
        hopeless: Collection[Hashable],
    ) -> list[DraftOption]:
        """No draft, and every member's drafts of every length."""
        options = [none]
        for index, name in enumerate(self._members(seq)):
            drafts: Sequence[DraftOption] = ()
            if name not in self._lookups.drafters:
                drafts = () if name in hopeless else self.drafts(seq, name, batch)
            elif name in offers:
                drafts = self._found(seq, name, batch, offers)
            margin = _MARGIN**index
            options += [d._replace(seconds=d.seconds * margin) for d in drafts] if index else drafts
        return options

    def _found(
        self, seq: SequenceState, name: Hashable, batch: int, offers: Offers
    ) -> Sequence[DraftOption]:
        """What a lookup has found, cut at some lengths."""
        offer, longest = offers[name], self.cost.drafters[name].longest
        nodes = offer.nodes
        most = min(len(nodes) - 1, longest)
        lengths = [*(n for n in _LENGTHS if n < most), most]
        drafts = self.drafts(seq, name, batch, kind_of(offer.confidence), lengths)
        return [draft._replace(nodes=nodes[draft.length]) for draft in drafts]

    def drafts(
        self,
        seq: SequenceState,
        name: Hashable,
        batch: int,
        kind: Hashable = None,
        lengths: Sequence[int] | None = None,
    ) -> list[DraftOption]:
        """What a drafter may draft for a sequence; acceptance is learnt by ``kind``."""
        left, costs = max(seq.remaining, 1), self.cost.drafters[name]
        rates = self.cost.acceptance.rates(seq.seq_id, name, kind)
        gains = expected_tokens(rates[: max(lengths) if lengths else costs.longest])
        if left < len(gains):  # what comes after the last token is no gain
            gains = [min(gain, left) for gain in gains]
        first = 0.0
        if costs.reads:
            joined = self._joined.get(seq.seq_id, seq.prompt_length)
            read = self._read.setdefault(seq.seq_id, {})
            read.setdefault(name, joined if costs.follows else 0)
            unread = self._unread(seq.seq_id, name, len(seq.tokens))
            first = unread * self.cost.reading(name) if unread > _UNREAD else 0.0
        if not costs.costless:
            first += self.cost.aftermath(batch) / batch
        reached = None
        if costs.ends_early:
            more = self.cost.acceptance.everyone(name, GOES_ON).rates()
            reached = [levels - 1 for levels in expected_tokens(more[: costs.longest])]
        return self.cost.drafts(name, batch, gains, first, min(left, _HORIZON), lengths, reached)

    def _unread(self, seq_id: int, name: Hashable, tokens: int) -> int:
        """Of so many tokens, those that a drafter has to read first, but for the newest."""
        reads = self.cost.drafters[name].reads
        return max(0, tokens - self._read.get(seq_id, {}).get(name, 0) - 1) if reads else 0

    def _select(self, batch: int, options: Sequence[_Options]) -> list[DraftOption]:
        """The options with the most goodput; where that is no draft, perhaps one to learn from."""
        best = [ways[0] for _, ways in options]
        if any(len(ways) > 1 for _, ways in options):
            best = choose(self.cost, batch, [ways for _, ways in options], self._fair)
        self._explores = False
        if self._measures or any(draft.length for draft in best):
            return best
        for name in dict.fromkeys(name for seq, _ in options for name in self._members(seq)):
            if name not in self._lookups.drafters and self.budget.seconds > 0:
                drafts = self._exploration(name, batch, options)
                if drafts is not None:
                    self._explores = True
                    return drafts
        return best

    def _exploration(
        self, name: Hashable, batch: int, options: Sequence[_Options]
    ) -> list[DraftOption] | None:
        """Drafts to learn from, if the budget pays for them should none of them be right.

        One level for all sequences of a drafter, which tells most about its costs; if that is more
        than there is, the likeliest draft of the sequence that has least to be read.
        """
        plain, table = self.cost.rest(batch), self.cost.table(name, batch)
        pays = max((1 + n) / table[n] for n in range(1, len(table))) * table[0] > 1.02
        if not pays and self.cost.seen(name, batch) >= _PRICED:
            return None  # even a draft that is always right would not pay

        def expense(drafts: Sequence[DraftOption]) -> float:
            return self.cost.step(batch, drafts) - plain + sum(draft.first for draft in drafts)

        nodes = self.cost.fill[name] * self.cost.drafters[name].nodes[1]
        if expense([DraftOption(name, 1, nodes, 1.0, table[1])]) > self.budget.seconds:
            return None  # not even one level for one of them
        members = [name in self._members(seq) and seq.remaining > 1 for seq, _ in options]
        pairs = zip(options, members, strict=True)
        ways = [self.drafts(seq, name, batch) if may else [] for (seq, _), may in pairs]
        none = [ways[0] for _, ways in options]
        drafts = [(drafts or [no])[0] for drafts, no in zip(ways, none, strict=True)]
        if expense(drafts) > self.budget.seconds:
            index = min(range(len(ways)), key=lambda n: ways[n][0].first if ways[n] else inf)
            only = [[*none[:index], draft, *none[index + 1 :]] for draft in ways[index]]
            only = [one for one in only if expense(one) <= self.budget.seconds]
            drafts = max(only, key=lambda one: one[index].gain / one[index].seconds, default=none)
        return drafts if any(draft.length for draft in drafts) else None

    # -- learning ----------------------------------------------------------------------------------

    def observe(
        self, commits: Sequence[Commit], seconds: float, drafting: float | None = None
    ) -> None:
        """Steps with drafts are learnt from some at a time: between two forwards this code is not
        in the processor's caches any more (48 microseconds a step one by one, 9 together)."""
        batch = len(commits)
        for commit in commits if self._lookups.drafters else ():
            self._lookups.observe(commit.seq_id, commit.tokens)
        self.budget.spend(self.cost.aftermath(batch) if self._explores else 0.0)
        passes = any(self.cost.passes(draft.name, (1,)) for draft in self._made.values())
        self.cost.cold.ran(passes or self._given)
        if self._made:
            self._seen.append((self._made, self._explores, self._given, commits, seconds, drafting))
            return
        self.budget.earn(seconds, self.cost.rest(batch))
        if not self._given and all(commit.scheduled == 1 for commit in commits):
            self.cost.cold.plain(batch, seconds)
            if self._step % 4 == 0 or self.cost.wants_plain(batch):
                self.cost.learn(batch, 0, seconds)

    def _learn_all(self) -> None:
        seen, self._seen = self._seen, []
        for step in seen:
            self._learn_step(*step)

    def _learn_step(
        self,
        made: Mapping[int, DraftOption],
        explores: bool,
        given: bool,
        commits: Sequence[Commit],
        seconds: float,
        drafting: float | None,
    ) -> None:
        batch, cost = len(commits), self.cost
        tried = [commit for commit in commits if commit.drafted and commit.seq_id in made]
        unread = sum(self._learn(commit, made[commit.seq_id]) for commit in tried)
        plain = cost.rest(batch)
        self.budget.earn(seconds, plain)
        if given or not all(commit.scheduled == 1 and commit.tokens for commit in commits):
            return  # a step that prefills is no measure
        lengths: dict[Hashable, list[int]] = {}
        for commit in commits:
            if (draft := made.get(commit.seq_id)) is not None:
                ended = cost.drafters[draft.name].ends_early
                length = min(draft.length, commit.levels) if ended else draft.length
                lengths.setdefault(draft.name, []).append(length)
        passes = {name: cost.passes(name, levels) for name, levels in lengths.items()}
        sizes = [commit.drafted for commit in commits]
        nodes, even = sum(sizes), len(set(sizes)) == 1
        rest, took = cost.foresee(batch, nodes / batch, even, passes)
        if explores:
            # One hiccup is not what was learnt: it counts with what was foreseen and half a step.
            bounded = min(seconds, rest + took + 0.5 * plain)
            self.budget.spend(bounded - plain * min(len(commit.tokens) for commit in commits))
        if unread > 4 * batch and len(passes) == 1:
            if drafting is not None:  # all that it took beyond its passes
                cost.learn_reading(next(iter(passes)), max(drafting - took, 0.0), unread)
        elif unread <= 4 * batch:
            cost.learn(batch, nodes, seconds, drafting, even, passes)

    def _learn(self, commit: Commit, draft: DraftOption) -> int:
        """What a draft showed. Returns the tokens that the drafter had to read for it."""
        name, costs = draft.name, self.cost.drafters[draft.name]
        length = min(draft.length, costs.longest)
        if costs.ends_early:
            more = self.cost.acceptance.everyone(name, GOES_ON)
            more.record(min(commit.levels + 1, length), commit.levels)
        else:
            self.cost.record_fill(name, commit.drafted, length)
        if name not in self._lookups.drafters:
            reached = levels_tried(commit, length)
            self.cost.acceptance.record(commit.seq_id, name, reached, len(commit.path))
        if not costs.reads:
            return 0
        end = commit.position + commit.scheduled
        unread = self._unread(commit.seq_id, name, end)
        self._read.setdefault(commit.seq_id, {})[name] = end + len(commit.path)
        return unread

    def forget(self, seq_id: int) -> None:
        self._learn_all()
        self._until = 0  # the same sequences may be back at once
        self._made = {key: made for key, made in self._made.items() if key != seq_id}
        self._read.pop(seq_id, None)
        self._joined.pop(seq_id, None)
        self._lookups.forget(seq_id)
        self.cost.acceptance.forget(seq_id)


_Step = tuple[
    Mapping[int, DraftOption], bool, bool, Sequence[Commit], float, float | None
]  # what was made, whether to explore, whether lengths were given; commits, seconds, drafting
