"""What may be drafted: the best drafts, as far as what they risk is covered by the ledger.

Between prediction and ledger: predictions say which drafts are best and what a step with them
takes; here that is held against what the drafters and the sequences themselves may lose, and where
nothing seems to pay, what a draft to learn from may cost. The controller and hybrids ask the same
object, for whole drafters and for what their members found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from paceline.core.params import SamplingParams
from paceline.pace.choice import choose, cut
from paceline.pace.cost import CostModel, Draft, group_of
from paceline.pace.ledger import KEPT, SHARE, Ledger

HOLD = 4  # steps at most for which drafts of the same batch keep their lengths
HOLD_PLAIN = 32  # where nothing is drafted, so that nothing is learnt
_TRIALS = 4  # drafts after which a drafter's prices are believed where it cannot pay
_IDLE = 128  # rulings for another drafter, after which one is tried again
_HORIZON = 256  # tokens at most over which reading a prompt is written off
_READ_ALONG = 8  # unread tokens that cost next to nothing


@dataclass(frozen=True)
class Facts:
    """What is to be known of a sequence: its tokens so far, those of its prompt, its request."""

    seq_id: int
    tokens: int
    prompt: int
    params: SamplingParams

    @property
    def remaining(self) -> int:
        return self.params.max_tokens - (self.tokens - self.prompt)


Prospect = tuple[Facts, Sequence[Draft]]  # a sequence and its options, none first


@dataclass(frozen=True)
class Ruling:
    """A draft for each sequence, for how many steps they hold at most, and why they are so."""

    drafts: list[Draft]
    hold: int
    probe: bool = False
    hopeless: bool = False  # no draft seemed to pay


class Risk:
    """Rules on drafts. ``made`` are those of the step under way, by sequence.

    ``looked``: seconds of the step in which hybrids looked for drafts, whoever then made them.
    """

    def __init__(self, cost: CostModel) -> None:
        self.cost, self.ledger = cost, Ledger()
        self.made: dict[int, Draft] = {}
        self.looked = 0.0
        self.probed = False
        self._tried: Counter[tuple[Hashable, int]] = Counter()  # steps by drafter and concurrency
        self._idle: Counter[Hashable] = Counter()
        self._read: dict[int, dict[Hashable, int]] = {}  # tokens of a sequence that it has seen

    # -- what is told ------------------------------------------------------------------------------

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

    # -- options -----------------------------------------------------------------------------------

    def options(
        self, facts: Facts, name: Hashable, batch: int, kind: Hashable = None
    ) -> list[Draft]:
        """Drafts of every length for a sequence; ``kind`` is what acceptance is learnt for."""
        own = self.cost.acceptance.of(facts.seq_id, name if kind is None else kind)
        gains = own.expected_tokens(self.ledger.lost(facts.seq_id))
        safe, remaining = own.cautious_tokens(), max(facts.remaining, 1)
        if remaining < len(gains):  # what comes after the last token is no gain
            gains, safe = ([min(g, remaining) for g in tokens] for tokens in (gains, safe))
        profile = self.cost.drafters[name]
        if profile.follows and name not in self._read.get(facts.seq_id, {}):
            self.has_read(facts.seq_id, name, facts.prompt)
        unread = self.unread(facts.seq_id, name, facts.tokens)
        reading = 0.0
        if unread > _READ_ALONG:
            reading = unread * self.cost.reading(name) / min(remaining, _HORIZON)
        return self.cost.options(name, batch, gains, safe, reading)

    # -- ruling ------------------------------------------------------------------------------------

    def rule(
        self, batch: int, prospects: Sequence[Prospect], followed: Collection[Hashable] = ()
    ) -> Ruling:
        """The best drafts whose risk is covered; else a probe; else none.

        ``batch`` counts all sequences of the step. Drafters that are ``followed`` are known
        without being tried.
        """
        options = [own for _, own in prospects]
        best = choose(self.cost, batch, options)
        hopeless = not any(draft.length for draft in best)
        found, missing = self._covered(batch, prospects, best)
        if found is None and any(draft.name in followed for own in options for draft in own):
            # Drafts that are at hand risk only their rows.
            options = [[o for o in own if not o.length or o.name in followed] for own in options]
            found, _ = self._covered(batch, prospects, choose(self.cost, batch, options))
        probe = self._probe(batch, prospects, found, followed)
        if probe is not None:
            return Ruling(probe, 1, probe=True, hopeless=hopeless)
        if found is not None:
            return Ruling(found, 1 if self._tight(batch, prospects, found) else HOLD)
        # Soon enough to draft when there is enough for it.
        wait = min(missing / (SHARE * self.cost.rest(batch)), HOLD_PLAIN) if missing else HOLD_PLAIN
        return Ruling([own[0] for own in options], max(1, int(wait)), hopeless=hopeless)

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

    def _tight(
        self, batch: int, prospects: Sequence[Prospect], drafts: Sequence[Draft]
    ) -> bool:
        """Whether a few such steps in vain would cost more than may be lost."""
        plain = self.cost.rest(batch)
        if self._risk(batch, prospects, drafts) * HOLD > self._allowance(batch, drafts):
            return True
        seconds = HOLD * (self.cost.step(batch, drafts) - plain)
        return any(
            self.ledger.own(facts.seq_id, facts.remaining, plain) < seconds
            for facts, _ in prospects
        )

    def _risk(
        self, batch: int, prospects: Sequence[Prospect], drafts: Sequence[Draft]
    ) -> float:
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
            self.unread(facts.seq_id, draft.name, facts.tokens) * self.cost.reading(draft.name)
            for (facts, _), draft in zip(prospects, drafts, strict=True)
            if draft.length
        )

    # -- trying what does not seem to pay ----------------------------------------------------------

    def _probe(
        self,
        batch: int,
        prospects: Sequence[Prospect],
        chosen: Sequence[Draft] | None,
        followed: Collection[Hashable],
    ) -> list[Draft] | None:
        """Drafts to learn from, if the purse pays and they could change anything.

        Where others draft, only of drafters that have long not been used. In turn one level for all
        sequences of a drafter, which tells most about its costs, and several for one of them,
        which risks least.
        """
        names = dict.fromkeys(draft.name for _, own in prospects for draft in own[1:])
        used = {draft.name for draft in chosen or () if draft.length}
        for name in names:
            self._idle[name] = 0 if name in used else self._idle[name] + 1
            if name in followed or name in used or (used and self._idle[name] < _IDLE):
                continue
            table = self.cost.table(name, batch)
            pays = max((1 + n) / table[n] for n in range(1, len(table))) * table[0] > 1.02
            if not pays and self._tried[name, group_of(batch)] >= _TRIALS:
                continue  # even a draft that is always right would not pay
            found = self._affordable(batch, prospects, name, chosen)
            if found is not None:
                self._idle[name] = 0
                return found
        return None

    def _affordable(
        self,
        batch: int,
        prospects: Sequence[Prospect],
        name: Hashable,
        chosen: Sequence[Draft] | None,
    ) -> list[Draft] | None:
        """Drafts of a drafter for all of its sequences, or one of them, that the purse pays for."""
        drafts = [[d for d in own if d.name == name and d.length] for _, own in prospects]
        places = [
            place for place, own in enumerate(drafts) if own and prospects[place][0].remaining > 1
        ]
        if not places:
            return None
        none, plain = [own[0] for _, own in prospects], self.cost.rest(batch)
        # What a draft at hand would have gained is lost, too.
        lost = plain * max((d.gain - 1 for d in chosen or ()), default=0.0)

        def stake(drafts: Sequence[Draft]) -> float:
            """Seconds lost if nothing of this is right, and nothing is drafted ever after."""
            seconds = self.cost.step(batch, drafts) - plain
            return lost + seconds + self._reading(prospects, drafts)

        def unread(place: int) -> int:
            return self.unread(prospects[place][0].seq_id, name, prospects[place][0].tokens)

        one = min(places, key=unread)
        likeliest = max(drafts[one], key=lambda draft: draft.gain / draft.seconds)
        longest = cut([none[one], *drafts[one]], likeliest, prospects[one][0].remaining - 1)
        wide = [drafts[place][0] if place in places else none[place] for place in range(len(none))]
        alone = [
            [draft if place == one else other for place, other in enumerate(none)]
            for draft in (longest, drafts[one][0])
        ]
        ways = alone if self._tried[name, group_of(batch)] % 2 else [wide]
        if stake(wide) > KEPT * plain:
            ways = alone
        return next((way for way in ways if stake(way) <= self.ledger.purse), None)
