"""Predicted seconds and tokens of steps.

A step is drafting (the passes of a drafter) and verification: the target's forward over its
sequences and their draft nodes, the host's work, and lookups. Both are predicted from forwards
that were measured alone, and corrected by every step since (correction.py). The controller asks
while it decodes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from numpy import interp

from paceline.control.acceptance import (
    CONTINUES,
    GREEDY,
    AcceptanceTracker,
    DraftKind,
    expected_tokens,
)
from paceline.control.correction import COLD, Correction, PassPrice, batch_bucket, node_bucket
from paceline.core.costs import DrafterCosts, TargetCosts

WARM_UP = 5  # plain steps behind passes or a prompt, after which the target's weights are cached
_MAX_PLAIN_INTERVAL = 256  # steps after which a plain step is measured again
_MARGINAL = 1.2  # expected speedup below which plain steps are measured several in a row
_MAX_COLD_PENALTY = 0.1  # of a plain step, by which cold caches may be thought to slow it down
_SLOW_STEP = 1.3  # times its expected time; from there on a step says that the machine is busy
_KNOWN_AFTER = 3  # steps that correct a price
_READING_WINDOW = 4096  # tokens read, over which the time of reading one is averaged


class DraftOption(NamedTuple):
    """One way to spend a step on a sequence; ``length`` 0 is no draft.

    ``nodes``: draft nodes to verify. ``tokens``: expected tokens of the step. ``seconds``: the
    sequence's share of the step if all sequences draft alike. Before it drafts, a drafter may have
    to read text that it has not seen: ``reading_now`` are the seconds of that in this very step,
    ``reading`` is the part of them charged to this step, as they are spread over the tokens to
    come. ``kind``: of its acceptance. ``forced``: leading levels that a grammar forces, of which
    nothing is learnt.
    """

    name: Hashable
    length: int
    nodes: float
    tokens: float
    seconds: float
    reading: float = 0.0
    reading_now: float = 0.0
    kind: DraftKind = GREEDY
    forced: int = 0

    @property
    def goodput(self) -> float:
        """Expected tokens a second."""
        return self.tokens / self.seconds


class DraftTable(NamedTuple):
    """By draft length, if all sequences of a batch draft alike: nodes to verify and passes that are
    expected of each, and one sequence's share of the step in seconds."""

    nodes: Sequence[float]
    passes: Sequence[float]
    seconds: Sequence[float]


