"""How far off predicted seconds are: learnt step by step, told apart from a machine's drift.

A step's logarithm of (seconds taken / seconds predicted) is taken for a sum::

    drift        of the whole machine: neighbours, clock, context; moves from step to step
    group        what start-up got wrong about this concurrency
    cell         what it got wrong about this number of draft nodes; of several sequences, against
                 none at all
    noise

Each part has a variance, and what a step shows is shared out by them (a scalar Kalman filter with
a diagonal covariance). So the first drafts of a kind teach what those drafts cost, and not that
the machine has become slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log

_NOISE = 0.1**2  # of one step
_HICCUP = log(1.5)  # by which one step may differ from what is known
_FIRST = log(4.0)  # and the very first
_BUSY = log(6.0)  # no price is that wrong: from there on a step tells of the machine alone
_DRIFT = 0.01**2  # by which the machine may change in a step
_AGEING = 1e-6  # by which groups and cells may
_UNKNOWN = 0.3**2  # variance before anything was seen
_NEARBY = 0.2**2  # where a neighbour is known
# Of one sequence's plain steps in a row, beside steps with drafts, which find the caches cold: the
# variance, and the most by which that can be.
_PLAIN, _CACHES = 0.06**2, 0.3
COLD = -1  # the cell of plain steps soon after a drafter's passes
_COLDER = 0.1**2  # variance of their time by that of plain steps in a row


@dataclass(slots=True)
class _Part:
    """A logarithm that is not known exactly."""

    value: float = 0.0
    variance: float = _UNKNOWN
    ageing: float = _AGEING
    seen: int = 0


def cell_of(nodes: float) -> int:
    """0, 1, 2 and 3, 4 to 7, ...; a few nodes among many sequences are not none."""
    return 0 if nodes <= 0 else max(1, round(nodes)).bit_length()


class Correction:
    """How many times longer a step takes than predicted, by group and cell."""

    def __init__(self) -> None:
        # By (), (group,) and (group, cell); start-up has just measured.
        self._parts: dict[tuple[int, ...], _Part] = {(): _Part(0.0, 0.1**2, _DRIFT)}
        self._factors: dict[tuple[int, int], float] = {}

    def seen(self, group: int, cell: int) -> int:
        """Observations of a cell."""
        return self._parts[group, cell].seen if (group, cell) in self._parts else 0

    @property
    def drift(self) -> float:
        """How many times slower the whole machine is now."""
        return exp(self._parts[()].value)

    def factor(self, group: int, cell: int) -> float:
        factor = self._factors.get((group, cell))
        if factor is None:
            keys: tuple[tuple[int, ...], ...] = (), (group,), (group, cell)
            factor = self._factors[group, cell] = exp(sum(self._part(key).value for key in keys))
        return factor

    def _part(self, key: tuple[int, ...]) -> _Part:
        """A new group or cell is thought like its nearest neighbour."""
        if key in self._parts:
            return self._parts[key]
        if key[1:] == (0,):
            return _Part(variance=_PLAIN if key[0] == 1 else 0.0, ageing=0.0)
        if key[1:] == (COLD,):
            return _Part(variance=_COLDER)
        alike = [k for k in self._parts if len(k) == len(key) and k[:-1] == key[:-1] and k[-1] > 0]
        if not alike:
            return _Part(variance=_NEARBY if key[1:] else _UNKNOWN)
        nearest = min(alike, key=lambda other: abs(other[-1] - key[-1]))
        return _Part(self._parts[nearest].value, _NEARBY)

    def observe(self, group: int, cell: int, ratio: float) -> None:
        """A step took ``ratio`` times what was predicted without any correction."""
        keys: tuple[tuple[int, ...], ...] = (), (group,), (group, cell)
        parts = [self._parts.setdefault(key, self._part(key)) for key in keys]
        for part in parts:
            part.variance += part.ageing
        bound = _HICCUP if parts[0].seen or parts[1].seen else _FIRST
        surprise = log(max(ratio, 1e-6)) - sum(part.value for part in parts)
        total = _NOISE + sum(part.variance for part in parts)
        if surprise > _BUSY:
            parts, bound = parts[:1], _HICCUP
        elif cell == 0 and abs(surprise) > _CACHES:  # that is no matter of caches
            parts.pop().seen += 1
        surprise = min(max(surprise, -_FIRST), bound)  # nothing makes a step faster than it is
        for part in parts:
            share = part.variance / total
            part.value += share * surprise
            part.variance *= 1 - share
            part.seen += 1
        self._factors.clear()


class PassPrice:
    """What a draft's passes take: an overhead, and so many times what they took alone.

    The first pass finds its weights out of the cache, the later ones in it, so a pass more costs
    less than a pass. Both numbers are followed by a Kalman filter, in units of one pass.
    """

    _NOISE = 0.1  # of a draft's seconds, relative
    _AGEING = (1e-3, 1e-5)
    _FURTHEST = 2.0  # times the prediction, that one draft may differ

    def __init__(self) -> None:
        self.overhead, self.factor = 0.0, 1.0
        self._variances = [4.0, 0.0, 0.09]  # of the overhead, of both together, of the factor

    def seconds(self, alone: float, unit: float) -> float:
        """Of passes that took so long ``alone``, of which one takes a ``unit``."""
        return self.overhead * unit + self.factor * alone

    def observe(self, alone: float, unit: float, seconds: float) -> None:
        count, expected = alone / unit, self.seconds(alone, unit) / unit
        a, shared, b = self._variances
        a, b = a + self._AGEING[0], b + self._AGEING[1]
        first, second = a + shared * count, shared + b * count  # covariance with the seconds
        total = first + second * count + (self._NOISE * expected) ** 2
        most = expected * self._FURTHEST
        off = min(max(seconds / unit, expected / self._FURTHEST), most) - expected
        overhead = self.overhead + first / total * off
        self.overhead = max(0.0, overhead)
        # There is no overhead below none: the passes themselves take less.
        factor = self.factor + second / total * off + min(0.0, overhead) / count
        self.factor = min(max(factor, 0.2), 8.0)
        self._variances = [
            a - first * first / total,
            shared - first * second / total,
            b - second * second / total,
        ]
