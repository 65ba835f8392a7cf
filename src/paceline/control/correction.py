"""How far off a prediction of seconds is: learnt step by step, told apart from a machine's drift.

A step's logarithm of (seconds taken / seconds predicted) is taken for a sum::

    drift        of the whole machine: neighbours, clock, context; moves from step to step
    group        what start-up got wrong about this concurrency; stays
    cell         what it got wrong about this number of draft nodes, against none at all; stays
    noise

Each part has a variance, and what a step shows is shared out by them (a scalar Kalman filter with
a diagonal covariance). So the first drafts of a kind teach what those drafts cost, and not that
the machine has become slower: else plain steps would be thought slower, too, and drafts that do
not pay would seem to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log, sqrt

NOISE = 0.06**2  # of one step
_HICCUP = log(1.5)  # by which one step may differ from what is known
_FIRST = log(4.0)  # and the very first
_DRIFT = 0.01**2  # by which the machine may change in a step
_AGEING = 1e-6  # by which groups and cells may change in a step
_UNKNOWN = 0.3**2  # before anything was seen
_YOUNG = 8  # observations
_OFTEN = 3  # large surprises in a row: no hiccup, the machine has changed
_NEARBY = 0.2**2  # of a group whose neighbour is known
CELL = 0.2**2  # of drafts, against none
_UNEVEN = 64
COLD = -1  # the cell of plain steps soon after a drafter's passes
_COLDER = 0.0, 0.1  # logarithm of their time by that of plain steps in a row, and how sure it is
# What batches cost in which sequences have different numbers of rows, which are padded: 1.05 to
# 1.14 times one with as many rows in all (8 and 32 sequences, embedded target, one core of Zen 4).
_RAGGED = log(1.08)


@dataclass(slots=True)
class _Part:
    """A logarithm that is not known exactly."""

    value: float
    variance: float
    ageing: float = _AGEING
    seen: int = 0


def cell_of(nodes: float, even: bool) -> int:
    """0, 1, 2 and 3, 4 to 7, ...; a few nodes among many sequences are not none."""
    cell = 0 if nodes <= 0 else max(1, round(nodes)).bit_length()
    return cell if even or not cell else cell + _UNEVEN


def _nearest(known: Iterable[int], cell: int) -> int:
    return min(known, key=lambda other: abs(other - cell))


class Correction:
    """How many times longer something takes than predicted, by group and cell.

    ``cells``: variance of what is not known of a cell before it was seen.
    """

    def __init__(self, cells: float = CELL) -> None:
        self._unseen = cells
        self._drift = _Part(0.0, _UNKNOWN, _DRIFT)
        self._groups: dict[int, _Part] = {}
        self._cells: dict[tuple[int, int], _Part] = {}
        self._surprised: dict[int, int] = {}  # large ones in a row, by their sign
        self._factors: dict[tuple[int, int], float] = {}

    def seen(self, group: int, cell: int) -> int:
        """Observations of a cell."""
        return self._cells[group, cell].seen if (group, cell) in self._cells else 0

    @property
    def drift(self) -> float:
        """How many times slower the whole machine is now."""
        return exp(self._drift.value)

    def factor(self, group: int, cell: int) -> float:
        factor = self._factors.get((group, cell))
        if factor is None:
            parts = self._drift, self._group(group), self._cell(group, cell)
            factor = self._factors[group, cell] = exp(sum(part.value for part in parts))
        return factor

    def _group(self, group: int) -> _Part:
        """A new group is thought like the nearest."""
        if group in self._groups or not self._groups:
            return self._groups.get(group) or _Part(0.0, _UNKNOWN)
        return _Part(self._groups[_nearest(self._groups, group)].value, _NEARBY)

    def _cell(self, group: int, cell: int) -> _Part:
        """Cell 0 is what the others are compared with; a new one is thought like its neighbour."""
        known = self._cells.get((group, cell))
        if known is not None or not cell:
            return known or _Part(0.0, 0.0, ageing=0.0)
        if cell == COLD:
            return _Part(_COLDER[0], _COLDER[1] ** 2)
        uneven = cell >= _UNEVEN
        seen = [c for g, c in self._cells if g == group and c > 0 and (c >= _UNEVEN) == uneven]
        if not seen:
            return _Part(_RAGGED if uneven else 0.0, self._unseen)
        return _Part(self._cells[group, _nearest(seen, cell)].value, self._unseen)

    def observe(self, group: int, cell: int, ratio: float) -> None:
        """It took ``ratio`` times what was predicted without any correction."""
        of_group = self._groups.setdefault(group, self._group(group))
        exact = self._cells.setdefault((group, cell), self._cell(group, cell))
        parts = (self._drift, of_group, exact)
        surprise = log(max(ratio, 1e-6)) - sum(part.value for part in parts)
        for part in parts:
            part.variance += part.ageing
        total = NOISE + sum(part.variance for part in parts)
        bound = _HICCUP if of_group.seen or self._drift.seen else _FIRST
        surprise = min(max(surprise, -bound), bound)
        if surprise**2 > 4 * total:
            total += self._unsettle(group, surprise, of_group, exact)
            bound = 2 * sqrt(total)
            surprise = min(max(surprise, -bound), bound)
        else:
            self._surprised.pop(group, None)
        for part in parts:
            share = part.variance / total
            part.value += share * surprise
            part.variance *= 1 - share
            part.seen += 1
        self._factors.clear()

    def anchor(self, group: int, ratio: float) -> None:
        """Plain steps in a row took ``ratio`` times what was predicted. Where drafts were all that
        was seen of a group, what they cost may have been taken for the group's."""
        of_group = self._groups.setdefault(group, self._group(group))
        off = log(max(ratio, 1e-6)) - self._drift.value - of_group.value
        of_group.value, of_group.variance = of_group.value + off, NOISE
        for (other, cell), part in self._cells.items():
            if other == group and cell:
                part.value, part.variance = part.value - off, part.variance + off**2
        self._factors.clear()

    def _unsettle(self, group: int, surprise: float, of_group: _Part, exact: _Part) -> float:
        """A large surprise: something is not as sure as it seemed. Returns the added variance."""
        young = [part for part in (of_group, exact) if part.variance and part.seen < _YOUNG]
        before, sign = self._surprised.get(group, 0), 1 if surprise > 0 else -1
        times = self._surprised[group] = before + sign if before * sign >= 0 else 0
        if not young and abs(times) < _OFTEN:
            return 0.0  # perhaps a hiccup
        (young or [self._drift])[0].variance += surprise**2
        return surprise**2


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
        self._p = [4.0, 0.0, 0.09]  # variances of both, and between them what they share
        self.seen = 0

    def seconds(self, alone: float, unit: float) -> float:
        """Of passes that took so long ``alone``, of which one takes a ``unit``."""
        return self.overhead * unit + self.factor * alone

    def observe(self, alone: float, unit: float, seconds: float) -> None:
        count, expected = alone / unit, self.seconds(alone, unit) / unit
        a, shared, b = self._p
        a, b = a + self._AGEING[0], b + self._AGEING[1]
        first, second = a + shared * count, shared + b * count  # covariance with the seconds
        total = first + second * count + (self._NOISE * expected) ** 2
        least, most = expected / self._FURTHEST, expected * (self._FURTHEST if self.seen else 4.0)
        off = min(max(seconds / unit, least), most) - expected
        overhead = self.overhead + first / total * off
        self.overhead = max(0.0, overhead)
        # There is no overhead below none: the passes themselves take less.
        factor = self.factor + second / total * off + min(0.0, overhead) / count
        self.factor = min(max(factor, 0.2), 8.0)
        self._p = [a - first * first / total, shared - first * second / total]
        self._p.append(b - second * second / total)
        self.seen += 1
