"""Which drafts make a batch fastest, given expected tokens and prices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf

from paceline.control.controller import Decision
from paceline.control.correction import node_bucket
from paceline.control.cost import CostModel, DraftOption

MAX_SLOWDOWN = 0.03  # expected slowdown of a request that others' drafts may cause
_MARGIN = 0.97  # of plain decoding's time, that drafts of several sequences may take at most


def choose(
    cost: CostModel, batch: int, options: Sequence[Sequence[DraftOption]], fair: bool = True
) -> list[DraftOption]:
    """One option for each sequence. The first of a sequence's ``options`` is no draft.

    One sequence: the option with the most expected tokens a second. Several: a step takes equally
    long for all of them, so drafts for one slow down the others. Among the choices that make no
    sequence slower than plain decoding, the one with the least mean time per token over the
    sequences (the harmonic mean of their speeds) is taken. If one drafter serves all sequences, its
    passes are shared, so one length for all is tried first.

    Not ``fair``: the most tokens a second of the whole batch, whichever sequences gain them.
    """
    if len(options) == batch == 1:
        return [max(options[0], key=lambda draft: draft.goodput)]

    score = partial(_score, cost, batch, fair)
    no_draft = [alternatives[0] for alternatives in options]
    fastest = [max(alternatives, key=lambda draft: draft.goodput) for alternatives in options]
    candidates = [_choose_separately(options, start) for start in (no_draft, fastest)]
    if len({draft.name for alternatives in options for draft in alternatives[1:]}) == 1:
        alike = range(1, max(map(len, options)))
        candidates[:0] = [[some[min(n, len(some) - 1)] for some in options] for n in alike]
    scores = [score(drafts) for drafts in candidates]
    least = min(scores)
    return candidates[scores.index(least)] if least < _MARGIN * score(no_draft) else no_draft


def with_more_nodes(
    cost: CostModel,
    batch: int,
    options: Sequence[Sequence[DraftOption]],
    chosen: Sequence[DraftOption],
) -> list[DraftOption]:
    """The chosen drafts, but longer, to learn what more rows really cost. Empty if that is known,
    or if the longer drafts would not pay even at the price per row seen so far.

    If start-up measured many rows while other programs ran, their price is too high, and only
    trying them corrects it.
    """
    drafts = list[DraftOption]()
    for alternatives, draft in zip(options, chosen, strict=True):
        bucket = node_bucket(draft.nodes)
        more = (
            option
            for option in alternatives
            if option.name == draft.name and node_bucket(option.nodes) > bucket
        )
        drafts.append(next(more, draft))
    nodes_now, nodes_then = (sum(d.nodes for d in some) / batch for some in (chosen, drafts))
    if node_bucket(nodes_then) <= node_bucket(nodes_now) or cost.is_known(batch, nodes_then):
        return []
    plain, now, then = (cost.verification(batch, n) for n in (0.0, nodes_now, nodes_then))
    at_known_price = (
        cost.step(batch, drafts) - then + plain + (now - plain) * nodes_then / nodes_now
    )
    gain = sum(draft.tokens for draft in drafts) / sum(draft.tokens for draft in chosen)
    return drafts if at_known_price <= gain * cost.step(batch, chosen) else []


def fixed_length(length: int, options: Sequence[DraftOption]) -> Decision:
    """The decision for a request that asks for a draft length: the drafter whose longest draft up
    to that length has the most goodput."""
    longest = {draft.name: draft for draft in options if draft.length <= length}
    best = max(longest.values(), key=lambda draft: draft.goodput, default=None)
    return Decision(length, best.name if best is not None and len(longest) > 1 else None)


def _score(cost: CostModel, batch: int, fair: bool, drafts: Sequence[DraftOption]) -> float:
    """Seconds per token, summed over the sequences; infinite if a sequence becomes too slow.
    Not ``fair``: seconds per token of the whole batch."""
    plain = cost.verification(batch)
    seconds = cost.step(batch, drafts) + sum(draft.reading for draft in drafts)
    if not fair:
        return seconds / (sum(draft.tokens for draft in drafts) + batch - len(drafts))
    # Sequences of the batch that have no options gain one token.
    least = min(draft.tokens for draft in drafts) if len(drafts) == batch else 1.0
    if any(draft.length for draft in drafts) and seconds > (1 + MAX_SLOWDOWN) * plain * least:
        return inf
    return seconds * sum(1 / draft.tokens for draft in drafts)


def _choose_separately(
    options: Sequence[Sequence[DraftOption]], chosen: list[DraftOption]
) -> list[DraftOption]:
    """The best option of each sequence, given the step time of the others; ``chosen`` is the start.

    The score is the product of the step's time and the sum of the times per token. It is bounded by
    its tangent, which is a sum over the sequences, so that each can choose by itself
    (majorisation-minimisation; Hunter and Lange 2004). The result depends on the start.
    """
    seconds = sum(draft.seconds for draft in chosen)
    per_token = sum(1 / draft.tokens for draft in chosen)
    return [
        min(alternatives, key=lambda o: seconds / o.tokens + per_token * o.seconds)
        for alternatives in options
    ]
