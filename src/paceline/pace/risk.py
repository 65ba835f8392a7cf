"""What may be drafted: the best drafts, as far as what they risk is covered by the ledger.

Between prediction and ledger: predictions say which drafts are best and what a step with them
takes; here that is held against what the drafters and the sequences themselves may lose, and where
nothing seems to pay, what a draft to learn from may cost. The controller and hybrids ask the same
object, for whole drafters and for what their members found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

from paceline.core.sequence import SequenceState, SequenceView
from paceline.pace.choice import choose, cut
from paceline.pace.cost import CostModel, Draft, group_of
from paceline.pace.ledger import KEPT, SHARE, Ledger

HOLD = 4  # steps at most for which drafts of the same batch keep their lengths
HOLD_PLAIN = 32  # where nothing is drafted, so that nothing is learnt
_TRIALS = 4  # drafts after which a drafter's prices are believed where it cannot pay
_IDLE = 128  # rulings for others, after which a drafter is tried again
_HORIZON = 256  # tokens at most over which reading a prompt is written off
_READ_ALONG = 8  # unread tokens that cost next to nothing

AnySequence = SequenceState | SequenceView
Prospect = tuple[AnySequence, Sequence[Draft]]  # a sequence and its options, none first


@dataclass(frozen=True)
class Ruling:
    """A draft for each sequence, and why: ``hopeless`` if no draft seemed to pay.

    ``missing``: seconds that the ledger lacks for what seemed best.
    """

    drafts: list[Draft]
    probe: bool = False
    hopeless: bool = False
    missing: float = 0.0


def remaining(seq: AnySequence) -> int:
    """Tokens that may still be generated."""
    return seq.params.max_tokens - (len(seq.tokens) - seq.prompt_length)


class Risk:
    """Rules on drafts. ``made`` are those of hybrids in the step under way, by sequence.

    ``looked``: seconds of the step in which they looked for drafts, whoever then made them.
    """

    def __init__(self, cost: CostModel) -> None:
        self.cost, self.ledger = cost, Ledger()
        self.begin()
        self._tried: Counter[tuple[Hashable, int]] = Counter()  # steps by drafter and concurrency
        self._idle: Counter[Hashable] = Counter()
        self._read: dict[int, dict[Hashable, int]] = {}  # tokens of a sequence that it has seen

    # -- what is told ------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins."""
        self.made: dict[int, Draft] = {}
        self.looked = 0.0
        self.probed = False

    def tried(self, name: Hashable, batch: int) -> None:
        """A drafter drafted in a step of so many sequences."""
        self._tried[name, group_of(batch)] += 1

    def has_read(self, seq_id: int, name: Hashable, tokens: int) -> None:
        """A drafter has seen so many tokens of a sequence."""
        self._read.setdefault(seq_id, {})[name] = tokens

    def unread(self, seq_id: int, name: Hashable, tokens: int) -> int:
        """Of so many tokens, those that a drafter would have to read first, but for the newest."""
        if not self.cost.drafters[name].reads:
            return 0
        return max(0, tokens - self._read.get(seq_id, {}).get(name, 0) - 1)

    def forget(self, seq_id: int) -> None:
        self._read.pop(seq_id, None)
        self.ledger.forget(seq_id)
        self.cost.acceptance.forget(seq_id)

    # -- ruling ------------------------------------------------------------------------------------

    def drafts(
        self,
        seq: AnySequence,
        name: Hashable,
        batch: int,
        kind: Hashable = None,
        lengths: Sequence[int] | None = None,
    ) -> list[Draft]:
        """What a drafter may draft for a sequence; acceptance is learnt by ``kind``."""
        seq_id, left, profile = seq.seq_id, max(remaining(seq), 1), self.cost.drafters[name]
        own = self.cost.acceptance.of(seq_id, name if kind is None else kind)
        most = max(lengths) if lengths else profile.longest
        tokens = own.tokens(most, self.ledger.lost(seq_id))
        if left <= most:  # what comes after the last token is no gain
            gains, safe = ([min(count, left) for count in counts] for counts in tokens)
            tokens = gains, safe
        if profile.follows and name not in self._read.get(seq_id, {}):
            self.has_read(seq_id, name, seq.prompt_length)
        unread = self.unread(seq_id, name, len(seq.tokens))
        reading = unread * self.cost.reading(name) / min(left, _HORIZON)
        reading = reading if unread > _READ_ALONG else 0.0
        return self.cost.drafts(name, batch, tokens, reading, lengths)

    def rule(
        self, batch: int, prospects: Sequence[Prospect], followed: Collection[Hashable] = ()
    ) -> Ruling:
        """The best drafts whose risk is covered; else a probe; else none.

        ``batch`` counts all sequences of the step. Drafters that are ``followed`` are known
        without being tried, and what they propose is at hand.
        """
        options = [own for _, own in prospects]
        best = choose(self.cost, batch, options)
        hopeless = not any(draft.length for draft in best)
        found, missing = self._covered(batch, prospects, best)
        if found is None and followed and not hopeless:
            options = [[o for o in own if not o.length or o.name in followed] for own in options]
            found, _ = self._covered(batch, prospects, choose(self.cost, batch, options))
        probe = self._probe(batch, prospects, found or (), followed)
        drafts = probe or found or [own[0] for own in options]
        return Ruling(drafts, probe is not None, hopeless, missing)

    def hold(self, batch: int, prospects: Sequence[Prospect], ruling: Ruling) -> int:
        """Steps for which a ruling may stand: few where they might cost more than may be lost."""
        drafts, plain = ruling.drafts, self.cost.rest(batch)
        if ruling.probe:
            return 1
        if not any(draft.length for draft in drafts):  # until there is enough to draft
            wait = ruling.missing / (SHARE * plain) or HOLD_PLAIN
            return max(1, int(min(wait, HOLD_PLAIN)))
        loss = HOLD * (self.cost.step(batch, drafts) - plain)
        close = any(self.ledger.own(s.seq_id, remaining(s), plain) < loss for s, _ in prospects)
        dear = HOLD * self._risk(batch, prospects, drafts) > self._allowance(batch, drafts)
        return 1 if close or dear else HOLD

    def _covered(
        self, batch: int, prospects: Sequence[Prospect], best: Sequence[Draft]
    ) -> tuple[list[Draft] | None, float]:
        """These drafts, no longer than what they risk is covered; else what is missing."""
        most, missing = max(draft.length for draft in best), 0.0
        while most:
            drafts = [cut(own, d, most) for (_, own), d in zip(prospects, best, strict=True)]
            missing = self._risk(batch, prospects, drafts) - self._allowance(batch, drafts)
            if missing <= 0:
                return drafts, 0.0
            most -= 1
        return None, missing

    def _allowance(self, batch: int, drafts: Sequence[Draft]) -> float:
        names, plain = {d.name for d in drafts if d.length}, self.cost.rest(batch)
        return min((self.ledger.allowance(n, batch, plain) for n in names), default=0.0)

    def _risk(self, batch: int, prospects: Sequence[Prospect], drafts: Sequence[Draft]) -> float:
        """Seconds that a step may cost beyond what is sure to be gained by it.

        A drafter that has to read first is lent the time if that is sure to come in again.
        """
        plain = self.cost.rest(batch)
        safe = sum(draft.safe for draft in drafts) + batch - len(drafts)
        risk = self.cost.step(batch, drafts) - plain * safe / batch
        reading = self._reading(prospects, drafts)
        if not reading:
            return risk
        written_off = sum(draft.reading * draft.safe / draft.gain for draft in drafts)
        names = {draft.name for draft in drafts if draft.length}
        lent = all(self.ledger.may_lend(name, plain) for name in names)
        return risk + (written_off if lent and risk + written_off <= 0 else reading)

    def _reading(self, prospects: Sequence[Prospect], drafts: Sequence[Draft]) -> float:
        """Seconds in which drafters read what they have not seen of their sequences."""
        return sum(
            self.unread(seq.seq_id, draft.name, len(seq.tokens)) * self.cost.reading(draft.name)
            for (seq, _), draft in zip(prospects, drafts, strict=True)
            if draft.length
        )

    # -- trying what does not seem to pay ----------------------------------------------------------

    def _probe(
        self,
        batch: int,
        prospects: Sequence[Prospect],
        chosen: Sequence[Draft],
        followed: Collection[Hashable],
    ) -> list[Draft] | None:
        """Drafts to learn from, if the purse pays and they could change anything.

        Where others draft, only of drafters that have long not been used.
        """
        used = {draft.name for draft in chosen if draft.length}
        for name in dict.fromkeys(draft.name for _, own in prospects for draft in own[1:]):
            self._idle[name] = 0 if name in used else self._idle[name] + 1
            if name in followed or name in used or (used and self._idle[name] < _IDLE):
                continue
            table = self.cost.table(name, batch)
            pays = max((1 + n) / table[n] for n in range(1, len(table))) * table[0] > 1.02
            if not pays and self._tried[name, group_of(batch)] >= _TRIALS:
                continue  # even a draft that is always right would not pay
            # What a draft at hand would have gained is lost, too.
            lost = self.cost.rest(batch) * max((d.gain - 1 for d in chosen), default=0.0)
            for drafts in self._trials(batch, prospects, name):
                if lost + self._stake(batch, prospects, drafts) <= self.ledger.purse:
                    self._idle[name] = 0
                    return drafts
        return None

    def _trials(
        self, batch: int, prospects: Sequence[Prospect], name: Hashable
    ) -> Iterable[list[Draft]]:
        """In turn one level for all sequences of a drafter, which tells most about its costs, and
        several for one of them, which risks least."""
        everyone = [[d for d in own if d.name == name and d.length] for _, own in prospects]
        places = [n for n, (seq, _) in enumerate(prospects) if everyone[n] and remaining(seq) > 1]
        if not places:
            return
        none = [own[0] for _, own in prospects]
        wide = [everyone[n][0] if n in places else draft for n, draft in enumerate(none)]
        if self._tried[name, group_of(batch)] % 2 == 0:
            yield wide
            if self._stake(batch, prospects, wide) <= KEPT * self.cost.rest(batch):
                return
        unread = [self.unread(seq.seq_id, name, len(seq.tokens)) for seq, _ in prospects]
        one = min(places, key=lambda place: unread[place])
        likeliest = max(everyone[one], key=lambda draft: draft.gain / draft.seconds)
        own = [none[one], *everyone[one]]
        for draft in (cut(own, likeliest, remaining(prospects[one][0]) - 1), own[1]):
            yield [*none[:one], draft, *none[one + 1 :]]

    def _stake(self, batch: int, prospects: Sequence[Prospect], drafts: Sequence[Draft]) -> float:
        """Seconds lost if nothing of these drafts is right, and nothing is drafted ever after."""
        seconds = self.cost.step(batch, drafts) - self.cost.rest(batch)
        return seconds + self._reading(prospects, drafts)
