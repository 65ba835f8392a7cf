"""What the engine asks of a drafter, and the base of drafters that run no model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.sequence import SequenceView
from paceline.core.transfer import to_device
from paceline.core.tree import Draw, TokenTree, depths_of, is_chain
from paceline.errors import ConfigError

_State = TypeVar("_State")


@runtime_checkable
class Drafter(Protocol):
    """Proposes candidates for the next tokens of every sequence in a plan.

    Proposals change the speed, never the output; an empty one is valid. Sequences are known by
    ``seq_id``; after ``forget`` an id may come back with other tokens.
    """

    @property
    def name(self) -> str: ...

    @property
    def features(self) -> tuple[int, ...]:
        """Target layers whose inputs ``observe`` reads; () for none. A drafter whose ``observe``
        reads no logits sets ``reads_logits`` to False: greedy steps then produce none."""
        ...

    def max_nodes(self, length: int) -> int:
        """Most nodes of a tree of ``length`` levels: cache indices to reserve."""
        ...

    def passes(self, length: int) -> int:
        """Forwards of the drafter for a tree of ``length`` levels; ``warm_up`` is one."""
        ...

    def propose(self, plan: Plan) -> list[TokenTree]:
        """One tree per slice, on the target's device; empty for slices that do not decode."""
        ...

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """What the step committed and what the target put out. ``Commit`` says which rows of
        ``out`` belong to which token. The tensors of ``out`` are not written to later."""
        ...

    def warm_up(self, batch_size: int) -> None:
        """One of its ``passes`` for ``batch_size`` sequences, without effect. Start-up times it as
        the cost of drafting greedy requests; sampled ones are corrected later
        (control/correction.py)."""
        ...

    def forget(self, seq_id: int) -> None:
        """Drop all state of a sequence (finished, cancelled or preempted)."""
        ...


def check_trees(drafter: Drafter, plan: Plan, trees: Sequence[TokenTree], vocab: int) -> None:
    """Raise ConfigError, which names the rule, for trees that break one; waits for the device."""
    if len(trees) != len(plan.slices):
        raise ConfigError(
            f"{drafter.name}: propose must return one tree for each slice, in their order; there "
            f"are {len(plan.slices)} slices, and {len(trees)} trees"
        )
    for item, tree in zip(plan.slices, trees, strict=True):
        levels = item.draft_length if item.decodes else 0
        deepest = max(tree.depths, default=0)
        most = max(drafter.max_nodes(levels), levels)  # what a request brings is a chain
        rule = ""
        if deepest > levels:
            rule = f"a tree must not be deeper than draft_length, {levels}; it has {deepest} levels"
        elif len(tree) > most and levels:
            rule = f"max_nodes({levels}) says {most} nodes; the tree has {len(tree)}"
        elif not all(0 <= token < vocab for token in tree.tokens.tolist()):
            rule = f"tokens must be ids of the target, 0 to {vocab - 1}"
        elif tree.known is not None and tree.known != tuple(tree.tokens.tolist()):
            rule = "known must be the tree's tokens"
        elif tree.q is not None and len(tree):
            drawn = tree.q.gather(1, tree.tokens.clamp(max=tree.q.shape[1] - 1)[:, None])
            sums = tree.q.sum(1, keepdim=True)  # 0 where a grammar allows none of its tokens
            if bool(((sums - sums.sign()).abs() > 1e-3).any() | (tree.q < 0).any()):
                rule = "every row of q must be a distribution: it adds up to 1"
            elif tree.draw is Draw.IID and not bool(((drawn > 0) | (sums == 0)).all()):
                rule = "a drawn token must have a probability above 0 in its row of q"
        if rule:
            raise ConfigError(f"{drafter.name}: {rule}")


def with_members(drafter: Any) -> Iterator[Any]:
    """A drafter and, recursively, its members."""
    yield drafter
    for member in getattr(drafter, "members", ()):
        yield from with_members(member)


def prefers_seeds(drafter: Any) -> bool:
    """Whether drafts for seeded requests cost so much less that all should have a seed."""
    return any(getattr(member, "prefers_seeds", False) for member in with_members(drafter))


def runs_torch(drafter: Any) -> bool:
    """Whether operators of torch draft: what its ``runs_torch`` says, else if it has passes."""
    members = getattr(drafter, "members", ())
    if members:
        return any(map(runs_torch, members))
    return bool(getattr(drafter, "runs_torch", drafter.passes(1) > 0))


def vocabulary_of(drafter: object) -> str | None:
    """What a drafter and its members say about another vocabulary than the target's."""
    vocabularies = [getattr(member, "vocabulary", None) for member in with_members(drafter)]
    return "; ".join(dict.fromkeys(text for text in vocabularies if text)) or None


ANY_FORCED = 1 << 16  # of drafters that go on behind forced text of any length
# Tokens, their parents (``TokenTree.parents``), and, if known, confidence and certain levels.
Guess = (
    tuple[Sequence[int], Sequence[int]]
    | tuple[Sequence[int], Sequence[int], int]
    | tuple[Sequence[int], Sequence[int], int, int]
)


