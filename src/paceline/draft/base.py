"""What the engine asks of a drafter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.sequence import SequenceView
from paceline.core.transfer import to_device
from paceline.core.tree import TokenTree, depths_of, is_chain


@runtime_checkable
class Drafter(Protocol):
    """Proposes candidates for the next tokens of every sequence in a plan.

    A drafter may propose anything, also nothing: the output never depends on it, only the speed.
    Sequences are known by ``seq_id``; after ``forget`` an id may come back with other tokens.
    """

    @property
    def name(self) -> str: ...

    @property
    def features(self) -> tuple[int, ...]:
        """Target layers whose inputs ``observe`` wants to see; () for none.

        Set ``reads_logits`` to False if ``observe`` reads no logits: greedy steps then have none.
        """
        ...

    def max_nodes(self, length: int) -> int:
        """Most nodes of a tree of ``length`` levels: cache indices to reserve for it."""
        ...

    def passes(self, length: int) -> int:
        """Forwards of the drafter that a tree of ``length`` levels takes; ``warm_up`` is one."""
        ...

    def propose(self, plan: Plan) -> list[TokenTree]:
        """One tree per slice, on the target's device; empty for slices that do not decode."""
        ...

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """See what the step committed and what the target put out, before the next ``propose``.

        ``Commit`` says which rows of ``out`` belong to which token.
        """
        ...

    def warm_up(self, batch_size: int) -> None:
        """Do the work of one of its ``passes`` for ``batch_size`` sequences, leaving no trace.

        Start-up times this to know what drafting costs: of greedy requests. Where sampled ones cost
        more, their first steps tell that (control/correction.py).
        """
        ...

    def forget(self, seq_id: int) -> None:
        """Drop all state of a sequence (finished, cancelled or preempted)."""
        ...


def with_members(drafter: Any) -> Iterator[Any]:
    """A drafter, and those it is made of."""
    yield drafter
    members = getattr(drafter, "members", ())
    for member in members.values() if isinstance(members, dict) else members:
        yield from with_members(member)


def prefers_seeds(drafter: Any) -> bool:
    """Whether drafts for requests with a seed cost so much less that each should have one."""
    return any(getattr(member, "prefers_seeds", False) for member in with_members(drafter))


def held_bytes(drafter: Any) -> int:
    """Memory that a drafter, or those it is made of, keep of the target's features right now."""
    return sum(
        member.held_bytes() for member in with_members(drafter) if hasattr(member, "held_bytes")
    )


TAKEN_IN = 1024  # tokens that an index takes in of all texts in a step: 3 ms of n-grams
_FOLLOWED = 256  # plans without a question after which prompts are not taken in any more


class Offer(NamedTuple):
    """What a lookup has found for a sequence: a tree (``TokenTree.parents``), by ``levels`` the
    nodes down to each depth, and how sure it is, such as the length of the match."""

    tokens: Sequence[int]
    parents: Sequence[int]
    confidence: int

    @property
    def nodes(self) -> tuple[int, ...]:
        """Nodes down to each depth; entry 0 is 0."""
        parents = tuple(self.parents)
        if is_chain(parents):
            return tuple(range(len(parents) + 1))
        depths = depths_of(parents)
        return tuple(sum(d <= depth for d in depths) for depth in range(max(depths) + 1))

    def cut(self, levels: int) -> tuple[Sequence[int], Sequence[int]]:
        """Tokens and parents of the first levels."""
        parents = tuple(self.parents)
        if is_chain(parents):
            return self.tokens[:levels], parents[:levels]
        kept = [node for node, depth in enumerate(depths_of(parents)) if depth <= levels]
        new_number = {node: number for number, node in enumerate(kept)}
        below = tuple(new_number.get(parents[node], -1) for node in kept)
        return [self.tokens[node] for node in kept], below


