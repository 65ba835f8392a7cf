"""By what factor predicted seconds are wrong: learnt from every step.

The logarithm of (seconds taken / seconds predicted) of a step is modelled as a sum::

    machine        the whole machine is slower: other programs, clock rate, context; may change in
                   every step
    batch bucket   what start-up measured wrongly at this number of sequences
    node bucket    what it measured wrongly at this number of draft nodes
    noise

Each part has a variance, and the error of a step is shared out among the parts by their variances
(a scalar Kalman filter with a diagonal covariance). So the first drafts of a kind correct the price
of such drafts, and do not make the whole machine look slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log

_NOISE = 0.1**2  # variance of one step
_MAX_STEP = log(1.5)  # by which one step may differ from what was learnt so far
_MAX_FIRST_STEP = log(4.0)  # the same of the very first step
_MACHINE_CHANGE = 0.01**2  # variance that the machine's part gains in each step
_BUCKET_CHANGE = 1e-6  # variance that a bucket gains in each step
_UNKNOWN = 0.3**2  # variance of a part before anything was seen
_NEIGHBOUR = 0.2**2  # variance of a new bucket that starts at its nearest neighbour's value
# Plain steps of one sequence, one after the other, find warm caches; steps with drafts do not. The
# variance of that difference.
_PLAIN = 0.06**2
COLD = -1  # node bucket of plain steps soon after a drafter's passes
_COLD = 0.1**2  # variance of their time relative to plain steps in a row


@dataclass(slots=True)
class _Part:
    """The estimate of one part: a logarithm and its variance."""

    value: float = 0.0
    variance: float = _UNKNOWN
    change: float = _BUCKET_CHANGE
    seen: int = 0


def batch_bucket(batch: int) -> int:
    """Buckets by powers of two: 1; 2 and 3; 4 to 7; ..."""
    return batch.bit_length()


def node_bucket(nodes: float) -> int:
    """0; 1; 2 and 3; 4 to 7; ... A mean below one node for each sequence counts as one."""
    return 0 if nodes <= 0 else max(1, round(nodes)).bit_length()


class Correction:
    """The factor by which a step takes longer than predicted, by batch and node bucket."""

    def __init__(self) -> None:
        # Keys: () for the machine, (batch bucket,), and (batch bucket, node bucket).
        self._parts: dict[tuple[int, ...], _Part] = {(): _Part(0.0, 0.1**2, _MACHINE_CHANGE)}
        self._factors: dict[tuple[int, int], float] = {}

    def seen(self, batch: int, nodes: int) -> int:
        """Number of observations in the buckets ``batch`` and ``nodes``."""
        return self._parts[batch, nodes].seen if (batch, nodes) in self._parts else 0

    @property
    def machine(self) -> float:
        """The factor by which the whole machine is slower now."""
        return exp(self._parts[()].value)

    def factor(self, batch: int, nodes: int) -> float:
        """Seconds taken by seconds predicted, for the buckets ``batch`` and ``nodes``."""
        factor = self._factors.get((batch, nodes))
        if factor is None:
            keys: tuple[tuple[int, ...], ...] = (), (batch,), (batch, nodes)
            factor = self._factors[batch, nodes] = exp(sum(self._part(key).value for key in keys))
        return factor

    def _part(self, key: tuple[int, ...]) -> _Part:
        """A part; a new bucket starts at the value of its nearest neighbour."""
        if key in self._parts:
            return self._parts[key]
        if key[1:] == (0,):
            return _Part(variance=_PLAIN if key[0] == 1 else 0.0, change=0.0)
        if key[1:] == (COLD,):
            return _Part(variance=_COLD)
        alike = [k for k in self._parts if len(k) == len(key) and k[:-1] == key[:-1] and k[-1] > 0]
        if not alike:
            return _Part(variance=_NEIGHBOUR if key[1:] else _UNKNOWN)
        nearest = min(alike, key=lambda other: abs(other[-1] - key[-1]))
        return _Part(self._parts[nearest].value, _NEIGHBOUR)

    def observe(self, batch: int, nodes: int, ratio: float) -> None:
        """A step in these buckets took ``ratio`` times the seconds predicted without correction."""
        keys: tuple[tuple[int, ...], ...] = (), (batch,), (batch, nodes)
        parts = [self._parts.setdefault(key, self._part(key)) for key in keys]
        for part in parts:
            part.variance += part.change
        most = _MAX_STEP if parts[0].seen or parts[1].seen else _MAX_FIRST_STEP
        error = log(max(ratio, 1e-6)) - sum(part.value for part in parts)
        total = _NOISE + sum(part.variance for part in parts)
        # Nothing makes a step faster than it is, so a fast step may count in full.
        error = min(max(error, -_MAX_FIRST_STEP), most)
        for part in parts:
            gain = part.variance / total
            part.value += gain * error
            part.variance *= 1 - gain
            part.seen += 1
        self._factors.clear()


class PassPrice:
    """Seconds of a draft's passes: an overhead, and a factor by which passes take longer than when
    they were measured alone.

    The first pass of a draft finds its weights outside the caches, later ones find them inside, so
    a further pass costs less than the first. A line is fitted to recent drafts by least squares,
    held near what start-up measured. The overhead is counted in passes.
    """

    _KEEP = 0.985  # weight of a draft relative to the next one
    _PRIOR = (0.0025, 0.1)  # weights of no overhead and of a factor of one; a draft has about one
    _MAX_ERROR = 2.0  # factor by which one draft may differ from the prediction
    _LEAST_FACTOR = 0.2

    def __init__(self) -> None:
        self.overhead, self.factor = 0.0, 1.0
        self._sums = [0.0] * 5  # of weights, passes, passes squared, costs, passes by costs

    def seconds(self, alone: float, one_pass: float) -> float:
        """Seconds of passes that took ``alone`` seconds by themselves, ``one_pass`` each."""
        return self.overhead * one_pass + self.factor * alone

    def observe(self, alone: float, one_pass: float, seconds: float) -> None:
        """The passes of a draft took ``seconds``."""
        count, expected = alone / one_pass, self.seconds(alone, one_pass) / one_pass
        cost = min(max(seconds / one_pass, expected / self._MAX_ERROR), expected * self._MAX_ERROR)
        new = 1.0, count, count**2, cost, count * cost
        self._sums = [
            self._KEEP * old + one / expected**2 for old, one in zip(self._sums, new, strict=True)
        ]
        n, x, xx, y, xy = self._sums
        n, xx, xy = n + self._PRIOR[0], xx + self._PRIOR[1], xy + self._PRIOR[1]
        # An overhead below zero means that the passes themselves take less. Busy moments may make
        # the longer drafts look cheaper, but no further pass is for nothing.
        overhead = max(0.0, (xx * y - x * xy) / (n * xx - x * x))
        self.factor = max((xy - overhead * x) / xx, self._LEAST_FACTOR)
        self.overhead = max(0.0, (y - self.factor * x) / n)
