"""How long to draft: fixed, or the length that maximises expected tokens per second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from paceline.core.batch import Commit
from paceline.core.sequence import SequenceState, SequenceView
from paceline.pace.acceptance import expected_tokens, levels_tried
from paceline.pace.choice import choose
from paceline.pace.cost import CostModel, Draft
from paceline.pace.ledger import KEPT, SHARE, Ledger

AnySequence = SequenceState | SequenceView
Prospect = tuple[AnySequence, Sequence[Draft]]  # a sequence and its options, none first

_HOLD = 4  # steps at most for which drafts of the same batch keep their lengths
_WAIT = 32  # steps in which a team saves for looking, and for a draft then
_HOLD_PLAIN = 8  # where nothing is drafted, so that nothing is learnt
_PRICED = 4  # drafts after which prices are believed by which a drafter cannot pay
_HORIZON = 256  # tokens at most over which reading a prompt is written off
_READ_ALONG = 8  # unread tokens that cost next to nothing
_SURPRISE = 0.5  # plain steps beyond what was predicted; the rest is hardly the draft's doing


class Controller:
    """Decides how long to draft; one that does not adapt need not look at steps."""

    def lengths(self, seqs: Sequence[SequenceState]) -> list[int]:
        """Draft length (tree levels) decided on for each sequence; 0 is plain decoding."""
        raise NotImplementedError

    def observe(
        self, commits: Sequence[Commit], seconds: float, drafting: float | None = None
    ) -> None:
        """See a step's outcome, its wall time, and the part of it that drafting took (if known)."""

    def forget(self, seq_id: int) -> None:
        """A sequence is done, or begins anew."""


class FixedLength(Controller):
    """The same draft length for all sequences, always."""

    def __init__(self, length: int) -> None:
        self._length = length

    def lengths(self, seqs: Sequence[SequenceState]) -> list[int]:
        return [self._length] * len(seqs)


@dataclass
class Decision:
    """What is drafted in the steps to come, as long as the batch stays the same.

    A team that ``looks`` for drafts adds what it has ``made`` of them, whether as a ``probe``, and
    the seconds in which it ``looked``.
    """

    ids: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    hold: int = 1  # steps
    until: int = 0  # the step from which it is made anew
    made: dict[int, Draft] = field(default_factory=dict)  # by sequence
    probe: bool = False
    looks: set[str] = field(default_factory=set)
    looked: float = 0.0
    given: bool = False  # some requests have a length of their own: such steps are no measure


