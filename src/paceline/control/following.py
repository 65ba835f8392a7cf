"""Lookups are compared with the text as it is written, whether their drafts are used or not: full
information at no cost (HedgeSpec, Liu et al. 2025, arXiv 2510.20064)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

from paceline.control.acceptance import kind_of
from paceline.control.cost import CostModel, DraftOption
from paceline.core.batch import Commit, Slice
from paceline.core.sequence import SequenceState
from paceline.draft.base import LookupDraft, LookupDrafter

Offers = Mapping[Hashable, LookupDraft]  # by lookup
Members = Callable[[SequenceState], Collection[Hashable]]
_MAX_PENDING = 16  # pending tokens; a sequence with more is reading its prompt
_MAX_LEVELS = 24  # levels that a lookup is asked for
# Lookups that do not pay are asked every 4 to 32 tokens, so that they take this share of the time
# of plain decoding.
_MIN_INTERVAL, _MAX_INTERVAL, _SHARE = 4, 32, 0.005
_MAX_BALANCE = 1.0  # plain steps


class _FollowedOffer:
    """An offer for a sequence, and how many of its levels the text has confirmed."""

    __slots__ = ("_children", "_node", "_seq", "_start", "accepted", "kind", "offer")

    def __init__(self, offer: LookupDraft, seq: SequenceState) -> None:
        self.offer, self._seq, self._start = offer, seq, len(seq.tokens)
        self.kind = kind_of(seq.params, offer.match_length)
        self.accepted, self._node = 0, -1
        self._children: dict[tuple[int, int], int] = {}  # node by parent and token

    def follow(self) -> bool:
        """Compare with the tokens written since. Whether the offer has ended: in a leaf, or with a
        wrong token."""
        offer, new = self.offer, self._seq.tokens[self._start + self.accepted :]
        if new and not self._children:
            edges = zip(offer.parents, offer.tokens, strict=True)
            self._children = {edge: node for node, edge in enumerate(edges)}
        for token in new:
            node = self._children.get((self._node, token))
            if node is None:
                return True
            self._node, self.accepted = node, self.accepted + 1
        return self.accepted == offer.levels


class LookupFollower:
    """Asks the lookups for offers, and learns how often each would have been right.

    Of each lookup one offer at a time is followed; the next one when that has ended, just as the
    next draft would begin there.
    """

    def __init__(self, drafters: Mapping[Hashable, LookupDrafter], cost: CostModel) -> None:
        self.drafters, self._cost = dict(drafters), cost
        # What lookups' drafts have won less what lookups have cost, in plain steps.
        self._balance = _MAX_BALANCE
        # Tokens of a sequence between lookups while the balance is negative. Tokens, because a step
        # of another drafter may write ten of them.
        self._interval = _MIN_INTERVAL
        self._length = 0  # of all texts at the last lookup, in tokens
        self._followed: dict[int, dict[Hashable, _FollowedOffer]] = {}

    def record_cost(self, seconds: float, batch: int) -> None:
        """Lookups, and decisions on what they found, took ``seconds`` of a step."""
        plain = self._cost.verification(batch)
        interval = seconds / (_SHARE * plain)
        self._interval = int(min(max(interval, _MIN_INTERVAL), _MAX_INTERVAL))
        self._add(-seconds / plain)

    def record_gain(
        self, commits: Sequence[Commit], drafts: Mapping[int, DraftOption], seconds: float
    ) -> None:
        """A step with these ``drafts`` (by sequence) took ``seconds``."""
        steps = seconds / self._cost.verification(len(commits))
        drafted = {seq_id for seq_id, draft in drafts.items() if draft.name in self.drafters}
        gains = (len(commit.tokens) - steps for commit in commits if commit.seq_id in drafted)
        self._add(sum(gains) / len(commits))

    def _add(self, plain_steps: float) -> None:
        self._balance = min(max(self._balance + plain_steps, -_MAX_BALANCE), _MAX_BALANCE)

    def lookup(
        self, seqs: Sequence[SequenceState], members: Members, same_batch: bool
    ) -> dict[int, dict[Hashable, LookupDraft]] | None:
        """Offers that might pay, by sequence and lookup; None if the lookups were not asked, as
        their drafts have won less than lookups took. ``members``: the drafters allowed for a
        sequence. ``same_batch``: the sequences are those of the last step. Earlier offers are
        compared with the text first."""
        if not self.drafters:
            return None
        length = sum(len(seq.tokens) for seq in seqs)
        recent = same_batch and length - self._length < self._interval * len(seqs)
        if recent and self._balance < 0 and all(seq.constraint is None for seq in seqs):
            return None  # forced tokens always pay
        self._length = length
        offers: dict[int, dict[Hashable, LookupDraft]] = {}
        slices_of: dict[Hashable, list[Slice]] = {name: [] for name in self.drafters}
        for seq in seqs:
            self._follow(seq.seq_id)
            view, names = seq.view(), members(seq) if seq.params.may_draft and seq.drafts else ()
            decodes = seq.num_pending <= _MAX_PENDING
            levels = min(_MAX_LEVELS, seq.remaining - 1)
            asked = Slice(view, seq.num_pending * decodes, levels * decodes)
            for name, slices in slices_of.items():
                slices.append(asked if name in names else Slice(view, asked.scheduled))
        for name, slices in slices_of.items():
            for seq, offer in zip(seqs, self.drafters[name].lookup(slices), strict=True):
                if offer is not None and offer.levels:  # wrong parents raise before it is followed
                    followed = _FollowedOffer(offer, seq)
                    self._followed.setdefault(seq.seq_id, {}).setdefault(name, followed)
                    if offer.forced_levels or self._cost.may_pay(name, len(seqs), followed.kind):
                        offers.setdefault(seq.seq_id, {})[name] = offer
        return offers

    def _follow(self, seq_id: int, forget: bool = False) -> None:
        """Compare a sequence's offers with its text. Of those that have ended (``forget``: of all)
        record what was right."""
        offers = self._followed.get(seq_id, {})
        for name, followed in list(offers.items()):
            ended = followed.follow()
            if ended or forget:
                del offers[name]
                reached = min(followed.accepted + ended, followed.offer.levels)
                forced = followed.offer.forced_levels  # nothing is learnt of forced levels
                if reached > forced:
                    levels = reached - forced, followed.accepted - forced
                    self._cost.acceptance.record(seq_id, name, *levels, followed.kind)

    def forget(self, seq_id: int) -> None:
        self._follow(seq_id, forget=True)
        self._followed.pop(seq_id, None)
