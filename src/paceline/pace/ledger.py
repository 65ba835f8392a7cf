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
from math import sqrt

from paceline.pace.cost import group_of

SHARE = 0.01  # of the time that may go into drafts that turn out not to pay
CREDIT = 16.0  # plain steps of one sequence that an account holds at most
OWN = 2.0  # plain steps after which a request has lost by drafting
KEPT = 2.0  # plain steps that the purse holds at most
GRANT = 1.0  # plain steps that it holds to begin with
LONE = 0.75  # of them, for a sequence that is alone: several would each lose them
_INHERITED = 0.25  # of what the drafter has won at the nearest concurrency


class Ledger:
    """Seconds, by drafter and concurrency. Next to nothing at first: drafts must be earned."""

    def __init__(self) -> None:
        self.purse = 0.0
        self._grant = GRANT  # of plain steps, whose seconds the first step tells
        self._won: dict[tuple[Hashable, int], float] = {}
        self._each: dict[int, float] = {}  # by sequence

    def pass_by(self, seconds: float, plain: float, batch: int = 1) -> None:
        """A step, of any kind, took so long; a plain one takes ``plain``.

        Part of the grant comes with the first step, the rest with the first sequence alone.
        """
        granted = max(0.0, self._grant - (LONE if batch > 1 else 0.0))
        self._grant -= granted
        self.purse = min(self.purse + SHARE * seconds + granted * plain, KEPT * plain)

    def won(self, name: Hashable, batch: int, plain: float) -> float:
        """What drafts of a drafter may cost here by what they have won, in seconds."""
        group = group_of(batch)
        near = [(abs(g - group), won) for (n, g), won in self._won.items() if n == name]
        distance, won = min(near, default=(0, 0.0))
        return min(_INHERITED * won, plain) if distance else won

    def allowance(self, name: Hashable, batch: int, plain: float) -> float:
        """Seconds that a step may risk for drafts of this drafter."""
        return self.won(name, batch, plain) + self.purse

    def lost(self, seq_id: int, plain: float) -> bool:
        """Whether drafts, its own or its neighbours', have slowed a sequence down."""
        return self._each.get(seq_id, 0.0) < -OWN * plain

    def settle(
        self,
        drafts: Mapping[Hashable, int],
        tokens: Mapping[int, int],
        seconds: float,
        plain: float,
        probe: bool = False,
    ) -> None:
        """A step is over that yielded so many ``tokens`` for each sequence.

        ``drafts``: sequences drafted for, by drafter. ``plain``: seconds of a step without drafts.
        A ``probe`` is paid for by the purse, by what it costs the sequence that gains least; what
        all gain by it is won like anything else.
        """
        batch, total = len(tokens), sum(drafts.values())
        gained = sum(tokens.values()) / batch * plain - seconds
        if probe:
            self.purse += min(0.0, min(tokens.values()) * plain - seconds)
            gained = max(gained, 0.0)
        for name, count in drafts.items():
            won = self.won(name, batch, plain) + gained * count / total
            self.purse += min(won, 0.0)  # what is lost beyond what was won
            self._won[name, group_of(batch)] = min(max(won, 0.0), CREDIT / sqrt(batch) * plain)
        for seq_id, count in tokens.items():
            own = self._each.get(seq_id, 0.0) + count * plain - seconds
            self._each[seq_id] = min(own, CREDIT * plain)

    def forget(self, seq_id: int) -> None:
        """A sequence is done."""
        self._each.pop(seq_id, None)