class AdaptiveLength(Controller):
    """Per sequence and drafter, from observed acceptance and the costs of steps on this machine.

    Predictions choose the drafts (choice.py), and the ledger decides whether they may be made;
    where nothing is drafted, one to learn from is made now and then. It depends on the past only,
    never on the tokens being drafted, so it cannot bias the output.

    Requests name a drafter that the cost model knows, or one of the ``teams``: the names of its
    members. Teams (hybrid.py) ask for a ruling themselves once they have looked; here it is decided
    whether they look. Requests that name none have the ``default``; a request's own
    ``draft_length`` stands.
    """

    def __init__(
        self,
        cost: CostModel,
        teams: Mapping[str, Sequence[Hashable]] | None = None,
        default: str | None = None,
    ) -> None:
        self.cost, self.ledger = cost, Ledger()
        self.teams = dict(teams or {})
        self._default = default
        self.decision = Decision()
        self._step = 0
        self._look_from = 0  # after a step: before that, looking in vain is not paid for
        self._seen: list[tuple[Decision, Sequence[Commit], float, float | None]] = []
        self._read: dict[int, dict[Hashable, int]] = {}  # tokens of a sequence, seen by a drafter
        self._joined: dict[int, int] = {}  # tokens that a sequence came with, and are prefilled
        # Members that are known by what they proposed, whoever drafted.
        everyone = (name for team in self.teams.values() for name in team)
        self._followed = {name for name in everyone if cost.drafters[name].costless}

    # -- deciding ----------------------------------------------------------------------------------

    def lengths(self, seqs: Sequence[SequenceState]) -> list[int]:
        self._step += 1
        ids = [seq.seq_id for seq in seqs]
        if self._step >= self.decision.until or ids != self.decision.ids:
            self._learn_all()
            self.decision = self._decide(ids, seqs)
        return self.decision.lengths

    def _decide(self, ids: list[int], seqs: Sequence[SequenceState]) -> Decision:
        batch, given = len(seqs), [seq.params.draft_length for seq in seqs]
        for seq in seqs:
            self._joined.setdefault(seq.seq_id, len(seq.tokens))
        default = self._default or str(next(iter(self.teams or self.cost.drafters)))
        found = Decision(ids, [length or 0 for length in given], until=self._step + 1)
        found.given = any(length is not None for length in given)
        if self.cost.wants_plain(batch):
            return found
        own: dict[int, str] = {}
        for place, seq in enumerate(seqs):
            name = seq.params.drafter or default
            if given[place] is None and name in self.teams:
                found.lengths[place] = self._bound(name, batch)
                found.looks.add(name)
            elif given[place] is None and name in self.cost.drafters:
                own[place] = name
        none = self.cost.none(batch)
        prospects = [(seqs[p], [none, *self.drafts(seqs[p], n, batch)]) for p, n in own.items()]
        drafts, found.probe = self.rule(batch, prospects) if own else ([], False)
        for place, draft in zip(own, drafts, strict=True):
            found.lengths[place] = draft.length
            if draft.length:
                found.made[ids[place]] = draft
        found.hold = self._hold(batch, drafts, found)
        found.until = self._step + found.hold
        return found

    def _bound(self, team: str, batch: int) -> int:
        """The longest draft that a team may look for: none where no member may draft."""
        plain, members = self.cost.rest(batch), self.teams[team]
        most = max(self.ledger.allowance(member, batch, plain) for member in members)
        if most <= 0 or self._step <= self._look_from:
            return 0
        return max(self.cost.drafters[member].longest for member in members)

    def _hold(self, batch: int, drafts: Sequence[Draft], found: Decision) -> int:
        """Steps for which a decision stands: few where they might cost more than was won."""
        if not any(found.lengths):
            return _WAIT if found.looks else _HOLD_PLAIN
        if found.probe or found.looks or not found.made:
            return 1
        plain, names = self.cost.rest(batch), {draft.name for draft in found.made.values()}
        covered = min(self.ledger.allowance(name, batch, plain) for name in names)
        risk = self.cost.step(batch, drafts) - plain
        # A new batch, or new drafts, are looked at again soon: 1, 2, 4 steps later.
        before = self.decision
        longest = 2 * before.hold if before.made and before.ids == found.ids else 1
        return max(1, min(longest, _HOLD, int(covered / max(risk, 1e-9))))

    def drafts(
        self,
        seq: AnySequence,
        name: Hashable,
        batch: int,
        kind: Hashable = None,
        lengths: Sequence[int] | None = None,
    ) -> list[Draft]:
        """What a drafter may draft for a sequence; acceptance is learnt by ``kind``."""
        left, profile = max(_remaining(seq), 1), self.cost.drafters[name]
        own = self.cost.acceptance.of(seq.seq_id, name if kind is None else kind)
        lost = self.ledger.lost(seq.seq_id, self.cost.rest(batch))
        gains = expected_tokens(own.rates(max(lengths) if lengths else profile.longest, lost))
        if left < len(gains):  # what comes after the last token is no gain
            gains = [min(gain, left) for gain in gains]
        if profile.reads:
            read = self._read.setdefault(seq.seq_id, {})
            joined = self._joined.get(seq.seq_id, seq.prompt_length)
            read.setdefault(name, joined if profile.follows else 0)
        unread = self._unread(seq.seq_id, name, len(seq.tokens))
        first = unread * self.cost.reading(name) if unread > _READ_ALONG else 0.0
        return self.cost.drafts(name, batch, gains, first, min(left, _HORIZON), lengths)

    def _unread(self, seq_id: int, name: Hashable, tokens: int) -> int:
        """Of so many tokens, those that a drafter has to read first, but for the newest."""
        reads = self.cost.drafters[name].reads
        return max(0, tokens - self._read.get(seq_id, {}).get(name, 0) - 1) if reads else 0

    # -- what may be drafted -----------------------------------------------------------------------

    def rule(self, batch: int, prospects: Sequence[Prospect]) -> tuple[list[Draft], bool]:
        """The best of the drafts whose risk is covered, else a probe, else none; whether a probe.

        ``batch`` counts all sequences of the step.
        """
        plain, names = self.cost.rest(batch), {d.name for _, own in prospects for d in own[1:]}
        asked = max(1, sum(len(own) > 1 for _, own in prospects))
        most = {
            name: plain / batch + self.ledger.allowance(name, batch, plain) / asked
            for name in sorted(names, key=str)
        }
        covered = [
            [own[0], *(o for o in own[1:] if o.risk <= most[o.name])] for _, own in prospects
        ]
        best = choose(self.cost, batch, covered)
        if any(draft.length for draft in best):
            return best, False
        for name in most:
            probe = None if name in self._followed else self._probe(name, batch, prospects)
            if probe is not None:
                return probe, True
        return best, False

    def _probe(
        self, name: Hashable, batch: int, prospects: Sequence[Prospect]
    ) -> list[Draft] | None:
        """Drafts to learn from, if the purse pays for them should none of them be right.

        One level for all sequences of a drafter, which tells most about its costs; if that is more
        than the purse ever holds, the likeliest draft of the sequence that has least to be read.
        """
        plain, table = self.cost.rest(batch), self.cost.table(name, batch)
        pays = max((1 + n) / table[n] for n in range(1, len(table))) * table[0] > 1.02
        if not pays and self.cost.seen(name, batch) >= _PRICED:
            return None  # even a draft that is always right would not pay

        def stake(drafts: Sequence[Draft]) -> float:
            return self.cost.step(batch, drafts) - plain + sum(draft.first for draft in drafts)

        own = [
            [o for o in options if o.name == name and _remaining(seq) > 1]
            for seq, options in prospects
        ]
        none = [options[0] for _, options in prospects]
        drafts = [(drafts or [no])[0] for drafts, no in zip(own, none, strict=True)]
        if stake(drafts) > KEPT * plain:
            place = min(range(len(own)), key=lambda n: own[n][0].first if own[n] else inf)
            ways = [[*none[:place], draft, *none[place + 1 :]] for draft in own[place]]
            ways = [way for way in ways if stake(way) <= self.ledger.purse]
            drafts = max(ways, key=lambda way: way[place].gain / way[place].seconds, default=none)
        paid = any(draft.length for draft in drafts) and stake(drafts) <= self.ledger.purse
        return drafts if paid else None

    # -- learning ----------------------------------------------------------------------------------

    def observe(
        self, commits: Sequence[Commit], seconds: float, drafting: float | None = None
    ) -> None:
        held, batch = self.decision, len(commits)
        if any(held.lengths):
            self._seen.append((held, commits, seconds, drafting))
            if held.looks:  # who decides by itself learns with every step
                self._learn_all()
            return
        # Nothing was to be drafted. Such steps must cost next to nothing, as plain ones do.
        self.ledger.pass_by(seconds, self.cost.rest(batch), batch)
        due = self._step % 4 == 0 or self.cost.wants_plain(batch)
        if due and all(commit.scheduled == 1 for commit in commits):
            self.cost.learn(batch, 0, seconds)

    def _learn_all(self) -> None:
        """Learn from the steps since the last decision, all at once.

        Between two forwards this code is not in the processor's caches any more: 48 microseconds
        a step measured one by one, 9 where the step before was looked at just before.
        """
        seen, self._seen = self._seen, []
        for step in seen:
            self._learn_step(*step)

    def _learn_step(
        self, held: Decision, commits: Sequence[Commit], seconds: float, drafting: float | None
    ) -> None:
        batch, cost = len(commits), self.cost
        made = {c.seq_id: held.made[c.seq_id] for c in commits if c.seq_id in held.made}
        tried = [commit for commit in commits if commit.drafted and commit.seq_id in made]
        unread = sum(self._learn(commit, made[commit.seq_id]) for commit in tried)
        plain = cost.rest(batch)
        self.ledger.pass_by(seconds, plain, batch)
        if held.given or not all(commit.scheduled == 1 and commit.tokens for commit in commits):
            return  # a step that prefills is no measure
        passes = {
            name: cost.passes(name, [d.length for d in made.values() if d.name == name])
            for name in dict.fromkeys(draft.name for draft in made.values())
        }
        sizes = [commit.drafted for commit in commits]
        nodes, even = sum(sizes), len(set(sizes)) == 1
        rest, took = cost.foresee(batch, nodes / batch, even, passes)
        if drafting is not None:
            drafting = max(drafting - held.looked, 0.0)
        reading = 0.0
        if unread > 4 * batch and len(passes) == 1:
            (name,) = passes
            reading = unread * cost.reading(name)
            if drafting is not None:  # all that it took beyond its passes
                cost.learn_reading(name, max(drafting - took, 0.0), unread)
        elif unread <= 4 * batch:
            cost.learn(batch, nodes, seconds - held.looked, drafting, even, passes)
        names = Counter(made[commit.seq_id].name for commit in tried)
        if names:
            seconds = min(seconds, rest + took + reading + _SURPRISE * plain)
        else:  # what was looked for was not found
            names = Counter([*passes, *(n for team in held.looks for n in self.teams[team])])
            spent = min((drafting or 0.0) + held.looked, _SURPRISE * plain)
            seconds = plain + spent
            if not any(self.ledger.won(name, batch, plain) > 0 for name in names):
                self._look_from = self._step + int(min(spent / (SHARE * plain), _WAIT))
        tokens = {commit.seq_id: len(commit.tokens) for commit in commits}
        self.ledger.settle(names, tokens, seconds, plain, held.probe)

    def _learn(self, commit: Commit, draft: Draft) -> int:
        """What a draft showed. Returns the tokens that the drafter had to read for it."""
        name, profile = draft.name, self.cost.drafters[draft.name]
        length = min(draft.length, profile.longest)
        self.cost.record_fill(name, commit.drafted, length)
        if name not in self._followed:
            reached = levels_tried(commit, length)
            self.cost.acceptance.record(commit.seq_id, name, reached, len(commit.path))
        if not profile.reads:
            return 0
        end = commit.position + commit.scheduled
        unread = self._unread(commit.seq_id, name, end)
        self._read.setdefault(commit.seq_id, {})[name] = end + len(commit.path)
        return unread

    def forget(self, seq_id: int) -> None:
        self._learn_all()
        self.decision.until = 0  # the same sequences may be back at once
        self._read.pop(seq_id, None)
        self._joined.pop(seq_id, None)
        self.ledger.forget(seq_id)
        self.cost.acceptance.forget(seq_id)


def _remaining(seq: AnySequence) -> int:
    """Tokens that may still be generated."""
    return seq.params.max_tokens - (len(seq.tokens) - seq.prompt_length)
