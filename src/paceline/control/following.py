"""Lookups are followed along the text, used or not: full information for nothing (HedgeSpec,
Liu et al. 2025, arXiv 2510.20064)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from paceline.control.acceptance import AcceptanceTracker, kind_of
from paceline.core.batch import Slice
from paceline.core.sequence import SequenceState
from paceline.draft.base import LookupDrafter, Offer

Offers = Mapping[Hashable, Offer]  # by lookup
_READ_ALONG = 16  # pending tokens; more are a prompt
_DEEPEST = 24  # levels that are asked for


class _Followed:
    """An offer, and how far the text has gone along it."""

    __slots__ = ("_below", "_node", "accepted", "kind", "levels")

    def __init__(self, offer: Offer) -> None:
        self.kind, self.levels = kind_of(offer.confidence), len(offer.nodes) - 1
        self.accepted, self._node = 0, -1
        edges = zip(offer.parents, offer.tokens, strict=True)
        self._below = {edge: node for node, edge in enumerate(edges)}

    def ended(self, tokens: Sequence[int]) -> bool:
        """Go on with what was committed; whether it has ended, in a leaf or with a wrong token."""
        for token in tokens:
            node = self._below.get((self._node, token))
            if node is None:
                return True
            self._node, self.accepted = node, self.accepted + 1
        return self.accepted == self.levels


class LookupFollower:
    """Asks the lookups in each step, and learns how often each would have been right.

    The next offer of a lookup is followed when the last one has ended, as the next draft would be.
    """

    def __init__(
        self, drafters: Mapping[Hashable, LookupDrafter], acceptance: AcceptanceTracker
    ) -> None:
        self.drafters = dict(drafters)
        self._acceptance = acceptance
        self._followed: dict[int, dict[Hashable, _Followed]] = {}

    def lookup(
        self,
        seqs: Sequence[SequenceState],
        may: Callable[[SequenceState, Hashable], bool],
        most: int = _DEEPEST,
    ) -> dict[int, dict[Hashable, Offer]]:
        """What is found for each sequence that ``may`` use a lookup, of at most so many levels."""
        offers: dict[int, dict[Hashable, Offer]] = {}
        views = [seq.view() for seq in seqs]
        for name, drafter in self.drafters.items():
            slices = [
                Slice(view, view.num_pending if ready else 0, min(most, seq.remaining - 1) * ready)
                for seq, view in zip(seqs, views, strict=True)
                for ready in (seq.num_pending <= _READ_ALONG and seq.drafts and may(seq, name),)
            ]
            for item, offer in zip(slices, drafter.lookup(slices), strict=True):
                if offer is not None:
                    seq_id = item.seq.seq_id
                    offers.setdefault(seq_id, {})[name] = offer
                    followed = self._followed.setdefault(seq_id, {})
                    if name not in followed:
                        followed[name] = _Followed(offer)
        return offers

    def observe(self, seq_id: int, tokens: Sequence[int]) -> None:
        """A sequence went on with these."""
        offers = self._followed.get(seq_id)
        for name, followed in list(offers.items()) if offers else ():
            known, ended = followed.accepted, followed.ended(tokens)
            reached = min(followed.accepted + ended, followed.levels)
            if ended or followed.accepted > known:
                self._acceptance.record(
                    seq_id, name, reached, followed.accepted, known, followed.kind
                )
            if ended:
                del offers[name]  # type: ignore[union-attr]

    def forget(self, seq_id: int) -> None:
        self._followed.pop(seq_id, None)
