"""What drafting has won and lost against plain decoding: the account that a draft is paid from.

Predictions choose the draft; the ledger decides whether it may be made. A draft risks the seconds
by which its step is longer than a plain one, should none of it be right. It may risk what drafts
of its drafter have won at this concurrency, and what is put by for trying: a share of all time::

    seconds of all steps --- SHARE ---> purse --.
                                                +--> allowance >= risk: it may draft
    tokens * plain seconds - seconds --> won ---'

So whatever acceptance and costs are, and however wrong the predictions: decoding takes at most
SHARE longer than plain decoding, and once ``CREDIT`` plain steps for what was won before and the
one that the purse begins with. Without that one an engine's first hundred tokens are often plain
where a draft costs half a step (8 bits, four answers of 64 tokens: 1.1 times as fast with it). All
of it is measured where it happens, by drafter and concurrency (in powers of two).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import inf, sqrt

from paceline.pace.cost import group_of

SHARE = 0.01  # of the time that may go into drafts that turn out not to pay
CREDIT = 16.0  # plain steps of one sequence that an account holds at most
OWN_SHARE = 0.02  # of a request's time that it may lose to drafts, its own or its neighbours'
_HORIZON = 256  # tokens of a request, at most, by which that share is counted
KEPT = 2.0  # plain steps that the purse holds at most
GRANT = 1.0  # plain steps that it holds to begin with
_HICCUP = 2.0  # times what was predicted; beyond, a step's time is not the draft's doing
_INHERITED = 0.25  # of what the drafter has won at the nearest concurrency
_WRITTEN_OFF = 64.0  # tokens of a sequence over which reading a prompt is


class Ledger:
    """Seconds, by drafter and concurrency. Next to nothing at first: drafts must be earned."""

    def __init__(self) -> None:
        self.purse = 0.0
        self._grant = GRANT  # of plain steps, whose seconds the first step tells
        self._won: dict[tuple[Hashable, int], float] = {}
        self._owed: dict[Hashable, float] = {}
        self._each: dict[int, float] = {}  # by sequence

    def pass_by(self, seconds: float, plain: float, batch: int = 1) -> None:
        """A step, of any kind, took so long; a plain one takes ``plain``.

        The purse's grant comes with the first sequence that is alone: several would each lose it.
        """
        earned = SHARE * seconds
        for name, owed in self._owed.items():  # what was lent in vain comes back from here
            paid = min(owed, earned)
            self._owed[name] = owed - paid
            earned -= paid
        if batch == 1:
            earned, self._grant = earned + self._grant * plain, 0.0
        self.purse = min(self.purse + earned, KEPT * plain)

    def won(self, name: Hashable, batch: int, plain: float) -> float:
        """What drafts of a drafter may cost here by what they have won, in seconds."""
        group = group_of(batch)
        known = self._won.get((name, group))
        if known is not None:
            return known
        near = [(abs(g - group), won) for (n, g), won in self._won.items() if n == name]
        if not near:
            return 0.0
        return max(0.0, min(_INHERITED * min(near)[1], plain))

    def allowance(self, name: Hashable, batch: int, plain: float) -> float:
        """Seconds that a step may risk for drafts of this drafter.

        Less than nothing, and not even what is sure to gain may be drafted, where drafts that
        were sure to gain have lost that much: something is not as it seems.
        """
        won = self.won(name, batch, plain)
        return won + max(self.purse, 0.0) if won + self.purse > -KEPT * plain else -inf

    def may_lend(self, name: Hashable, plain: float) -> bool:
        """Whether what was lent to a drafter before has come in again."""
        return self._owed.get(name, 0.0) < plain

    def lend(self, name: Hashable, seconds: float) -> None:
        """A drafter has read a prompt: its next drafts pay for that, bit by bit."""
        self._owed[name] = self._owed.get(name, 0.0) + seconds

    def charge(self, name: Hashable, batch: int, seconds: float, plain: float) -> None:
        """A drafter has cost so much; less than nothing if it has won."""
        won = self.won(name, batch, plain) - seconds
        if won < 0:  # what it has lost beyond what it had won was paid from the purse
            self.purse += won
            won = 0.0
        self._won[name, group_of(batch)] = min(won, CREDIT / sqrt(batch) * plain)

    def own(self, seq_id: int, remaining: int, plain: float) -> float:
        """Seconds by which a step may be longer than what a sequence is sure to gain by it.

        A request with so many ``remaining`` tokens may lose a share of the time that plain
        decoding would take for them, and what drafts have won for it.
        """
        known = self._each.get(seq_id)
        if known is None:
            known = self._each[seq_id] = OWN_SHARE * min(remaining, _HORIZON) * plain
        return known

    def lost(self, seq_id: int) -> bool:
        """Whether a sequence has lost its share."""
        return self._each.get(seq_id, 0.0) < 0

    def settle(
        self,
        drafts: Mapping[Hashable, int],
        tokens: Mapping[int, int],
        seconds: float,
        plain: float,
        foreseen: float,
        probe: bool,
    ) -> None:
        """A step is over that yielded so many ``tokens`` for each sequence.

        ``drafts``: sequences drafted for, by drafter. ``plain`` and ``foreseen``: seconds of a
        step without drafts, and of this one. A ``probe`` is paid for by the purse, by
        what it costs the sequence that gains least.
        """
        batch = len(tokens)
        seconds = min(seconds, _HICCUP * foreseen)
        gained = sum(tokens.values()) / batch * plain - seconds
        if probe:
            self.purse += min(0.0, min(tokens.values()) * plain - seconds)
            gained = 0.0
        total = sum(drafts.values())
        for name, count in drafts.items():
            due = self._owed.get(name, 0.0) * min(1.0, sum(tokens.values()) / batch / _WRITTEN_OFF)
            if due:
                self._owed[name] -= due
            self.charge(name, batch, due - gained * count / total, plain)
        for seq_id, count in tokens.items():
            if seq_id in self._each:
                won = self._each[seq_id] + count * plain - seconds
                self._each[seq_id] = min(won, CREDIT * plain)

    def forget(self, seq_id: int) -> None:
        """A sequence is done."""
        self._each.pop(seq_id, None)
