"""What drafts cost in a batch, and the draft lengths with which the batch is fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from paceline.pace.steptime import StepTime
from paceline.pace.worth import Profile

_FULL = 0.95  # share of the most nodes, above which drafts are alike
_FRESH = 16  # calls of ``tick`` for which a table is used
HURT = 0.01  # by which a request may be slowed down for the sake of others, as expected
DEARER = (1.0, 1.5, 2.5)  # how much dearer time is made until nobody is slowed down
_ROWS = 4096  # tokens read, about which the time of one is averaged


@dataclass(frozen=True)
class DraftProspect:
    """A sequence of the batch: its drafter and the expected tokens of a step, by draft length.

    ``reading``: seconds that the drafter needs, for each token to come, to read what it has not
    seen of the sequence. ``safe``: tokens that may be counted upon, if known.
    """

    name: str
    gains: Sequence[float]
    reading: float = 0.0
    safe: Sequence[float] = ()


class Fill:
    """Nodes that a drafter proposes, as a share of the most it might: n-grams are often short."""

    def __init__(self) -> None:
        self.share = 1.0

    def record(self, nodes: int, most: int) -> None:
        self.share += 0.05 * (min(1.0, nodes / most) - self.share)


class Prices:
    """Seconds of steps in which some drafters draft; their ``profiles`` by name."""

    def __init__(self, steps: StepTime, profiles: Mapping[str, Profile]) -> None:
        self.steps = steps
        self.profiles = dict(profiles)
        self.fill = {name: Fill() for name in profiles}
        # Seconds and tokens of prompts read; at first what a pass grows by for a further row.
        self._reading = {n: (64 * own.row_seconds, 64.0) for n, own in self.profiles.items()}
        self._tables: dict[tuple[str, int], tuple[int, list[float]]] = {}
        self._ticks = 0

    def tick(self) -> None:
        """A step goes by: tables are made anew every so many."""
        self._ticks += 1

    def table(self, name: str, batch: int) -> list[float]:
        """A sequence's part of the step, by draft length, if all draft alike."""
        since, table = self._tables.get((name, batch), (0, []))
        if not table or self._ticks - since >= _FRESH:
            profile, fill = self.profiles[name], self.fill[name].share
            even = batch == 1 or fill > _FULL
            table = []
            for length, nodes in enumerate(profile.nodes):
                passes = profile.drafting(length, batch)
                seconds = self.steps.rest(batch, nodes * fill, even)
                seconds += self.steps.drafting(batch, nodes * fill, passes, name, even)
                table.append(seconds / batch)
            if len(self._tables) > 256:
                self._tables.clear()
            self._tables[name, batch] = (self._ticks, table)
        return table

    def seconds(self, batch: int, names: Sequence[str], lengths: Sequence[int]) -> float:
        """A step of ``batch`` sequences, those named drafting ``lengths`` levels."""
        nodes = drafting = 0.0
        even = len(set(lengths)) == 1 and len(lengths) == batch
        for name in set(names):
            own = [length for n, length in zip(names, lengths, strict=True) if n == name]
            profile, fill = self.profiles[name], self.fill[name].share
            even = even and (batch == 1 or fill > _FULL)
            each = sum(profile.nodes[length] for length in own) * fill / batch
            nodes += each
            passes = self.passes(name, own)
            drafting += self.steps.drafting(batch, each, passes, name, even)
        return self.steps.rest(batch, nodes, even) + drafting

    def passes(self, name: str, lengths: Sequence[int]) -> float:
        """A drafter's passes as measured at start-up, each over the sequences not done yet."""
        profile = self.profiles[name]
        if profile.costless:
            return 0.0
        passes = [profile.passes[length] for length in lengths]
        return sum(
            profile.seconds(sum(count > number for count in passes))
            for number in range(max(passes))
        )

    def reading(self, name: str) -> float:
        """Seconds in which a drafter reads a token of a prompt."""
        seconds, rows = self._reading[name]
        return seconds / rows

    def learn_reading(self, name: str, seconds: float, rows: int) -> None:
        """A drafter has read ``rows`` tokens besides drafting."""
        before, count = self._reading[name]
        keep = min(1.0, _ROWS / (count + rows))
        limit = 4 * rows * before / count or seconds  # one hiccup is no policy
        seconds = min(max(seconds, 0.0), limit)
        self._reading[name] = (keep * (before + seconds), keep * (count + rows))


