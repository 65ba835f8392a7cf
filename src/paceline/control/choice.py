"""The drafts with which a batch is fastest, from gains and prices alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf

from paceline.control.controller import Decision
from paceline.control.correction import cell_of
from paceline.control.cost import CostModel, DraftOption

HURT = 0.03  # by which a request may be slowed down for the sake of others, as expected
WORTH = 0.97  # of plain decoding's time, that several sequences' drafts may take as expected


def choose(
    cost: CostModel, batch: int, options: Sequence[Sequence[DraftOption]], fair: bool = True
) -> list[DraftOption]:
    """One of each sequence's ``options``, the first of which is no draft, for the fastest batch.

    One alone: most expected tokens a second. Several: the least mean time of a token, over the
    sequences (the harmonic mean of their speeds), among the drafts by which no sequence becomes
    slower than by plain decoding: a step takes the same time for all, and drafting for some must
    not slow down those that gain nothing by it. Where one drafter serves all, one length for all is
    tried first, as one pass serves all then; lengths that differ are taken if they gain more.

    Not ``fair``: most tokens a second of all together, whoever gains them.
    """
    if len(options) == batch == 1:
        return [max(options[0], key=lambda draft: draft.gain / draft.seconds)]

    score = partial(_score, cost, batch, fair)
    best = [ways[0] for ways in options]
    least = WORTH * score(best)
    names = {draft.name for ways in options for draft in ways[1:]}
    for index in range(1, max(map(len, options))) if len(names) == 1 else ():
        alike = [ways[min(index, len(ways) - 1)] for ways in options]
        if (seconds := score(alike)) < least:
            best, least = alike, seconds
    fastest = [max(ways, key=lambda o: o.gain / o.seconds) for ways in options]
    for start in ([ways[0] for ways in options], fastest):
        apart = _apart(options, start)
        if (seconds := score(apart)) < least:
            best, least = apart, seconds
    return best


def longer(
    cost: CostModel,
    batch: int,
    options: Sequence[Sequence[DraftOption]],
    chosen: Sequence[DraftOption],
) -> list[DraftOption]:
    """The same drafts with so many nodes more that hardly a step had as many yet, if they would be
    worth more at the price of the rows that are known; else empty. What start-up measured too dear
    beside other work is found only so."""
    drafts = list[DraftOption]()
    for ways, draft in zip(options, chosen, strict=True):
        cell = cell_of(draft.nodes)
        more = (way for way in ways if way.name == draft.name and cell_of(way.nodes) > cell)
        drafts.append(next(more, draft) if draft.length else draft)
    now, then = (sum(draft.nodes for draft in some) / batch for some in (chosen, drafts))
    if cell_of(then) <= cell_of(now) or cost.is_known(batch, then):
        return []
    plain, known, price = (cost.rest(batch, nodes) for nodes in (0.0, now, then))
    at_known_rows = cost.step(batch, drafts) - price + plain + (known - plain) * then / now
    gain = sum(draft.gain for draft in drafts) / sum(draft.gain for draft in chosen)
    return drafts if at_known_rows <= gain * cost.step(batch, chosen) else []


def fixed_length(length: int, options: Sequence[DraftOption]) -> Decision:
    """A request's own length: the member whose longest draft up to it is worth most."""
    longest = {draft.name: draft for draft in options if draft.length <= length}
    best = max(longest.values(), key=lambda draft: draft.gain / draft.seconds, default=None)
    return Decision(length, best.name if best is not None and len(longest) > 1 else None)


def _score(cost: CostModel, batch: int, fair: bool, drafts: Sequence[DraftOption]) -> float:
    """Seconds of a token, summed over the sequences, infinite if any is slowed down. Not ``fair``:
    seconds by tokens of the whole batch."""
    plain = cost.rest(batch)
    seconds = cost.step(batch, drafts) + sum(draft.reading for draft in drafts)
    if not fair:
        return seconds / (sum(draft.gain for draft in drafts) + batch - len(drafts))
    # Others in the batch gain nothing.
    least = min(draft.gain for draft in drafts) if len(drafts) == batch else 1.0
    if any(draft.length for draft in drafts) and seconds > (1 + HURT) * plain * least:
        return inf
    return seconds * sum(1 / draft.gain for draft in drafts)


def _apart(
    options: Sequence[Sequence[DraftOption]], chosen: list[DraftOption]
) -> list[DraftOption]:
    """The best draft of each sequence, given the time that a step takes; begun with some choice.

    The product of the step's time and the sum of the times per token is bounded by its tangent, so
    that sequences decide by themselves (majorisation; Hunter and Lange 2004); twice, as the step
    then takes another time. Where it ends depends on where it begins.
    """
    for _ in range(2):
        seconds = sum(draft.seconds for draft in chosen)
        needed = sum(1 / draft.gain for draft in chosen)
        chosen = [
            min(ways, key=lambda o: seconds / o.gain + needed * o.seconds) for ways in options
        ]
    return chosen
