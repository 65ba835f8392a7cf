"""The one cost model: what steps take and what drafts gain, for everybody who asks.

A step is drafting (passes of a drafter, or looking something up) and the rest: the target's forward
over its sequences and their draft nodes, and the host's work. Both are predicted from forwards
measured alone and corrected by every step since, by concurrency and nodes (correction.py). What
drafts gain follows from acceptance by position (acceptance.py)::

    forwards measured alone * corrections ---> seconds --.
                                                         +--> tokens a second, against plain
    acceptance by position -----> expected tokens -------'

Start-up, the controller and hybrids ask it while they decode; ``tune``, ``bench`` and ``doctor``
make one of what they have measured. How far a prediction is off is one figure for all of them,
``predicted_by_measured``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache

from paceline.control.acceptance import AcceptanceTracker, expected_tokens
from paceline.control.cold import MOST, WARM, ColdSteps
from paceline.control.correction import COLD, Correction, PassPrice, cell_of
from paceline.control.options import DrafterCosts, DraftOption
from paceline.core.costs import TargetCosts

_LONG_AGO = 64  # steps
_NOW = 2  # steps since one without drafts, where such are what is taken
_FULL = 0.95  # share of the most nodes, above which drafts are alike
_FRESH = 16  # observations after which prices are looked up anew
_SLOW = 1.3  # times what is known, from which a step tells of the machine
_ROWS = 4096  # tokens read, about which the time of one is averaged


def predicted_by_measured(predicted: float, measured: float) -> float:
    """How many times what was measured was predicted; 1.1 promises 10 % too much."""
    return predicted / measured if measured else 0.0


def textbook_speedup(rate: float, length: float, cost: float) -> float:
    """(1 - a^(g+1)) / ((1 - a)(g c + 1)), Leviathan et al. 2023, theorem 3.8.

    One acceptance ``rate`` a for all positions, drafts of g tokens, and a drafter whose pass
    takes ``cost`` c of a target forward. Verifying g + 1 tokens is taken to cost what one does.
    """
    tokens = length + 1 if rate == 1 else (1 - rate ** (length + 1)) / (1 - rate)
    return tokens / (length * cost + 1)


def group_of(batch: int) -> int:
    """Powers of two: 1, 2 and 3, 4 to 7, ..."""
    return batch.bit_length()


class CostModel:
    """Predicts seconds and tokens of steps, and learns from each where that is wrong.

    ``target``: forwards measured alone; ``drafters`` by name, more by ``add``.
    """

    def __init__(
        self, target: TargetCosts, drafters: Mapping[Hashable, DrafterCosts] | None = None
    ):
        self.target = target
        self.drafters: dict[Hashable, DrafterCosts] = {}
        self.acceptance = AcceptanceTracker()
        # Nodes proposed, as a share of the most: n-grams are often short.
        self.fill: dict[Hashable, float] = {}
        self._forward = lru_cache(4096)(lambda batch, nodes: target(batch, 1 + nodes))
        self._rest = Correction()
        self._passes: dict[tuple[Hashable, int], PassPrice] = {}  # by drafter and group
        self._handling: dict[Hashable, float] = {}  # seconds a sequence, where no pass is taken
        self._reading: dict[Hashable, tuple[float, float]] = {}  # seconds and tokens of prompts
        self._tables: dict[tuple[Hashable, int], list[float]] = {}
        # Whether drafts might pay, and the drafts that were known then.
        self._pays: dict[tuple[Hashable, int, Hashable], tuple[float, bool]] = {}
        self._learnt = 0
        self._since_plain = _LONG_AGO  # steps since one without drafts
        self.cold = ColdSteps()
        self._whole = False  # whether only the whole of steps is known
        self.predicted = self.measured = 0.0  # seconds of all steps that were learnt from
        for name, costs in (drafters or {}).items():
            self.add(name, costs)

    def add(self, name: Hashable, costs: DrafterCosts) -> None:
        """Know one drafter more."""
        self.drafters[name] = costs
        self.acceptance.priors[name] = costs.prior
        self.acceptance.depth = max(self.acceptance.depth, costs.longest)
        self.fill[name] = 1.0
        row = max(0.0, costs.seconds(1024) - costs.seconds(1)) / 1023
        self._reading[name] = (64 * row, 64.0)  # at first what a pass grows by for a further row

    # -- seconds -----------------------------------------------------------------------------------

    def verify(self, batch: int, nodes: float) -> float:
        """A target forward over ``batch`` sequences and ``nodes`` draft nodes each, as measured."""
        return self._forward(batch, round(nodes, 1))

    def rest(self, batch: int, nodes: float = 0.0, even: bool = True) -> float:
        """All of a step but the drafting; ``even`` if all sequences have as many nodes."""
        group, cell = group_of(batch), cell_of(nodes, even)
        seconds = self.verify(batch, nodes) * self._rest.factor(group, cell)
        # Steps without drafts never take longer than others: those that are rare now give way.
        plain = self._since_plain < _NOW
        if cell and plain:
            return max(seconds, self.verify(batch, 0.0) * self._rest.factor(group, 0))
        return seconds if cell or plain else min(seconds, self.rest(batch, 1.0))

    def passes(self, name: Hashable, lengths: Iterable[int]) -> float:
        """A drafter's passes as measured alone, each over the sequences not done yet."""
        profile = self.drafters[name]
        if profile.costless:
            return 0.0
        passes = [profile.passes[length] for length in lengths]
        counts = (sum(most > number for most in passes) for number in range(max(passes)))
        return sum(map(profile.seconds, counts))

    def drafting(
        self, name: Hashable, batch: int, nodes: float, passes: float, even: bool = True
    ) -> float:
        """Drafting of ``nodes`` each for ``batch`` sequences, by seconds of ``passes`` alone."""
        if not passes:
            return self._handling.get(name, 0.0) * batch if nodes else 0.0
        price, drift = self._price(name, batch), self._rest.drift
        unit = self.drafters[name].seconds(batch)
        return drift * (price.seconds(passes, unit) if price else passes)

    def _price(self, name: Hashable, batch: int) -> PassPrice | None:
        """That of the nearest concurrency."""
        group = group_of(batch)
        near = [(abs(g - group), g) for n, g in self._passes if n == name]
        return self._passes[name, min(near)[1]] if near else None

    def foresee(
        self, batch: int, nodes: float, even: bool, passes: Mapping[Hashable, float]
    ) -> tuple[float, float]:
        """The rest of a step, and its drafting by so many seconds of passes alone."""
        drafting = (self.drafting(n, batch, nodes, seconds, even) for n, seconds in passes.items())
        return self.rest(batch, nodes, even), sum(drafting)

    def _slowness(self, batch: int, nodes: float, even: bool, rest: float) -> float:
        """Of the machine in a step the rest of which took so long: a step that was slow as a whole
        says nothing against its draft."""
        off = rest / self.rest(batch, nodes, even)
        return self._rest.drift * (1.0 if 1 / _SLOW < off < _SLOW else off)

    def step(self, batch: int, drafts: Iterable[DraftOption]) -> float:
        """A step of ``batch`` sequences with these drafts among them."""
        drafts = [draft for draft in drafts if draft.length]
        if not drafts:
            return self.rest(batch)
        names = dict.fromkeys(draft.name for draft in drafts)
        nodes_each = sum(draft.nodes for draft in drafts) / batch
        even = len(drafts) == batch and len({draft.nodes for draft in drafts}) == 1
        even = even and (batch == 1 or all(self.fill[name] > _FULL for name in names))
        passes = {
            n: self.passes(n, [self._levels(d) for d in drafts if d.name == n]) for n in names
        }
        return sum(self.foresee(batch, nodes_each, even, passes))

    def _levels(self, draft: DraftOption) -> int:
        """Of a draft that ends early, as expected."""
        early = self.drafters[draft.name].ends_early
        return min(draft.length, max(1, round(draft.nodes))) if early else draft.length

    def table(self, name: Hashable, batch: int) -> list[float]:
        """A sequence's part of the step, by draft length, if all draft alike."""
        table = self._tables.get((name, batch))
        if table is None:
            nodes, fill = self.drafters[name].nodes, self.fill[name]
            alike = [[DraftOption(name, n, fill * m, 1, 0)] * batch for n, m in enumerate(nodes)]
            table = [self.step(batch, drafts) / batch for drafts in alike]
            self._tables[name, batch] = table
        return table

    def reading(self, name: Hashable) -> float:
        """Seconds in which a drafter reads a token of a prompt."""
        seconds, rows = self._reading[name]
        return seconds / rows

    def settles(self, batch: int) -> bool:
        """Whether drafters run no model for now, so that plain steps in a row are measured."""
        seconds = self.cold.measured() if batch == 1 else None
        if seconds is not None:
            self._rest.anchor(group_of(batch), seconds / self.verify(batch, 0.0))
            self._tables.clear()
            self._pays.clear()
        return self.cold.measuring and batch == 1

    def compare(self, batch: int, chosen: Sequence[DraftOption]) -> None:
        """These are drafted. Where passes of one sequence hardly pay, plain steps are measured."""
        if (
            batch == 1
            and chosen
            and chosen[0].length
            and not self.drafters[chosen[0].name].costless
        ):
            self.cold.hardly_pays(chosen[0].gain / chosen[0].seconds * self.rest(1))

    def aftermath(self, batch: int) -> float:
        """Seconds that the plain steps behind a drafter's passes take longer than others in all.
        Several sequences share what passes cost: nothing."""
        group = group_of(batch)
        if batch > 1 or not self._rest.seen(group, COLD):
            return 0.0
        plain = self._rest.factor(group, 0)
        colder = min(self._rest.factor(group, COLD) - plain, MOST * plain)
        return max(0.0, colder) * self.verify(batch, 0.0) * min(self.cold.since, WARM)

    def seen(self, name: Hashable, batch: int) -> int:
        """Steps with drafts of one level that were learnt from, at such a concurrency."""
        nodes = self.fill[name] * self.drafters[name].nodes[1]
        return self._rest.seen(group_of(batch), cell_of(nodes, True))

    def wants_plain(self, batch: int) -> bool:
        """Whether a step without drafts is needed to tell drafting from the rest.

        At a concurrency that is new, some: what drafts cost there is told against them.
        """
        seen = sum(self._rest.seen(group_of(batch), cell) for cell in (0, COLD))
        if not seen:
            return True
        often = _LONG_AGO if self._whole else 4 * _LONG_AGO
        due: int = min(often, _LONG_AGO * 4**seen // 16)
        return self._since_plain >= due

    # -- tokens, and both together -----------------------------------------------------------------

    def none(self, batch: int) -> DraftOption:
        """No draft."""
        return DraftOption(None, 0, 0.0, 1.0, self.rest(batch) / batch)

    def drafts(
        self,
        name: Hashable,
        batch: int,
        gains: Sequence[float],
        first: float = 0.0,
        tokens: int = 1,
        lengths: Iterable[int] | None = None,
        reached: Sequence[float] | None = None,
    ) -> list[DraftOption]:
        """Drafts of a sequence, of all lengths from 1 on by default.

        ``gains``: expected tokens by length. Reading that must come ``first`` takes so long, to be
        written off over so many ``tokens``. ``reached``: levels that drafts have, as expected, by
        length, where they end early.
        """
        table: Sequence[float] = self.table(name, batch)
        nodes, fill = self.drafters[name].nodes, self.fill[name]
        if reached is not None:
            table, nodes = (
                tuple(_between(values, n) for n in reached) for values in (table, nodes)
            )
        now = self.rest(batch) / (batch * table[0])  # the table is some steps old
        return [
            DraftOption(
                name, n, fill * nodes[n], gains[n], now * table[n] + reading, reading, first
            )
            for n in (range(1, len(table)) if lengths is None else lengths)
            for reading in (first * gains[n] / tokens,)
        ]

    def tokens(self, name: Hashable, length: int) -> float:
        """Expected in a step with drafts of so many levels, the target's own token included."""
        return expected_tokens(self.acceptance.everyone(name).rates())[length]

    def may_pay(self, name: Hashable, batch: int, kind: Hashable = None) -> bool:
        """Whether drafts of a sequence that is like all others might gain anything.

        Where no draft is worth its part of a step in which all draft alike, none gains anything in
        any batch: the passes are shared there, and rows cost as much.
        """
        everyone = self.acceptance.everyone(name, kind)
        seen, pays = self._pays.get((name, batch, kind), (-1.0, False))
        if seen != everyone.seen:
            table, gains = self.table(name, batch), expected_tokens(everyone.rates())
            pays = any(gains[n] * table[0] > table[n] for n in range(1, len(table)))
            self._pays[name, batch, kind] = everyone.seen, pays
        return pays

    def rate(self, name: Hashable, length: int, batch: int = 1) -> float:
        """Tokens a second of ``batch`` sequences that all draft so many levels."""
        if not length:
            return batch / self.rest(batch)
        return self.tokens(name, length) / self.table(name, batch)[length]

    def speedup(self, name: Hashable, length: int, batch: int = 1) -> float:
        """Predicted tokens a second by plain decoding's."""
        return self.rate(name, length, batch) / self.rate(None, 0, batch)

    def best_length(self, name: Hashable, batch: int = 1) -> int:
        """The draft length, 1 at least, with the most tokens a second."""
        lengths = range(1, self.drafters[name].longest + 1)
        return max(lengths, key=lambda length: self.rate(name, length, batch))

    # -- learning ----------------------------------------------------------------------------------

    def record_fill(self, name: Hashable, nodes: int, length: int) -> None:
        """A draft of up to ``length`` levels came to so many nodes."""
        share = min(1.0, nodes / self.drafters[name].nodes[length])
        self.fill[name] += 0.05 * (share - self.fill[name])

    def learn_reading(self, name: Hashable, seconds: float, rows: int) -> None:
        """A drafter has read ``rows`` tokens besides drafting."""
        before, count = self._reading[name]
        keep = min(1.0, _ROWS / (count + rows))
        limit = 4 * rows * before / count or seconds  # one hiccup is no policy
        seconds = min(max(seconds, 0.0), limit)
        self._reading[name] = (keep * (before + seconds), keep * (count + rows))

    def learn(
        self,
        batch: int,
        nodes: int,
        seconds: float,
        drafting: float | None = None,
        even: bool = True,
        passes: Mapping[Hashable, float] | None = None,
    ) -> None:
        """A step is over: ``nodes`` were verified for ``batch`` sequences, ``even`` if alike.

        ``passes``: who drafted, and the seconds of those passes as measured alone. ``drafting`` is
        the part of the ``seconds`` that went into it; None if only the whole is known.
        """
        passes, nodes_each = passes or {}, nodes / batch
        group, cell = group_of(batch), cell_of(nodes_each, even)
        if not cell and batch == 1 and self.cold.since < WARM:
            cell = COLD
        known, expected = self.foresee(batch, nodes_each, even, passes)
        self.predicted += known + expected
        self.measured += seconds
        self._since_plain = self._since_plain + 1 if passes else 0
        self._whole = drafting is None and bool(passes)
        if drafting is None:
            # Where plain steps say what the rest takes, drafting answers for what is left. Else
            # all may have become slower, and both are as wrong as the whole.
            whole = seconds * expected / (known + expected)
            drafting = max(seconds - known, 0.0) if self._since_plain < _LONG_AGO else whole
        rest = seconds - drafting if passes else seconds
        self._rest.observe(group, cell, rest / self.verify(batch, nodes_each))
        self._learnt += 1
        if self._learnt % _FRESH == 0:
            self._tables.clear()
            self._pays.clear()
        for name, alone in passes.items() if len(passes) == 1 else ():
            if alone:
                if (name, group) not in self._passes:
                    near = self._price(name, batch)
                    price = self._passes[name, group] = PassPrice()
                    if near is not None:
                        price.overhead, price.factor = near.overhead, near.factor
                price = self._passes[name, group]
                unit = self.drafters[name].seconds(batch)
                price.observe(alone, unit, drafting / self._slowness(batch, nodes_each, even, rest))
            else:
                before = self._handling.get(name, 0.0)
                self._handling[name] = before + 0.05 * (min(drafting, known) / batch - before)


def _between(values: Sequence[float], position: float) -> float:
    """Linear between whole places."""
    low = min(int(position), len(values) - 2)
    return values[low] + (position - low) * (values[low + 1] - values[low])
