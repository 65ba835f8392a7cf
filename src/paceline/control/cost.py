"""What steps take, for everybody who asks.

A step is drafting (the passes of a drafter) and the rest: the target's forward over its sequences
and their draft nodes, the host's work, and looking something up. Both are predicted from forwards
measured alone, and corrected by every step since (correction.py). The controller asks while it
decodes; ``tune`` and ``bench`` make a model of what they have measured.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from numpy import interp

from paceline.control.acceptance import GOES_ON, AcceptanceTracker
from paceline.control.correction import COLD, Correction, PassPrice, cell_of
from paceline.core.costs import DrafterCosts, TargetCosts

_LONG_AGO, _LATELY = 256, 64  # steps
_FRESH = 16  # observations after which it is judged anew what drafts look like
WARM = 5  # plain steps behind passes or a prompt, until the target's weights are cached again
_CLOSE = 1.2  # a speedup, below which it matters what a plain step takes in a row of them
_COLDEST = 0.1  # of a plain step, by which one behind passes may be thought slower
_SLOW = 1.3  # times what is known, from which a step tells of the machine
_SURELY = 1.1  # times a step with drafts, from which a plain one is not slower for noise alone
_ENOUGH = 3  # steps that correct a price
_ROWS = 4096  # tokens read, about which the time of one is averaged


class DraftOption(NamedTuple):
    """One way to spend a step on a sequence; ``length`` 0 is no draft.

    ``nodes`` to verify, expected tokens of the step (``gain``), ``seconds`` of its part of the step
    if all do alike, and of these what ``reading`` costs that must come first, written off over the
    tokens to come; ``first`` of it in this very step. ``sampled``: acceptance is that of sampled
    text. ``certain``: levels before those that acceptance is learnt of.
    """

    name: Hashable
    length: int
    nodes: float
    gain: float
    seconds: float
    reading: float = 0.0
    first: float = 0.0
    sampled: bool = False
    certain: int = 0


class _Alike(NamedTuple):
    """Drafts of every length if all sequences draft alike: most nodes of each, and, of those that
    are verified, the forward and the passes as measured alone."""

    nodes: Sequence[float]
    cells: Sequence[int]  # of the nodes that are verified
    verify: Sequence[float]
    passes: Sequence[float]


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
        # Nodes proposed, as a share of the most: trees are often not full.
        self.fill: dict[Hashable, float] = {}
        self._forward = lru_cache(4096)(lambda batch, nodes: target(batch, 1 + nodes))
        self._rest = Correction()
        self._passes: dict[Hashable, PassPrice] = {}
        self._reading: dict[Hashable, tuple[float, float]] = {}  # seconds and tokens of prompts
        self._tables: dict[tuple[Hashable, int], Sequence[float]] = {}  # until more is learnt
        self._alike: dict[tuple[Hashable, int], _Alike] = {}
        self._pays: dict[tuple[Hashable, int, Hashable, bool], bool] = {}  # until more is learnt
        self._longest: dict[tuple[Hashable, int], int] = {}  # draft made, by drafter and group
        self._learnt = 0
        self._since_plain = _LONG_AGO  # steps since one without drafts
        self._asked = self._row = 0  # times that one was wanted; how many more in a row
        for name, costs in (drafters or {}).items():
            self.add(name, costs)

    def add(self, name: Hashable, costs: DrafterCosts) -> None:
        """Know one drafter more."""
        self.drafters[name] = costs
        self.acceptance.priors[name] = costs.prior
        self.acceptance.depth = max(self.acceptance.depth, costs.longest)
        self.fill[name], self._passes[name] = 1.0, PassPrice()
        row = max(0.0, costs.seconds(1024) - costs.seconds(1)) / 1023
        self._reading[name] = (64 * row, 64.0)  # at first what a pass grows by for a further row

    # -- seconds -----------------------------------------------------------------------------------

    def verify(self, batch: int, nodes: float) -> float:
        """A target forward over ``batch`` sequences and ``nodes`` draft nodes each, as measured."""
        return self._forward(batch, round(nodes, 1))

    def rest(self, batch: int, nodes: float = 0.0) -> float:
        """All of a step but the drafting, with ``nodes`` of each sequence."""
        return self.verify(batch, nodes) * self._rest.factor(group_of(batch), cell_of(nodes))

    def is_known(self, batch: int, nodes: float) -> bool:
        """Whether steps with about so many nodes have corrected what start-up measured."""
        return self._rest.seen(group_of(batch), cell_of(nodes)) >= _ENOUGH

    def passes(self, name: Hashable, lengths: Sequence[int]) -> float:
        """A drafter's passes as measured alone, each over the sequences not done yet."""
        costs = self.drafters[name]
        if costs.costless:
            return 0.0
        passes = [costs.passes[length] for length in lengths]
        if len(passes) == 1:
            return passes[0] * costs.seconds(1)
        counts = (sum(most > number for most in passes) for number in range(max(passes)))
        return sum(map(costs.seconds, counts))

    def drafting(self, batch: int, passes: Mapping[Hashable, float]) -> float:
        """The drafting of a step, by seconds of each drafter's passes alone."""
        seconds = 0.0
        for name, alone in passes.items():
            if alone:
                seconds += self._passes[name].seconds(alone, self.drafters[name].seconds(batch))
        return self._rest.drift * seconds

    def step(self, batch: int, drafts: Iterable[DraftOption]) -> float:
        """A step of ``batch`` sequences with these drafts among them."""
        drafts = [draft for draft in drafts if draft.length]
        if not drafts:
            return self.rest(batch)
        nodes = [draft.nodes for draft in drafts]
        lengths: dict[Hashable, list[int]] = {}
        for draft in drafts:
            levels, drafter = draft.length, self.drafters[draft.name]
            if drafter.ends_early:  # its levels are those that are expected
                passes = self._drafts_alike(draft.name, batch).passes[levels]
                levels = min(levels, max(1, round(passes / drafter.seconds(batch))))
            lengths.setdefault(draft.name, []).append(levels)
        alone = {name: self.passes(name, levels) for name, levels in lengths.items()}
        return self.rest(batch, sum(nodes) / batch) + self.drafting(batch, alone)

    def priced(
        self, name: Hashable, batch: int, gains: Sequence[float], sampled: bool, certain: bool
    ) -> Sequence[float]:
        """``table`` for a sequence whose drafts gain so much: those that end early go on where they
        are right, so who gains a token more than all do has a level more, unless the first are
        ``certain``."""
        table, costs = self.table(name, batch), self.drafters[name]
        if certain or not costs.ends_early:
            return table
        level = (costs.passes[-1] - costs.passes[1]) / max(1, costs.longest - 1)
        level *= self._rest.drift * self._passes[name].factor * costs.seconds(batch) / batch
        usual = self.acceptance.everyone(name, None, sampled).tokens()
        longer = [s + level * (g - u) for s, g, u in zip(table, gains, usual, strict=False)]
        return [table[0], *(max(seconds, table[1]) for seconds in longer[1:])]

    def table(self, name: Hashable, batch: int) -> Sequence[float]:
        """A sequence's part of the step, by draft length, if all draft alike."""
        table = self._tables.get((name, batch))
        if table is None:
            alike, unit = self._drafts_alike(name, batch), self.drafters[name].seconds(batch)
            group, price, drift = group_of(batch), self._passes[name], self._rest.drift
            factors = {cell: self._rest.factor(group, cell) / batch for cell in set(alike.cells)}
            table = [v * factors[c] for v, c in zip(alike.verify, alike.cells, strict=True)]
            if not self.drafters[name].costless:
                table = [
                    seconds + (drift * price.seconds(passes, unit) / batch if passes else 0.0)
                    for seconds, passes in zip(table, alike.passes, strict=True)
                ]
            self._tables[name, batch] = table
        return table

    def nodes(self, name: Hashable, batch: int) -> Sequence[float]:
        """Nodes by draft length, where all levels are full that a draft is expected to have."""
        return self._drafts_alike(name, batch).nodes

    def _drafts_alike(self, name: Hashable, batch: int) -> _Alike:
        alike = self._alike.get((name, batch))
        if alike is None:
            drafter = self.drafters[name].among(batch)
            nodes: Sequence[float] = drafter.nodes
            passes: Sequence[float] = drafter.passes
            if drafter.ends_early:  # as of the levels that are expected
                tokens = self.acceptance.everyone(name, GOES_ON).tokens()
                levels = [count - 1 for count in tokens[: len(nodes)]]
                nodes, passes = (
                    interp(levels, range(len(full)), full).tolist() for full in (nodes, passes)
                )
            # What a lookup finds is rarely a full tree, and a level of it mostly a node.
            fill = self.fill[name]
            verified = range(len(nodes)) if drafter.costless else [fill * n for n in nodes]
            verify = [self.verify(batch, count) for count in verified]
            one = drafter.seconds(batch)
            cells = list(map(cell_of, verified))
            alike = _Alike(nodes, cells, verify, [one * count for count in passes])
            self._alike[name, batch] = alike
        return alike

    def reading(self, name: Hashable) -> float:
        """Seconds in which a drafter reads a token of a prompt."""
        seconds, rows = self._reading[name]
        return seconds / rows

    def longest_seen(self, name: Hashable, batch: int) -> int:
        """Levels of the longest draft that was made at such a concurrency or a larger one."""
        group, made = group_of(batch), self._longest.items()
        return max((n for (of, at), n in made if of == name and at >= group), default=0)

    def wants_plain(self, batch: int, speedup: float) -> bool:
        """Whether a plain step is needed to tell drafting from the rest: of one sequence the first,
        soon some more, then one now and then. Where drafts hardly gain, ``speedup`` by a plain
        step, several in a row: those behind drafts or a prompt are slower than those to come.
        Several sequences are drafted for by what was measured. What is granted is counted."""
        if batch == 1 and self._row and speedup < _CLOSE:
            self._row -= 1
            return True
        wait = min(_LONG_AGO, 4 ** (self._asked + 1)) if self._asked else 1
        wanted = batch == 1 and self._since_plain >= wait
        self._row = WARM if wanted and self._asked else 0
        self._asked += wanted
        return wanted

    def coldness(self, batch: int) -> float:
        """Seconds by which a plain step soon after a drafter's passes is longer than others."""
        group = group_of(batch)
        if not self._rest.seen(group, COLD):
            return 0.0
        colder = self._rest.factor(group, COLD) / self._rest.factor(group, 0) - 1
        return min(max(0.0, colder), _COLDEST) * self.rest(batch)

    # -- tokens, and both together -----------------------------------------------------------------

    def may_pay(
        self, name: Hashable, batch: int, kind: Hashable = None, sampled: bool = False
    ) -> bool:
        """Whether drafts of a sequence that is like all others might gain anything.

        Where no draft is worth its part of a step in which all draft alike, none gains anything in
        any batch: the passes are shared there, and rows cost as much.
        """
        key = name, batch, kind, sampled
        if key not in self._pays:
            gains = self.acceptance.everyone(name, kind, sampled).tokens()
            plain, *table = self.table(name, batch)
            drafts = zip(gains[1:], table, strict=False)
            self._pays[key] = any(gain * plain > seconds for gain, seconds in drafts)
        return self._pays[key]

    # -- learning ----------------------------------------------------------------------------------

    def record_fill(self, name: Hashable, batch: int, nodes: int, length: int) -> None:
        """A draft of up to ``length`` levels, or of so many where it ended early, has ``nodes``."""
        share = min(1.0, nodes / self.drafters[name].among(batch).nodes[length])
        self.fill[name] += 0.05 * (share - self.fill[name])

    def learn_reading(self, name: Hashable, seconds: float, rows: int) -> None:
        """A drafter has read ``rows`` tokens besides drafting."""
        before, count = self._reading[name]
        keep = min(1.0, _ROWS / (count + rows))
        limit = 4 * rows * before / count or seconds  # one hiccup is no policy
        seconds = min(max(seconds, 0.0), limit)
        self._reading[name] = (keep * (before + seconds), keep * (count + rows))

    def learn_plain(self, batch: int, seconds: float | None, cold: bool = False) -> None:
        """A step without drafts took so long (None: it is no measure); ``cold``: soon after a
        drafter's passes."""
        self._since_plain = 0
        if seconds is None:
            return
        cell = COLD if cold else 0
        self._rest.observe(group_of(batch), cell, seconds / self.verify(batch, 0.0))
        self._age()

    def learn_drafts(
        self,
        batch: int,
        nodes: float,
        seconds: float,
        drafting: float | None,
        passes: Mapping[Hashable, float],
    ) -> None:
        """A step took so long, ``drafting`` of it for drafts of ``nodes`` a sequence; None if only
        the whole is known. ``passes``: who drafted, and seconds of these passes as measured alone.
        """
        self._since_plain += 1
        group = group_of(batch)
        if drafting is None:
            # Where plain steps say what the rest takes, drafting answers for what is left. Else
            # both are as wrong as the whole.
            rest, foreseen = self.rest(batch, nodes), self.drafting(batch, passes)
            whole = seconds * foreseen / (rest + foreseen)
            drafting = max(seconds - rest, 0.0) if self._since_plain < _LATELY else whole
        drafted = [name for name, alone in passes.items() if alone]
        rest = seconds - drafting if drafted else seconds
        self._rest.observe(group, cell_of(nodes), rest / self.verify(batch, nodes))
        if self.rest(batch) > _SURELY * rest:  # more rows take no less: it is thought too slow
            self._rest.observe(group, 0, rest / self.verify(batch, 0.0))
        if len(drafted) == 1:
            name = drafted[0]
            # A step that was slow as a whole says nothing against its draft.
            off = rest / self.rest(batch, nodes)
            slow = self._rest.drift * (off if off > _SLOW else 1.0)
            unit = self.drafters[name].seconds(batch)
            self._passes[name].observe(passes[name], unit, drafting / slow)
        self._age()

    def note(self, name: Hashable, batch: int, length: int) -> None:
        """A draft of so many levels was made."""
        key = name, group_of(batch)
        self._longest[key] = max(length, self._longest.get(key, 0))

    def _age(self) -> None:
        self._learnt += 1
        self._tables.clear()
        self._pays.clear()
        if self._learnt <= _FRESH or self._learnt % _FRESH == 0:
            self._alike.clear()