@dataclass
class Offer:
    """A tree that a lookup proposes; ``confidence``: length of the match, 0 if unknown.
    ``certain``: first levels, a chain, that a grammar forces."""

    tokens: Sequence[int]
    parents: Sequence[int]
    confidence: int = 0
    certain: int = 0

    @property
    def levels(self) -> int:
        return len(self.nodes) - 1

    @cached_property
    def nodes(self) -> Sequence[int]:
        """Nodes down to each depth; entry 0 is 0."""
        parents = tuple(self.parents)
        if is_chain(parents):
            return range(len(parents) + 1)
        by_depth = Counter(depths_of(parents))
        return list(accumulate(by_depth[depth] for depth in range(max(by_depth) + 1)))

    def cut(self, levels: int) -> tuple[Sequence[int], tuple[int, ...]]:
        """Tokens and parents of the first levels."""
        parents = tuple(self.parents)
        if is_chain(parents):
            return self.tokens[:levels], parents[:levels]
        if max(depths_of(parents)) <= levels:
            return self.tokens, parents
        kept = [node for node, depth in enumerate(depths_of(parents)) if depth <= levels]
        new_number = {node: number for number, node in enumerate(kept)}
        below = tuple(new_number.get(parents[node], -1) for node in kept)
        return [self.tokens[node] for node in kept], below


def forced_run(item: Slice) -> Sequence[int]:
    """What the request's grammar forces next, at most as long as the draft."""
    constraint = item.seq.constraint
    return () if constraint is None else (constraint.forced() or ())[: item.draft_length]


def goes_on_behind(drafter: Any, forced: Sequence[int], item: Slice) -> bool:
    """Whether its draft begins with this forced text and has something behind it."""
    most = min(int(getattr(drafter, "takes_forced", 0)), item.draft_length - 1)
    return not forced or len(forced) <= most


def behind(
    forced: Sequence[int], tokens: Sequence[int], parents: Sequence[int], match: int
) -> Guess:
    """What was found behind forced text, with that; nothing if nothing was: others draft that."""
    above = len(forced)
    if not forced or not tokens:
        return tokens, parents, match
    chain = range(-1, above - 1)
    return [*forced, *tokens], [*chain, *(parent + above for parent in parents)], match, above


class States(dict[int, _State]):
    """State by ``seq_id``."""

    def of(self, seq: SequenceView, begin: Callable[[SequenceView], _State]) -> _State:
        """The state of a sequence; ``begin`` makes it at first. (A stored bound method would be a
        reference cycle.)"""
        state = self.get(seq.seq_id)
        if state is None:
            state = self[seq.seq_id] = begin(seq)
        return state


class LookupDrafter:
    """A drafter that runs no model. Subclasses have a ``name`` and ``guess``, and override
    ``begin``, ``take_in`` and ``observe`` if they keep state.

    The controller sees offers before it decides. If looking changes the drafter's state set
    ``offers`` to False: it is then chosen before it proposes. ``takes_forced``: tokens that a
    grammar forces, behind which it goes on, at most.
    """

    name: str
    features: tuple[int, ...] = ()
    reads_logits = False
    offers = True
    takes_forced = 0

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """``device`` is the target's."""
        self._device = device
        self._empty = TokenTree.empty(device)
        self.states: States[Any] = States()
        # Of this step, by ``seq_id``: the sequence's length, and its offer.
        self._offered: dict[int, tuple[int, Offer | None]] = {}

    def max_nodes(self, length: int) -> int:
        """As for a chain."""
        return length

    def passes(self, length: int) -> int:
        return 0

    def guess(self, item: Slice) -> Guess:
        """A tree of at most ``item.draft_length`` levels, which is above 0."""
        raise NotImplementedError

    def begin(self, seq: SequenceView) -> Any:
        """The initial state of a sequence, for ``states.of(seq, self.begin)``."""

    def take_in(self, slices: Sequence[Slice]) -> None:
        """Called with the sequences of a step before any guess."""

    def lookup(self, slices: Sequence[Slice]) -> list[Offer | None]:
        """An offer for each slice, before the controller decides; ``propose`` reuses them."""
        self._offered = {}  # of the step before
        self.take_in(slices)
        return [self._offer(item) for item in slices]

    def propose(self, plan: Plan) -> list[TokenTree]:
        fresh = [item for item in plan.slices if not self._has_offered(item)]
        if fresh:
            self.take_in(fresh)
        trees = [self._tree(item) for item in plan.slices]
        self._offered = {}
        return trees

    def _offer(self, item: Slice) -> Offer | None:
        if not (item.draft_length and item.decodes):
            return None
        if not self._has_offered(item):
            offer = Offer(*self.guess(item))
            self._offered[item.seq.seq_id] = len(item.seq.tokens), offer if offer.tokens else None
        return self._offered[item.seq.seq_id][1]

    def _has_offered(self, item: Slice) -> bool:
        length, _ = self._offered.get(item.seq.seq_id, (None, None))
        return length == len(item.seq.tokens)

    def _tree(self, item: Slice) -> TokenTree:
        offer = self._offer(item)
        if offer is None:
            return self._empty
        tokens, parents = offer.cut(item.draft_length)
        # A wide tree cut to few levels may exceed the nodes reserved for these.
        most = self.max_nodes(item.draft_length)
        known = tuple(tokens[:most])
        return TokenTree(to_device(known, self._device), parents[:most], known=known)

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        pass

    def warm_up(self, batch_size: int) -> None:
        pass  # a lookup is negligible beside a forward

    def forget(self, seq_id: int) -> None:
        """Override together with ``super().forget(seq_id)``."""
        self._offered.pop(seq_id, None)
        self.states.pop(seq_id, None)


class NoDrafter(LookupDrafter):
    """Proposes nothing: plain decoding."""

    name = "none"
    offers = False

    def max_nodes(self, length: int) -> int:
        return 0

    def propose(self, plan: Plan) -> list[TokenTree]:
        return [self._empty] * len(plan.slices)
