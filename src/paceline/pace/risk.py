"""What may be drafted: the best lengths, as far as what they risk is covered by the ledger.

Between prediction and ledger: predictions say which lengths are best and what a step with them
takes; here that is held against what the drafters and the sequences themselves may lose, and where
nothing seems to pay, what a draft to learn from may cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.core.sequence import SequenceState
from paceline.pace.ledger import KEPT, SHARE, Ledger
from paceline.pace.prices import DraftProspect, Prices, choose
from paceline.pace.steptime import group_of
from paceline.pace.worth import Profile

HOLD = 4  # steps at most for which drafts of the same batch keep their lengths
HOLD_PLAIN = 32  # where nothing is drafted, so that nothing is learnt
_TRIALS = 4  # drafts after which a drafter's prices are believed where it cannot pay


@dataclass(frozen=True)
class Party:
    """The sequences of a step that may be drafted for, one candidate each.

    ``batch`` counts all sequences of the step, ``plain`` is its seconds without drafts.
    """

    batch: int
    plain: float
    seqs: Sequence[SequenceState]
    candidates: Sequence[DraftProspect]

    @property
    def names(self) -> list[str]:
        return [own.name for own in self.candidates]


@dataclass(frozen=True)
class Ruling:
    """Draft lengths, for how many steps they hold at most, and why they are what they are."""

    lengths: list[int]
    hold: int
    probe: bool = False
    hopeless: bool = False  # no draft seemed to pay


class Risk:
    """Rules on drafts. ``profiles`` are those of drafters that are chosen for, by name."""

    def __init__(self, prices: Prices, ledger: Ledger, profiles: Mapping[str, Profile]) -> None:
        self._prices, self._ledger, self._profiles = prices, ledger, profiles
        self._tried: Counter[tuple[str, int]] = Counter()  # steps by drafter and concurrency
        self._read: dict[int, int] = {}  # tokens of a sequence when it was last drafted for

    # -- what is told --------------------------------------------------------------------------

    def tried(self, name: str, batch: int) -> None:
        """A drafter drafted in a step of so many sequences."""
        self._tried[name, group_of(batch)] += 1

    def meet(self, seq: SequenceState, name: str) -> None:
        """A sequence is there; a drafter that follows prompts has read its."""
        if seq.seq_id not in self._read:
            self._read[seq.seq_id] = seq.prompt_length if self._profiles[name].follows else 0

    def has_read(self, seq_id: int, tokens: int) -> None:
        """A drafter has seen so many tokens of a sequence."""
        self._read[seq_id] = tokens

    def unread(self, seq_id: int, tokens: int) -> int:
        """Of so many tokens, those that a drafter would have to read first, but for the newest."""
        return max(0, tokens - self._read.get(seq_id, 0) - 1)

    def forget(self, seq_id: int) -> None:
        self._read.pop(seq_id, None)

    # -- ruling --------------------------------------------------------------------------------

    def bound(self, name: str, count: int, batch: int, longest: int) -> int:
        """The longest length that a drafter which decides for itself may risk for ``count``."""
        plain = self._prices.steps.rest(batch, 0)
        allowance = self._ledger.allowance(name, batch, plain)

        def covered(length: int) -> bool:
            seconds = self._prices.seconds(batch, [name] * count, [length] * count)
            return seconds - plain <= allowance

        if allowance <= 0 or covered(longest):
            return longest if allowance > 0 else 0
        length = 1
        while length + 1 < longest and covered(length + 1):
            length += 1
        # Most of what it tries takes less than the dearest of its drafts: a level may be tried.
        return length

    def rule(self, party: Party) -> Ruling:
        """The best lengths whose risk is covered; else a probe; else none."""
        best = choose(self._prices, party.batch, party.candidates)
        hopeless = not any(best)
        missing = 0.0
        for most in range(max(best), 0, -1):
            lengths = [min(length, most) for length in best]
            risk = self._risk(party, lengths)
            drafting = {n for n, length in zip(party.names, lengths, strict=True) if length}
            allowance = min(
                self._ledger.allowance(name, party.batch, party.plain) for name in drafting
            )
            if risk <= allowance:
                tight = risk * HOLD > allowance or self._close(party, lengths)
                return Ruling(lengths, 1 if tight else HOLD)
            missing = risk - allowance
        probe = self._probe(party)
        if probe is not None:
            return Ruling(probe, 1, probe=True, hopeless=hopeless)
        # Soon enough to draft when there is enough for it.
        wait = min(missing / (SHARE * party.plain), HOLD_PLAIN) if missing else HOLD_PLAIN
        return Ruling([0] * len(best), max(1, int(wait)), hopeless=hopeless)

    def _close(self, party: Party, lengths: Sequence[int]) -> bool:
        """Whether a few such steps in vain would cost any sequence more than it may lose."""
        seconds = self._prices.seconds(party.batch, party.names, lengths) - party.plain
        return any(
            self._ledger.own(seq.seq_id, seq.remaining, party.plain) < HOLD * seconds
            for seq in party.seqs
        )

    def _risk(self, party: Party, lengths: Sequence[int]) -> float:
        """Seconds that a step may cost beyond what is sure to be gained by it.

        A drafter that has to read first is lent the time if that is sure to come in again.
        """
        pairs = list(zip(party.candidates, lengths, strict=True))
        safe = sum(own.safe[length] for own, length in pairs) + party.batch - len(pairs)
        seconds = self._prices.seconds(party.batch, party.names, lengths)
        risk = seconds - party.plain * safe / party.batch
        reading = self._reading(party, lengths)
        if not reading:
            return risk
        written_off = sum(own.reading * own.safe[length] for own, length in pairs if length)
        drafting = {own.name for own, length in pairs if length}
        lent = all(self._ledger.may_lend(name, party.plain) for name in drafting)
        return risk + (written_off if lent and risk + written_off <= 0 else reading)

    def _reading(self, party: Party, lengths: Sequence[int]) -> float:
        """Seconds in which drafters read what they have not seen of their sequences."""
        return sum(
            self.unread(seq.seq_id, len(seq.tokens)) * self._prices.reading(own.name)
            for seq, own, length in zip(party.seqs, party.candidates, lengths, strict=True)
            if length and self._profiles[own.name].reads
        )

    # -- trying what does not seem to pay ------------------------------------------------------

    def _probe(self, party: Party) -> list[int] | None:
        """Lengths of a draft to learn from, if the purse pays and it could change anything.

        In turn one level for all sequences of a drafter, which tells most about its costs, and
        several for one of them, which risks least.
        """
        for name in dict.fromkeys(party.names):
            table = self._prices.table(name, party.batch)
            pays = max((1 + n) / table[n] for n in range(1, len(table))) * table[0] > 1.02
            if not pays and self._tried[name, group_of(party.batch)] >= _TRIALS:
                continue  # even a draft that is always right would not pay
            places = [
                place
                for place, (seq, own) in enumerate(zip(party.seqs, party.candidates, strict=True))
                if own.name == name and seq.remaining > 1
            ]
            if places:
                found = self._covered(party, places, table)
                if found is not None:
                    return found
        return None

    def _covered(
        self, party: Party, places: Sequence[int], table: Sequence[float]
    ) -> list[int] | None:
        """A probe for the sequences at these places, or one of them, that the purse pays for."""
        seqs = party.seqs
        one = min(places, key=lambda p: self.unread(seqs[p].seq_id, len(seqs[p].tokens)))
        gains = party.candidates[one].gains
        longest = max(range(1, len(table)), key=lambda n: gains[n] / table[n])
        longest = min(longest, seqs[one].remaining - 1)
        wide = [int(place in places) for place in range(len(seqs))]
        alone = [[n * (place == one) for place in range(len(seqs))] for n in (longest, 1)]
        ways = (
            alone if self._tried[party.candidates[one].name, group_of(party.batch)] % 2 else [wide]
        )
        if self._stake(party, wide) > KEPT * party.plain:
            ways = alone
        for lengths in ways:
            if self._stake(party, lengths) <= self._ledger.purse:
                return lengths
        return None

    def _stake(self, party: Party, lengths: Sequence[int]) -> float:
        """Seconds lost if nothing of these drafts is right, and nothing is drafted ever after."""
        seconds = self._prices.seconds(party.batch, party.names, lengths) - party.plain
        return seconds + self._reading(party, lengths)
