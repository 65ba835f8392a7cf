"""Lookups are followed along the text, used or not: full information for nothing (HedgeSpec,
Liu et al. 2025, arXiv 2510.20064)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain
from time import perf_counter

from paceline.control.acceptance import is_sampled, kind_of
from paceline.control.cost import CostModel, DraftOption
from paceline.core.batch import Commit, Slice
from paceline.core.sequence import SequenceState
from paceline.draft.base import LookupDrafter, Offer

Offers = Mapping[Hashable, Offer]  # by lookup
_READ_ALONG = 16  # pending tokens; more are a prompt
_DEEPEST = 24  # levels that are asked for
# Where asking does not pay, only in one of so many steps, so that it takes this share of the time.
_RARELY, _RAREST, _SHARE = 4, 32, 0.005
_BOUND = 1.0  # plain steps that asking may lose, and that must be won back, at most


class _Followed:
    """An offer, and how far the text has gone along it."""

    __slots__ = ("_below", "_node", "accepted", "certain", "kind", "levels", "sampled")

    def __init__(self, offer: Offer, sampled: bool) -> None:
        self.kind, self.levels = kind_of(offer.confidence), len(offer.nodes) - 1
        self.sampled, self.certain = sampled, offer.certain
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

    def __init__(self, drafters: Mapping[Hashable, LookupDrafter], cost: CostModel) -> None:
        self.drafters, self._cost = dict(drafters), cost
        self._balance = _BOUND  # what drafts of lookups won, less what asking took, in plain steps
        self._asking, self._wait = 1e-4, _RARELY  # seconds of asking once, of late; steps
        self._followed: dict[int, dict[Hashable, _Followed]] = {}
        self._committed: list[Sequence[Commit]] = []  # by steps since a lookup was asked

    def worthwhile(
        self,
        seqs: Sequence[SequenceState],
        may: Callable[[SequenceState, Hashable], bool],
        step: int,
        same: bool,
    ) -> dict[int, Offers]:
        """What is found that might pay. Where drafts of lookups have won less than asking took,
        they are asked less often. ``same``: the sequences are those of the last step."""
        batch = len(seqs)
        rarely = same and self._balance < 0 and step % self._wait
        rarely = rarely and all(seq.constraint is None for seq in seqs)  # what is forced pays
        if rarely or not self.drafters:
            return {}
        began = perf_counter()
        self._follow()
        worth: dict[int, Offers] = {}
        offered = self.lookup(seqs, may)
        for seq in seqs:
            pay = {
                name: offer
                for name, offer in offered.get(seq.seq_id, {}).items()
                if self._may_pay(name, offer, seq, batch)
            }
            if pay:
                worth[seq.seq_id] = pay
        seconds, plain = perf_counter() - began, self._cost.rest(batch)
        self._asking += (min(seconds, 4 * self._asking) - self._asking) / 8
        self._wait = int(min(max(self._asking / (_SHARE * plain), _RARELY), _RAREST))
        self._add(-seconds / plain)
        return worth

    def _may_pay(self, name: Hashable, offer: Offer, seq: SequenceState, batch: int) -> bool:
        kind, sampled = kind_of(offer.confidence), is_sampled(seq.params)
        return offer.certain > 0 or self._cost.may_pay(name, batch, kind, sampled)

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
        self, seqs: Sequence[SequenceState], may: Callable[[SequenceState, Hashable], bool]
    ) -> dict[int, dict[Hashable, Offer]]:
        """What is found for each sequence that ``may`` use a lookup."""
        offers: dict[int, dict[Hashable, Offer]] = {}
        views = [seq.view() for seq in seqs]
        for name, drafter in self.drafters.items():
            slices = [
                Slice(view, view.num_pending * ready, min(_DEEPEST, seq.remaining - 1) * ready)
                for seq, view in zip(seqs, views, strict=True)
                for ready in (seq.num_pending <= _READ_ALONG and seq.drafts and may(seq, name),)
            ]
            for seq, offer in zip(seqs, drafter.lookup(slices), strict=True):
                if offer is not None:
                    offers.setdefault(seq.seq_id, {})[name] = offer
                    followed = self._followed.setdefault(seq.seq_id, {})
                    if name not in followed:
                        followed[name] = _Followed(offer, is_sampled(seq.params))
        return offers

    def observe(self, commits: Sequence[Commit]) -> None:
        """Sequences went on."""
        if self._followed:
            self._committed.append(commits)

    def _follow(self) -> None:
        for commit in chain.from_iterable(self._committed):
            self._go_on(commit.seq_id, commit.tokens)
        self._committed.clear()

    def _go_on(self, seq_id: int, tokens: Sequence[int]) -> None:
        offers = self._followed.get(seq_id, {})
        for name, followed in list(offers.items()):
            known, ended = followed.accepted, followed.ended(tokens)
            reached = min(followed.accepted + ended, followed.levels)
            certain = followed.certain  # nothing is learnt from what was forced
            levels = reached - certain, followed.accepted - certain, max(known - certain, 0)
            if levels[0] > 0 and (ended or followed.accepted > known):
                kind = followed.kind, followed.sampled
                self._cost.acceptance.record(seq_id, name, *levels, *kind)
            if ended:
                del offers[name]

    def forget(self, seq_id: int) -> None:
        self._follow()
        self._followed.pop(seq_id, None)
