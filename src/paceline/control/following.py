"""Lookups are followed along the text, used or not: full information for nothing (HedgeSpec,
Liu et al. 2025, arXiv 2510.20064)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

from paceline.control.acceptance import is_sampled, kind_of
from paceline.control.cost import CostModel, DraftOption
from paceline.core.batch import Commit, Slice
from paceline.core.sequence import SequenceState
from paceline.draft.base import LookupDrafter, Offer

Offers = Mapping[Hashable, Offer]  # by lookup
Members = Callable[[SequenceState], Collection[Hashable]]
_READ_ALONG = 16  # pending tokens; more are a prompt
_DEEPEST = 24  # levels that are asked for
# Where asking does not pay, only in one of so many steps, so that it takes this share of the time.
_RARELY, _RAREST, _SHARE = 4, 32, 0.005
_BOUND = 1.0  # plain steps that asking may lose, and that must be won back, at most


class _Followed:
    """An offer for a sequence, and how far its text has gone along it."""

    __slots__ = ("_below", "_node", "_seq", "_start", "accepted", "kind", "offer", "sampled")

    def __init__(self, offer: Offer, seq: SequenceState) -> None:
        self.offer, self._seq, self._start = offer, seq, len(seq.tokens)
        self.kind, self.sampled = kind_of(offer.confidence), is_sampled(seq.params)
        self.accepted, self._node = 0, -1
        self._below: dict[tuple[int, int], int] = {}

    def ended(self) -> bool:
        """Go on with what was written; whether it has ended, in a leaf or with a wrong token."""
        offer, new = self.offer, self._seq.tokens[self._start + self.accepted :]
        if new and not self._below:
            edges = zip(offer.parents, offer.tokens, strict=True)
            self._below = {edge: node for node, edge in enumerate(edges)}
        for token in new:
            node = self._below.get((self._node, token))
            if node is None:
                return True
            self._node, self.accepted = node, self.accepted + 1
        return self.accepted == offer.levels


class LookupFollower:
    """Asks the lookups in each step, and learns how often each would have been right.

    The next offer of a lookup is followed when the last one has ended, as the next draft would be.
    """

    def __init__(self, drafters: Mapping[Hashable, LookupDrafter], cost: CostModel) -> None:
        self.drafters, self._cost = dict(drafters), cost
        self._balance = _BOUND  # what drafts of lookups won, less what asking took, in plain steps
        self._asking, self._wait = 1e-3, _RARELY  # seconds of asking once, of late; steps
        self._followed: dict[int, dict[Hashable, _Followed]] = {}

    def spend(self, seconds: float, batch: int) -> None:
        """To ask, and to decide on what was found, took so long."""
        plain = self._cost.rest(batch)
        self._asking += (min(seconds, 4 * self._asking) - self._asking) / 8
        self._wait = int(min(max(self._asking / (_SHARE * plain), _RARELY), _RAREST))
        self._add(-seconds / plain)

    def _add(self, won: float) -> None:
        self._balance = min(max(self._balance + won, -_BOUND), _BOUND)

    def earn(
        self, commits: Sequence[Commit], made: Mapping[int, DraftOption], seconds: float
    ) -> None:
        """A step took so long, with drafts ``made`` by sequence."""
        plain = self._cost.rest(len(commits))
        drafted = [c for c in commits if c.seq_id in made and made[c.seq_id].name in self.drafters]
        if drafted:
            self._add(sum(len(c.tokens) - seconds / plain for c in drafted) / len(commits))

    def lookup(
        self, seqs: Sequence[SequenceState], members: Members, step: int, same: bool
    ) -> dict[int, dict[Hashable, Offer]] | None:
        """What is found that might pay, of the ``members`` that may draft for each; None: not
        asked. Where drafts of lookups have won less than asking took, they are asked less often.
        ``same``: the sequences are those of the last step. Offers so far are followed first."""
        if not self.drafters:
            return None
        rarely = same and self._balance < 0 and step % self._wait
        if rarely and all(seq.constraint is None for seq in seqs):  # what is forced pays
            return None
        offers: dict[int, dict[Hashable, Offer]] = {}
        by_name: dict[Hashable, list[Slice]] = {name: [] for name in self.drafters}
        for seq in seqs:
            self._go_on(seq.seq_id)
            view, names = seq.view(), members(seq) if seq.params.may_draft and seq.drafts else ()
            ready = seq.num_pending <= _READ_ALONG
            asked = Slice(view, seq.num_pending * ready, min(_DEEPEST, seq.remaining - 1) * ready)
            for name, slices in by_name.items():
                slices.append(asked if name in names else Slice(view, asked.scheduled))
        for name, slices in by_name.items():
            for seq, offer in zip(seqs, self.drafters[name].lookup(slices), strict=True):
                if offer is not None:
                    followed = self._followed.setdefault(seq.seq_id, {})
                    if name not in followed:
                        followed[name] = _Followed(offer, seq)
                    kind, sampled = kind_of(offer.confidence), is_sampled(seq.params)
                    if offer.certain or self._cost.may_pay(name, len(seqs), kind, sampled):
                        offers.setdefault(seq.seq_id, {})[name] = offer
        return offers

    def _go_on(self, seq_id: int) -> None:
        offers = self._followed.get(seq_id, {})
        for name, followed in list(offers.items()):
            known, ended = followed.accepted, followed.ended()
            reached = min(followed.accepted + ended, followed.offer.levels)
            certain = followed.offer.certain  # nothing is learnt from what was forced
            levels = reached - certain, followed.accepted - certain, max(known - certain, 0)
            if levels[0] > 0 and (ended or followed.accepted > known):
                kind = followed.kind, followed.sampled
                self._cost.acceptance.record(seq_id, name, *levels, *kind)
            if ended:
                del offers[name]

    def forget(self, seq_id: int) -> None:
        self._go_on(seq_id)
        self._followed.pop(seq_id, None)