class LookupDrafter:
    """A drafter that runs no model: ``guess`` is what is left to write, and a ``name``.

    It keeps nothing and learns nothing; override ``observe`` and ``forget`` where one does, and
    where it has an index of each text ``unread`` and ``read``: a long prompt enters it in parts, as
    it is prefilled, and what is left beside the first lookups, which find the parts that are in.

    What it finds is an offer: the controller looks at it before it decides. Where looking changes
    what the drafter knows, set ``offers`` to False: it is then chosen before it proposes.
    """

    name: str
    features: tuple[int, ...] = ()
    reads_logits = False
    offers = True
    _unasked = 0  # plans since a draft was wanted

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """``device`` is the target's."""
        self._device = device
        self._empty = TokenTree.empty(device)
        self._found: dict[int, tuple[int, Offer]] = {}  # by sequence, and for how many tokens

    def max_nodes(self, length: int) -> int:
        """A chain's."""
        return length

    def passes(self, length: int) -> int:
        return 0

    def guess(self, item: Slice) -> tuple[Sequence[int], Sequence[int]]:
        """Tokens of a tree of at most ``item.draft_length`` levels, which is above 0, and the
        parent of each (``TokenTree.parents``)."""
        raise NotImplementedError

    def confidence(self, seq_id: int) -> int:
        """How sure the last guess was: the length of its match, 0 where that is not known."""
        return 0

    def unread(self, seq: SequenceView) -> int:
        """Tokens of a text that the index lacks."""
        return 0

    def read(self, seq: SequenceView, most: int) -> int:
        """Take in the next ``most`` of these; returns how many there were."""
        return 0

    def take_in(self, slices: Sequence[Slice]) -> None:
        """A step's share of the texts that drafts are wanted for now, or may be after their
        prefill; those that lack least come first, so that no text holds up another."""
        asked = any(item.decodes and item.draft_length for item in slices)
        self._unasked = 0 if asked else self._unasked + 1
        if self._unasked > _FOLLOWED:
            return
        wanted = [
            item.seq
            for item in slices
            if (item.draft_length if item.decodes else item.seq.params.may_draft)
        ]
        left = TAKEN_IN
        for seq in sorted(wanted, key=self.unread) if len(wanted) > 1 else wanted:
            left -= self.read(seq, left)

    def look(self, slices: Sequence[Slice]) -> list[Offer | None]:
        """What it finds for each slice, before anybody has decided; ``propose`` takes it up."""
        self._found = {}  # of the step before
        self.take_in(slices)
        return [self._offer(item) for item in slices]

    def _offer(self, item: Slice) -> Offer | None:
        if not (item.decodes and item.draft_length):
            return None
        seq_id, length = item.seq.seq_id, len(item.seq.tokens)
        tokens, parents = self.guess(item)
        if not tokens:
            return None
        offer = Offer(tokens, parents, self.confidence(seq_id))
        self._found[seq_id] = length, offer
        return offer

    def propose(self, plan: Plan) -> list[TokenTree]:
        fresh = [item for item in plan.slices if self._looked(item) is None]
        if fresh:
            self.take_in(fresh)
        trees = [self._tree(item) for item in plan.slices]
        self._found = {}
        return trees

    def _looked(self, item: Slice) -> Offer | None:
        """What has been found for this very step."""
        length, offer = self._found.get(item.seq.seq_id, (-1, None))
        return offer if length == len(item.seq.tokens) else None

    def _tree(self, item: Slice) -> TokenTree:
        if not (item.decodes and item.draft_length):
            return self._empty
        offer = self._looked(item)
        tokens, parents = self.guess(item) if offer is None else offer.cut(item.draft_length)
        # A wide tree that is cut may have more nodes than one of so few levels has room for.
        most = self.max_nodes(item.draft_length)
        tokens, parents = tokens[:most], parents[:most]
        if not tokens:
            return self._empty
        known = tuple(tokens)
        return TokenTree(to_device(tokens, self._device), tuple(parents), known=known)

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        pass

    def warm_up(self, batch_size: int) -> None:
        pass  # a lookup: nothing beside a forward

    def forget(self, seq_id: int) -> None:
        """Override together with ``super().forget(seq_id)``."""
        self._found.pop(seq_id, None)


class NoDrafter(LookupDrafter):
    """Proposes nothing: plain decoding."""

    name = "none"
    offers = False

    def max_nodes(self, length: int) -> int:
        return 0

    def propose(self, plan: Plan) -> list[TokenTree]:
        return [self._empty] * len(plan.slices)


def vocabulary_of(drafter: object) -> str | None:
    """What a drafter, or those it is made of, say about another vocabulary."""
    vocabularies = [getattr(member, "vocabulary", None) for member in with_members(drafter)]
    return "; ".join(dict.fromkeys(text for text in vocabularies if text)) or None