def choose(
    prices: Prices, batch: int, candidates: Sequence[DraftProspect], most: int | None = None
) -> list[int]:
    """The draft length of each candidate with which the batch is fastest.

    One alone: most expected tokens a second. Several: the least mean time of a token, over the
    sequences (the harmonic mean of their speeds), among the lengths by which no sequence becomes
    slower than by plain decoding: a step takes the same time for all, and drafting for some must
    not slow down those that gain nothing by it. Where the sequences are alike one length for all
    is best, as rows need no padding then; lengths of their own are taken if they gain more than
    that costs. ``most`` bounds all lengths.
    """
    tables = [prices.table(own.name, batch) for own in candidates]
    if most is not None:
        tables = [times[: most + 1] for times in tables]
    if len(candidates) == batch == 1:
        ((one, times),) = zip(candidates, tables, strict=True)
        return [max(range(len(times)), key=lambda k: one.gains[k] / _time(one, times, k))]
    longest = max(len(times) for times in tables) - 1
    options = [[min(k, len(times) - 1) for times in tables] for k in range(longest + 1)]
    plain = prices.steps.rest(batch, 0)
    scores = [_score(prices, batch, candidates, option, plain) for option in options]
    least = min(scores)
    best = options[scores.index(least)]
    for dearer in DEARER:
        apart = _apart(candidates, tables, best, dearer)
        if not any(apart):
            break
        if apart != best:
            score = _score(prices, batch, candidates, apart, plain)
            if score < least:
                best, least = apart, score
                break
    return best


def _time(own: DraftProspect, times: Sequence[float], length: int) -> float:
    """A sequence's part of the step, reading written off over the tokens to come."""
    return times[length] + own.reading * own.gains[length] if length else times[0]


def _score(
    prices: Prices,
    batch: int,
    candidates: Sequence[DraftProspect],
    lengths: Sequence[int],
    plain: float,
) -> float:
    """Seconds of a token, summed over the sequences; infinite if any is slowed down."""
    seconds = prices.seconds(batch, [own.name for own in candidates], lengths)
    reading = sum(
        own.reading * own.gains[length]
        for own, length in zip(candidates, lengths, strict=True)
        if length and own.reading
    )
    gains = [own.gains[length] for own, length in zip(candidates, lengths, strict=True)]
    least = min(gains) if len(gains) == batch else 1.0  # others in the batch gain nothing
    if any(lengths) and seconds + reading > (1 + HURT) * plain * least:
        return inf
    return (seconds + reading) * sum(1 / gain for gain in gains)


def _apart(
    candidates: Sequence[DraftProspect],
    tables: Sequence[Sequence[float]],
    start: Sequence[int],
    dearer: float,
) -> list[int]:
    """Each sequence's own best length, given the time that a step takes with ``start``.

    ``dearer``: by how much time counts for more than it should, which makes shorter drafts.

    The product of the step's time and the sum of the times per token is bounded by its tangent, so
    that sequences decide by themselves (majorisation; Hunter and Lange 2004); twice, as the step
    then takes another time.
    """
    chosen = list(start)
    for _ in range(2):
        pairs = list(zip(candidates, tables, chosen, strict=True))
        seconds = sum(_time(own, times, k) for own, times, k in pairs)
        needed = dearer * sum(1 / own.gains[k] for own, _, k in pairs)
        chosen = [
            min(
                range(len(times)),
                key=lambda k: seconds / own.gains[k] + needed * _time(own, times, k),
            )
            for own, times in zip(candidates, tables, strict=True)
        ]
    return chosen