class CostModel:
    """Predicts seconds and tokens of steps, and is corrected by each step.

    ``target``: forwards measured alone. ``drafters``: costs by name; ``add`` takes further ones.
    """

    def __init__(
        self, target: TargetCosts, drafters: Mapping[Hashable, DrafterCosts] | None = None
    ):
        self.target = target
        self.drafters: dict[Hashable, DrafterCosts] = {}
        self.acceptance = AcceptanceTracker()
        # Nodes proposed, as a share of the most possible: trees are often not full.
        self.fill: dict[Hashable, float] = {}
        self._forward = lru_cache(4096)(lambda batch, nodes: target(batch, 1 + nodes))
        self._correction = Correction()
        self._passes: dict[Hashable, PassPrice] = {}
        self._reading: dict[Hashable, tuple[float, float]] = {}  # seconds, tokens
        self._longest: dict[tuple[Hashable, int], int] = {}  # draft made, by drafter and batch
        # Caches, emptied when more is learnt.
        self._tables: dict[tuple[Hashable, int], DraftTable] = {}
        self._pays: dict[tuple[Hashable, int, DraftKind], bool] = {}
        self._since_plain = _MAX_PLAIN_INTERVAL  # steps since one without drafts
        self._plain_steps = 0  # times that a plain step was asked for
        self._in_a_row = 0  # further ones that are to follow at once
        for name, costs in (drafters or {}).items():
            self.add(name, costs)

    def add(self, name: Hashable, costs: DrafterCosts) -> None:
        """Add a drafter."""
        self.drafters[name] = costs
        self.acceptance.priors[name] = costs.prior
        self.acceptance.depth = max(self.acceptance.depth, costs.max_length)
        self.fill[name], self._passes[name] = 1.0, PassPrice()
        # Until more is known, reading a token costs what a further row adds to a pass.
        row = max(0.0, costs.seconds(1024) - costs.seconds(1)) / 1023
        self._reading[name] = (64 * row, 64.0)

    # -- seconds -----------------------------------------------------------------------------------

    def forward(self, batch: int, nodes: float) -> float:
        """A target forward over ``batch`` sequences with ``nodes`` draft nodes each, as measured
        alone."""
        return self._forward(batch, round(nodes, 1))

    def verification(self, batch: int, nodes: float = 0.0) -> float:
        """A step without its drafting, with ``nodes`` draft nodes for each sequence. With no nodes:
        a plain step."""
        factor = self._correction.factor(batch_bucket(batch), node_bucket(nodes))
        return self.forward(batch, nodes) * factor

    def is_known(self, batch: int, nodes: float) -> bool:
        """Whether steps with about as many nodes have corrected what start-up measured."""
        seen = self._correction.seen(batch_bucket(batch), node_bucket(nodes))
        return seen >= _KNOWN_AFTER

    def passes_alone(self, name: Hashable, lengths: Sequence[int]) -> float:
        """A drafter's passes as measured alone, each over the sequences that still draft.
        ``lengths``: the draft length of each sequence."""
        costs = self.drafters[name]
        passes = [costs.passes[length] for length in lengths]
        counts = (sum(most > number for most in passes) for number in range(max(passes)))
        return sum(map(costs.seconds, counts))

    def drafting(self, batch: int, passes: Mapping[Hashable, float]) -> float:
        """The drafting of a step. ``passes``: by drafter, its ``passes_alone``."""
        return self._correction.machine * sum(
            self._passes[name].seconds(alone, self.drafters[name].seconds(batch))
            for name, alone in passes.items()
            if alone
        )

    def step(self, batch: int, drafts: Iterable[DraftOption]) -> float:
        """A step of ``batch`` sequences with these drafts among them."""
        drafts = [draft for draft in drafts if draft.length]
        lengths: dict[Hashable, list[int]] = {}
        for draft in drafts:
            length, costs = draft.length, self.drafters[draft.name]
            if costs.stops_early:  # only as many levels as are expected
                length = min(length, max(1, round(self.table(draft.name, batch).passes[length])))
            lengths.setdefault(draft.name, []).append(length)
        alone = {name: self.passes_alone(name, levels) for name, levels in lengths.items()}
        nodes = sum(draft.nodes for draft in drafts) / batch
        return self.verification(batch, nodes) + self.drafting(batch, alone)

    def prices(self, name: Hashable, batch: int) -> Sequence[float]:
        """One sequence's share of the step by draft length, if all sequences draft alike."""
        return self.table(name, batch).seconds

    def prices_for(
        self, name: Hashable, batch: int, tokens: Sequence[float], kind: DraftKind, forced: bool
    ) -> Sequence[float]:
        """``prices`` for a sequence whose drafts are expected to gain ``tokens``, by draft length.

        A drafter that ends drafts early goes on where it is right: a sequence that gains a token
        more than all sequences do is drafted a level more. Not so if the first levels are
        ``forced``.
        """
        prices, costs = self.prices(name, batch), self.drafters[name]
        if forced or not costs.stops_early:
            return prices
        level = (costs.passes[-1] - costs.passes[1]) / max(1, costs.max_length - 1)
        level *= self._correction.machine * self._passes[name].factor * costs.seconds(batch) / batch
        usual = expected_tokens(self.acceptance.of_all(name, kind).rates())
        adjusted = [s + level * (t - u) for s, t, u in zip(prices, tokens, usual, strict=False)]
        return [prices[0], *(max(seconds, prices[1]) for seconds in adjusted[1:])]

    def table(self, name: Hashable, batch: int) -> DraftTable:
        """What drafts of each length are expected to cost, if all sequences draft alike."""
        table = self._tables.get((name, batch))
        if table is None:
            costs = self.drafters[name].for_batch(batch)
            shape: Sequence[Sequence[float]] = costs.nodes, costs.passes
            if costs.stops_early:  # those of the expected number of levels
                tokens = expected_tokens(self.acceptance.of_all(name, CONTINUES).rates())
                levels = [count - 1 for count in tokens[: len(costs.nodes)]]
                shape = [interp(levels, range(len(full)), full).tolist() for full in shape]
            (full, passes), fill, price = shape, self.fill[name], self._passes[name]
            machine, one_pass = self._correction.machine, costs.seconds(batch)
            # A lookup rarely finds a full tree; mostly a level has one node.
            nodes = range(len(full)) if costs.model_free else [fill * count for count in full]
            seconds = [self.verification(batch, count) / batch for count in nodes]
            for n, count in enumerate(passes):
                if count:
                    seconds[n] += machine * price.seconds(one_pass * count, one_pass) / batch
            table = self._tables[name, batch] = DraftTable(nodes, passes, seconds)
        return table

    def reading_token(self, name: Hashable) -> float:
        """Seconds in which a drafter reads one token that it has not seen."""
        seconds, tokens = self._reading[name]
        return seconds / tokens

    def longest_made(self, name: Hashable, batch: int) -> int:
        """Levels of the drafter's longest draft so far, at such a concurrency."""
        return self._longest.get((name, batch_bucket(batch)), 0)

    def wants_plain_step(self, batch: int, speedup: float) -> bool:
        """Whether the next step should be plain, to tell drafting from verification.

        Of a single sequence the first step, soon some more, then one now and then. Where the
        expected ``speedup`` is small, several in a row, as those behind drafts or a prompt find
        cold caches and are slower. Several sequences never: what start-up measured has to do.
        Assumes that the plain step is then taken.
        """
        if batch == 1 and self._in_a_row and speedup < _MARGINAL:
            self._in_a_row -= 1
            return True
        count = self._plain_steps
        interval = min(_MAX_PLAIN_INTERVAL, 4 ** (count + 1)) if count else 1
        wanted = batch == 1 and self._since_plain >= interval
        self._in_a_row = WARM_UP if wanted and count else 0
        self._plain_steps += wanted
        if wanted:
            self._since_plain = 0
        return wanted

    def cold_penalty(self, batch: int) -> float:
        """Seconds by which a plain step soon after a drafter's passes is slower than others, as the
        passes drove the target's weights out of the caches."""
        bucket = batch_bucket(batch)
        if not self._correction.seen(bucket, COLD):
            return 0.0
        slower = self._correction.factor(bucket, COLD) / self._correction.factor(bucket, 0) - 1
        return min(max(0.0, slower), _MAX_COLD_PENALTY) * self.verification(batch)

    # -- tokens and seconds ------------------------------------------------------------------------

    def may_pay(self, name: Hashable, batch: int, kind: DraftKind) -> bool:
        """Whether drafts of an average sequence might gain anything.

        If no draft length pays where all sequences draft alike, none pays in any batch: passes are
        shared there, and rows cost as much.
        """
        key = name, batch, kind
        if key not in self._pays:
            tokens = expected_tokens(self.acceptance.of_all(name, kind).rates())
            plain, *prices = self.prices(name, batch)
            drafts = zip(tokens[1:], prices, strict=False)
            self._pays[key] = any(count * plain > seconds for count, seconds in drafts)
        return self._pays[key]

    # -- learning ----------------------------------------------------------------------------------

    def record_fill(self, name: Hashable, batch: int, nodes: int, length: int) -> None:
        """A draft of ``length`` levels (as many as it has, if it ended early) has ``nodes``."""
        share = min(1.0, nodes / self.drafters[name].for_batch(batch).nodes[length])
        self.fill[name] += 0.05 * (share - self.fill[name])

    def record_length(self, name: Hashable, batch: int, length: int) -> None:
        """A draft of ``length`` levels was made."""
        self._longest[name, batch_bucket(batch)] = max(length, self.longest_made(name, batch))

    def learn_reading(self, name: Hashable, seconds: float, tokens: int) -> None:
        """A drafter took ``seconds`` to read ``tokens``, besides drafting."""
        known, count = self._reading[name]
        keep = min(1.0, _READING_WINDOW / (count + tokens))
        limit = 4 * tokens * known / count or seconds  # bounds what one disturbed step changes
        seconds = min(max(seconds, 0.0), limit)
        self._reading[name] = (keep * (known + seconds), keep * (count + tokens))

    def learn_plain(self, batch: int, seconds: float, cold: bool = False) -> None:
        """A plain step took ``seconds``. ``cold``: soon after a drafter's passes."""
        self._since_plain = 0
        ratio = seconds / self.forward(batch, 0.0)
        self._correction.observe(batch_bucket(batch), COLD if cold else 0, ratio)
        self._expire()

    def learn_drafts(
        self,
        batch: int,
        nodes: float,
        seconds: float,
        drafting: float | None,
        passes: Mapping[Hashable, float],
    ) -> None:
        """A step with ``nodes`` draft nodes for each sequence took ``seconds``, of these
        ``drafting`` for the drafts (None: not measured). ``passes``: by drafter, its
        ``passes_alone``."""
        self._since_plain += 1
        if drafting is None:  # it took what verification does not explain
            drafting = max(seconds - self.verification(batch, nodes), 0.0)
        drafted = [name for name, alone in passes.items() if alone]
        verification = seconds - drafting if drafted else seconds
        ratio = verification / self.forward(batch, nodes)
        self._correction.observe(batch_bucket(batch), node_bucket(nodes), ratio)
        if len(drafted) == 1:
            name = drafted[0]
            # If the whole step was slow, its passes were slow for the same reason.
            ratio = verification / self.verification(batch, nodes)
            slower = self._correction.machine * (ratio if ratio > _SLOW_STEP else 1.0)
            one_pass = self.drafters[name].seconds(batch)
            self._passes[name].observe(passes[name], one_pass, drafting / slower)
        self._expire()

    def _expire(self) -> None:
        """Empty the caches, as more was learnt."""
        self._tables.clear()
        self._pays.clear()
