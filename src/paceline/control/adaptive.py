"""The default controller: it takes the drafts with the highest expected goodput.

Every option of a step (no draft, or a drafter and a draft length) has an expected goodput: its
expected tokens (acceptance.py) divided by its expected seconds (cost.py). The best one is taken
(choice.py), from the first step of a process on. A budget pays for drafts made only to learn.
Lookups cost nothing to compare with the text, so their acceptance is learnt whether they draft or
not (following.py). learning.py corrects tokens and seconds by every step.
Sources: HedgeSpec (arXiv 2510.20064), TapOut (2511.02017), BanditSpec (2505.15141).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import inf
from time import perf_counter

from paceline.control.acceptance import expected_tokens, kind_of
from paceline.control.choice import choose, fixed_length, with_more_nodes
from paceline.control.controller import (
    MEASURING,
    NOT_ASKED,
    NOT_WORTH_IT,
    NOTHING_FOUND,
    Controller,
    Decision,
)
from paceline.control.cost import CostModel, DraftOption
from paceline.control.following import LookupFollower, Offers
from paceline.control.learning import BatchDecision, ExplorationBudget, StepLearner
from paceline.core.batch import Commit
from paceline.core.sequence import SequenceState
from paceline.draft.base import LookupDraft, LookupDrafter

# Steps for which a decision about the same batch is kept, at most. Plain decoding is kept for
# _KEEP_PLAIN steps where the budget then pays for exploration.
_KEEP_DRAFTS, _KEEP_PLAIN, _KEEP_PLAIN_LONG = 4, 8, 32
_EARLY_STEPS = 64  # steps in which decisions are not kept, and each step is learnt from at once
_FIRST_WAIT, _LONGEST_WAIT = 8, 512  # steps until a drafter is explored beside the best again
_READING_HORIZON = 256  # tokens at most over which the cost of reading a text is spread
_FEW_UNREAD = 8  # unread tokens that cost next to nothing
# Draft lengths that are compared for several sequences and for lookups (else: every length).
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)


class AdaptiveController(Controller):
    """Chooses, for each sequence and step, the draft with the most expected tokens a second.

    ``members``: for each drafter name that a request may ask for, the names of the drafters of
    ``cost`` that draft for it; requests that name none get the first entry. ``lookups``: the
    lookups among these drafters; they are asked for offers before a decision. ``fair``: no request
    may become slower than plain decoding; else the tokens a second of the whole batch decide.
    """

    def __init__(
        self,
        cost: CostModel,
        members: Mapping[str, Sequence[Hashable]] | None = None,
        lookups: Mapping[Hashable, LookupDrafter] | None = None,
        fair: bool = True,
    ) -> None:
        self.cost, self.budget = cost, ExplorationBudget()
        self.members = dict(members or {str(name): (name,) for name in cost.drafters})
        self._default = next(iter(self.members), "")
        self._fair = fair
        self._lookups = LookupFollower(lookups or {}, cost)
        self.learner = StepLearner(cost, self.budget, self._lookups.drafters)
        self._step = 0
        # The last decision, and how long it is kept.
        self._ids: list[int] = []
        self._decisions: list[Decision] = []
        self._batch_decision = BatchDecision()
        self._keep = 1  # steps
        self._decided = 0  # the step of the decision
        self._exploration_price = 0.0  # seconds that the budget must hold to explore anything
        # While another drafter is the best: the step of its next turn, and the wait after that.
        self._turns: dict[Hashable, tuple[int, int]] = {}

    def lengths(self, seqs: Sequence[SequenceState]) -> Sequence[Decision]:
        self._step += 1
        ids = [seq.seq_id for seq in seqs]
        start = perf_counter()
        offers = self._lookups.lookup(seqs, self._members, ids == self._ids)
        looked_up = perf_counter()
        age = self._step - self._decided
        pairs = zip(seqs, self._decisions, strict=False)
        have_room = all(seq.remaining > decision.length for seq, decision in pairs)
        keep = ids == self._ids and age < self._keep and have_room
        # A plain decision ends earlier if the budget then pays for exploration.
        checks = not keep or age % _KEEP_PLAIN == 0
        if offers or checks:
            self.learner.learn(at_once=self._step <= _EARLY_STEPS)
            if offers or not keep or self.budget.seconds >= self._exploration_price:
                self._decide(ids, seqs, offers or {})
        if offers is not None:
            # A decision that only the offers made necessary is part of what lookups cost.
            end = looked_up if checks else perf_counter()
            self._lookups.record_cost(end - start, len(seqs))
        return self._decisions

    def _members(self, seq: SequenceState) -> Sequence[Hashable]:
        """Names of the drafters allowed to draft for ``seq``."""
        return self.members.get(seq.params.drafter or self._default, ())

    def _models(self, seq: SequenceState) -> list[Hashable]:
        """The drafters allowed for ``seq`` that are no lookups."""
        return [name for name in self._members(seq) if name not in self._lookups.drafters]

    def _decide(
        self, ids: list[int], seqs: Sequence[SequenceState], offers: Mapping[int, Offers]
    ) -> None:
        batch, same_batch = len(seqs), ids == self._ids
        has_fixed = any(seq.params.draft_length is not None for seq in seqs)
        self._ids, self._decisions = ids, [Decision(0, None, NOT_ASKED)] * batch
        no_draft = DraftOption(None, 0, 0.0, 1.0, self.cost.verification(batch) / batch)
        options: dict[int, list[DraftOption]] = {}  # by index, of sequences without a fixed length
        for index, seq in enumerate(seqs):
            self.learner.tokens_read(seq)
            asked, offered = seq.params.draft_length, offers.get(seq.seq_id, {})
            if asked is not None and seq.params.may_draft:
                self._decisions[index] = fixed_length(asked, self._options(seq, batch, offered))
            elif seq.params.may_draft:
                paying = self._options(seq, batch, offered, only_if_may_pay=True)
                options[index] = [no_draft, *paying]
        chosen, alternative, self._exploration_price = [no_draft] * len(options), 0.0, 0.0
        if options:
            undecided = [seqs[index] for index in options]
            chosen, alternative = self._select(batch, list(options.values()), undecided)
        goodput = max((draft.goodput for draft in chosen), default=0.0)
        measures_plain = self.cost.wants_plain_step(batch, goodput * no_draft.seconds)
        if measures_plain:
            chosen, alternative = [no_draft] * len(options), 0.0
        drafts = {ids[n]: draft for n, draft in zip(options, chosen, strict=True) if draft.length}
        self._batch_decision = BatchDecision(drafts, alternative, measures_plain, has_fixed)
        for index, draft in zip(options, chosen, strict=True):
            could_draft = ids[index] in offers or bool(self._models(seqs[index]))
            self._decisions[index] = self._decision(draft, no_draft, could_draft)
        self._decided, self._keep = self._step, self._steps_to_keep(same_batch)

    def _decision(self, draft: DraftOption, no_draft: DraftOption, could_draft: bool) -> Decision:
        if draft.length:
            speedup = draft.goodput * no_draft.seconds
            reason = "exploration" if self._batch_decision.alternative else ""
            return Decision(draft.length, draft.name, reason, speedup)
        if self._batch_decision.measures_plain:
            return Decision(0, None, MEASURING)
        return Decision(0, None, NOT_WORTH_IT if could_draft else NOTHING_FOUND)

    def _steps_to_keep(self, same_batch: bool) -> int:
        """Steps for which the decision is kept as long as lookups offer nothing."""
        drafts, alternative, measures_plain, has_fixed = self._batch_decision
        if not drafts:
            return 1 if measures_plain else _KEEP_PLAIN if has_fixed else _KEEP_PLAIN_LONG
        models = not any(self.cost.drafters[draft.name].model_free for draft in drafts.values())
        known = same_batch and models and not alternative and self._step > _EARLY_STEPS
        return min(2 * self._keep, _KEEP_DRAFTS) if known else 1

    def _options(
        self, seq: SequenceState, batch: int, offers: Offers, only_if_may_pay: bool = False
    ) -> list[DraftOption]:
        """Drafts of all lengths by the models allowed for ``seq`` (or by those that may pay), and
        the lookups' offers, cut at several lengths."""
        options, kind = list[DraftOption](), kind_of(seq.params)
        forced_tokens = seq.constraint.forced_tokens() or () if seq.constraint else ()
        for name in self._members(seq):
            if (offer := offers.get(name)) is not None:
                options += self.draft_options(seq, name, batch, offer.forced_levels, offer)
            elif name not in self._lookups.drafters:
                takes = len(forced_tokens) <= self.cost.drafters[name].max_forced_tokens
                forced = len(forced_tokens) * takes
                if forced or not only_if_may_pay or self.cost.may_pay(name, batch, kind):
                    options += self.draft_options(seq, name, batch, forced)
        return options

    def draft_options(
        self,
        seq: SequenceState,
        name: Hashable,
        batch: int,
        forced: int = 0,
        offer: LookupDraft | None = None,
        longest: int | None = None,
    ) -> list[DraftOption]:
        """A drafter's drafts for ``seq``, of up to ``longest`` levels; for a lookup: parts of its
        ``offer``. ``forced``: leading levels that a grammar forces."""
        cost, costs, remaining = self.cost, self.cost.drafters[name], seq.remaining
        most = min(longest or costs.max_length, remaining - 1, offer.levels if offer else remaining)
        if batch > 1:  # at most twice as long as any draft before
            most = min(most, max(1, 2 * cost.longest_made(name, batch)))
        if most < 1:
            return []
        lengths: Sequence[int] = range(1, 1 + most)
        if batch > 1 or offer:
            lengths = [*(n for n in _LENGTHS if n < most), most]
        kind = kind_of(seq.params, offer.match_length if offer else None)
        rates = cost.acceptance.rates(seq.seq_id, name, kind, most)
        tokens = expected_tokens(([1.0] * forced + rates)[:most])
        unread = (
            len(seq.tokens) - 1 - self.learner.tokens_read(seq)[name] if costs.needs_prefill else 0
        )
        reading_now = unread * cost.reading_token(name) if unread > _FEW_UNREAD else 0.0
        reading_now += 0.0 if costs.model_free else self.learner.cold_seconds(batch) / batch
        horizon = min(remaining, _READING_HORIZON)
        nodes = offer.nodes if offer else cost.table(name, batch).nodes
        prices = () if offer else cost.prices_for(name, batch, tokens, kind, forced > 0)
        options = list[DraftOption]()
        for n in lengths:
            reading = reading_now * tokens[n] / horizon
            price = cost.verification(batch, nodes[n]) / batch if offer else prices[n]
            share = price + reading, reading, reading_now
            options.append(DraftOption(name, n, nodes[n], tokens[n], *share, kind, min(forced, n)))
        return options

    def _select(
        self, batch: int, options: Sequence[list[DraftOption]], seqs: Sequence[SequenceState]
    ) -> tuple[list[DraftOption], float]:
        """The options with the most goodput, and 0; or drafts to learn from, and the seconds per
        token of the best alternative.

        Start-up measures one sequence best. For several, a model's first drafts are exploration.
        """
        best, plain = choose(self.cost, batch, options, self._fair), self.cost.verification(batch)
        can_explore = self.budget.seconds > 0
        self._exploration_price = inf if can_explore else 0.0
        if can_explore and (longer := with_more_nodes(self.cost, batch, options, best)):
            return longer, plain
        names = dict.fromkeys(draft.name for draft in best if draft.length)
        models = [name for name in names if not self.cost.drafters[name].model_free]
        untried = [name for name in models if not self.cost.longest_made(name, batch)]
        candidates = list(dict.fromkeys(name for seq in seqs for name in self._models(seq)))
        beside = batch == 1 and bool(names)  # the others wait for their turns
        if beside:
            plain, untried = 1 / best[0].goodput, []
            for name in models:
                self._turns.pop(name, None)
            due = [n for n in candidates if self._step >= self._turns.get(n, (0, 0))[0]]
            candidates = [name for name in due if name not in names]
            if not models:  # beside a lookup whose match is long, even perfect drafts would lose
                most: dict[Hashable, float] = {}  # goodput if all tokens were accepted
                for draft in options[0]:
                    goodput = (1 + draft.length) / draft.seconds
                    most[draft.name] = max(goodput, most.get(draft.name, 0.0))
                candidates = [n for n in candidates if most.get(n, inf) > best[0].goodput]
        elif names:
            candidates = untried
        for name in candidates if can_explore else ():
            if drafts := self._explore(name, batch, options, seqs):
                if beside:  # each time twice as long
                    wait = self._turns.get(name, (0, _FIRST_WAIT))[1]
                    self._turns[name] = self._step + wait, min(2 * wait, _LONGEST_WAIT)
                return drafts, plain
        if untried:
            tried = [[d for d in some if d.name not in untried] or some for some in options]
            best = choose(self.cost, batch, tried, self._fair)
        return best, 0.0

    def _explore(
        self,
        name: Hashable,
        batch: int,
        options: Sequence[list[DraftOption]],
        seqs: Sequence[SequenceState],
    ) -> list[DraftOption]:
        """Drafts of one level by a drafter, to learn from: for each of its sequences whose text it
        has read, else for the one with the least to read. Empty if the budget does not pay for them
        even if none is accepted."""
        drafts: dict[int, DraftOption] = {}
        for index, (alternatives, seq) in enumerate(zip(options, seqs, strict=True)):
            candidates = [draft for draft in alternatives if draft.name == name]
            if not candidates and name in self._models(seq):
                # It was not expected to pay: start-up may have measured it wrong, or its first
                # drafts were unlucky.
                candidates = self.draft_options(seq, name, batch, longest=1)
            if candidates:
                drafts[index] = candidates[0]
        if not drafts:
            return []
        least = min(drafts, key=lambda index: drafts[index].reading_now)
        drafts = {n: d for n, d in drafts.items() if n == least or not d.reading_now}
        price = self.cost.step(batch, drafts.values()) - self.cost.verification(batch)
        price += drafts[least].reading_now
        if price > self.budget.seconds:
            self._exploration_price = min(self._exploration_price, price)
            return []
        return [drafts.get(n, alternatives[0]) for n, alternatives in enumerate(options)]

    def observe(
        self, commits: Sequence[Commit], seconds: float, drafting: float | None = None
    ) -> None:
        if self._batch_decision.drafts:
            self._lookups.record_gain(commits, self._batch_decision.drafts, seconds)
        self.learner.observe(self._batch_decision, commits, seconds, drafting)

    def forget(self, seq_id: int) -> None:
        self._lookups.forget(seq_id)
        self.learner.forget(seq_id)
        if seq_id in self._ids:
            del self._decisions[self._ids.index(seq_id)]
            self._ids.remove(seq_id)
        if self._batch_decision.drafts:  # a plain decision is kept for the other sequences
            self._batch_decision = BatchDecision()
            self._decided = -_KEEP_DRAFTS  # so long ago that it is not kept
