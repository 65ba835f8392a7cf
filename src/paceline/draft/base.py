"""``Drafter``, the interface to the engine, and ``LookupDrafter``, the base without a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.costs import CostCurve, DrafterCosts
from paceline.core.sequence import PerSequence, SequenceView
from paceline.core.transfer import to_device
from paceline.core.tree import Draw, TokenTree, depths_of, is_chain
from paceline.errors import ConfigError


@runtime_checkable
class Drafter(Protocol):
    """Proposes draft tokens for every sequence of a step.

    In each step the engine calls ``propose``, verifies the trees, and calls ``observe`` with the
    result. Proposals change the speed, never the output, and an empty tree is valid. State is kept
    by ``seq_id``; after ``forget`` the same id may come back with other tokens. A drafter may also
    have the attributes of ``DrafterTraits``.
    """

    @property
    def name(self) -> str:
        """The name by which requests choose the drafter, and by which statistics count it."""
        ...

    @property
    def features(self) -> tuple[int, ...]:
        """Target layers whose inputs ``observe`` reads; () for none."""
        ...

    def max_nodes(self, length: int) -> int:
        """The most nodes of a tree of ``length`` levels. The engine reserves that many KV slots."""
        ...

    def passes(self, length: int) -> int:
        """Forwards of the draft model for a tree of ``length`` levels; 0 without a model."""
        ...

    def propose(self, plan: Plan) -> list[TokenTree]:
        """One tree per slice, on the target's device; empty for slices that do not decode."""
        ...

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """Learn from a step: the committed tokens and the target's output. ``Commit`` says which
        rows of ``out`` belong to which token. Nothing writes to the tensors of ``out`` later."""
        ...

    def warm_up(self, batch_size: int) -> None:
        """Do the work of one pass for ``batch_size`` sequences, without effect. Start-up times it
        as the cost of greedy drafts; steps correct that of sampled ones (control/correction.py)."""
        ...

    def forget(self, seq_id: int) -> None:
        """Drop all state of a sequence that has finished or was cancelled or preempted."""
        ...


class DrafterTraits(NamedTuple):
    """Optional attributes of a drafter, with what is assumed of one that lacks them.

    ``reads_logits``: ``observe`` reads the target's logits; if no drafter does, greedy steps
    compute none. ``needs_prefill``: the drafter must first run over the tokens that it has not
    seen; ``sees_prompts``: over prompts it runs during the target's prefill. ``stops_early``: it
    stops a draft where it is unsure. ``shares_nodes``: sequences that decode in one step share the
    node budget. ``max_forced_tokens``: how many tokens that a grammar forces it can put before its
    own drafts. ``prefers_seeds``: drafts for seeded requests are so much cheaper that every request
    should get a seed. ``prior``: expected acceptance rate by level, if all before are accepted;
    the last one is that of all deeper levels.
    """

    reads_logits: bool = True
    needs_prefill: bool = False
    sees_prompts: bool = False
    stops_early: bool = False
    shares_nodes: bool = False
    max_forced_tokens: int = 0
    prefers_seeds: bool = False
    prior: tuple[float, ...] = ()

    @classmethod
    def of(cls, drafter: Drafter) -> DrafterTraits:
        return cls._make(getattr(drafter, *item) for item in cls._field_defaults.items())


def costs_of(
    drafter: Drafter,
    max_length: int,
    seconds: CostCurve,
    model_free_factor: int = 2,
) -> DrafterCosts:
    """What drafts of up to ``max_length`` levels cost, times ``model_free_factor`` without
    forwards. ``seconds``: of one pass."""
    lengths = range(1 + max_length * (1 if drafter.passes(1) else model_free_factor))
    traits = DrafterTraits.of(drafter)
    return DrafterCosts(
        tuple(map(drafter.max_nodes, lengths)),
        tuple(map(drafter.passes, lengths)),
        seconds,
        needs_prefill=traits.needs_prefill,
        sees_prompts=traits.sees_prompts,
        stops_early=traits.stops_early,
        shares_nodes=traits.shares_nodes,
        max_forced_tokens=traits.max_forced_tokens,
        prior=traits.prior,
    )


def check_trees(drafter: Drafter, plan: Plan, trees: Sequence[TokenTree], vocab: int) -> None:
    """Raise a ConfigError that names the broken rule if a tree is invalid. Waits for the device."""
    if len(trees) != len(plan.slices):
        raise ConfigError(
            f"{drafter.name}: propose must return one tree for each slice, in their order; there "
            f"are {len(plan.slices)} slices, and {len(trees)} trees"
        )
    for item, tree in zip(plan.slices, trees, strict=True):
        levels = item.draft_length if item.decodes else 0
        deepest = max(tree.depths, default=0)
        most = max(drafter.max_nodes(levels), levels)  # a request's own draft is a chain
        rule = ""
        if deepest > levels:
            rule = f"a tree must not be deeper than draft_length, {levels}; it has {deepest} levels"
        elif len(tree) > most and levels:
            rule = f"max_nodes({levels}) says {most} nodes; the tree has {len(tree)}"
        elif not all(0 <= token < vocab for token in tree.tokens.tolist()):
            rule = f"tokens must be ids of the target, 0 to {vocab - 1}"
        elif tree.host_copy is not None and tree.host_copy != tuple(tree.tokens.tolist()):
            rule = "host_copy must be the tree's tokens"
        elif tree.q is not None and len(tree):
            drawn = tree.q.gather(1, tree.tokens.clamp(max=tree.q.shape[1] - 1)[:, None])
            sums = tree.q.sum(1, keepdim=True)  # 0 if a grammar forbids every token of the row
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


def runs_torch(drafter: Any) -> bool:
    """Whether drafting runs torch operators: ``drafter.runs_torch``, else whether it has passes."""
    if members := getattr(drafter, "members", ()):
        return any(map(runs_torch, members))
    return bool(getattr(drafter, "runs_torch", drafter.passes(1) > 0))


def vocabulary_of(drafter: object) -> str | None:
    """How drafts in another vocabulary than the target's are translated; None if none are."""
    vocabularies = [getattr(member, "vocabulary", None) for member in with_members(drafter)]
    return "; ".join(dict.fromkeys(text for text in vocabularies if text)) or None


ANY_FORCED = 1 << 16  # ``max_forced_tokens`` of drafters that extend forced text of any length
# What ``propose_one`` returns, the fields of ``LookupDraft``; the last two may be left out.
Proposal = (
    tuple[Sequence[int], Sequence[int]]
    | tuple[Sequence[int], Sequence[int], int]
    | tuple[Sequence[int], Sequence[int], int, int]
)


@dataclass
class LookupDraft:
    """The tree that a lookup found. ``parents`` as in ``TokenTree``. ``match_length``: 0 if
    unknown. ``forced_levels``: how many of its first levels, a chain, a grammar forces."""

    tokens: Sequence[int]
    parents: Sequence[int]
    match_length: int = 0
    forced_levels: int = 0

    @property
    def levels(self) -> int:
        return len(self.nodes) - 1

    @cached_property
    def nodes(self) -> Sequence[int]:
        """``nodes[d]``: number of nodes in the first d levels."""
        parents = tuple(self.parents)
        if is_chain(parents):
            return range(len(parents) + 1)
        by_depth = Counter(depths_of(parents))
        return list(accumulate(by_depth[depth] for depth in range(max(by_depth) + 1)))

    def truncate(self, levels: int) -> tuple[Sequence[int], tuple[int, ...]]:
        """Tokens and parents of the tree's first ``levels`` levels."""
        parents = tuple(self.parents)
        if is_chain(parents):
            return self.tokens[:levels], parents[:levels]
        if max(depths_of(parents)) <= levels:
            return self.tokens, parents
        kept = [node for node, depth in enumerate(depths_of(parents)) if depth <= levels]
        new_number = {node: number for number, node in enumerate(kept)}
        below = tuple(new_number.get(parents[node], -1) for node in kept)
        return [self.tokens[node] for node in kept], below


def forced_tokens(item: Slice) -> Sequence[int]:
    """The tokens that the request's grammar forces next, at most ``item.draft_length``."""
    constraint = item.seq.constraint
    return () if constraint is None else (constraint.forced_tokens() or ())[: item.draft_length]


def can_extend_forced(drafter: Drafter, forced: Sequence[int], item: Slice) -> bool:
    """Whether the drafter's own draft would begin with these forced tokens and go past them."""
    if not forced:
        return True
    return len(forced) <= min(DrafterTraits.of(drafter).max_forced_tokens, item.draft_length - 1)


def with_forced_prefix(
    forced: Sequence[int], tokens: Sequence[int], parents: Sequence[int], match: int
) -> Proposal:
    """The tree ``tokens``, ``parents`` below the chain of forced tokens. An empty tree stays empty:
    ``Predictions`` drafts forced tokens alone."""
    depth = len(forced)
    if not forced or not tokens:
        return tokens, parents, match
    chain = range(-1, depth - 1)
    return [*forced, *tokens], [*chain, *(parent + depth for parent in parents)], match, depth


class LookupDrafter:
    """Base of drafters that run no model. A subclass sets ``name`` and implements ``propose_one``.

    A subclass with state per sequence makes it in ``new_state(seq)``, and reads it by
    ``self.states.get_or_make(seq, self.new_state)``. It overrides ``begin_step`` for work on all
    sequences of a step at once, and ``observe`` to learn from committed tokens.

    In each step ``lookup`` collects the drafts, the controller decides how much of which is used,
    and ``propose`` returns that. Set ``drafts_before_choice`` to False if ``propose_one`` changes
    the drafter's state: the controller then decides without seeing its drafts.
    ``max_forced_tokens``: the most tokens forced by a grammar that ``propose_one`` puts first.
    """

    name: str
    features: tuple[int, ...] = ()
    reads_logits = False
    drafts_before_choice = True
    max_forced_tokens = 0

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """``device`` is the target's."""
        self._device = device
        self._empty = TokenTree.empty(device)
        self.states: PerSequence[Any] = PerSequence()
        # This step's offers by ``seq_id``, each with the sequence's length when it was made.
        self._offered: dict[int, tuple[int, LookupDraft | None]] = {}

    def max_nodes(self, length: int) -> int:
        """The nodes of a chain; override for trees."""
        return length

    def passes(self, length: int) -> int:
        return 0

    def propose_one(self, item: Slice) -> Proposal:
        """Draft for the sequence ``item.seq``: token ids, at most ``item.draft_length`` (above 0)
        levels of them, and each one's parent: its index in the draft, -1 for the sequence's last
        token. ``(), ()`` is no draft. Further fields of ``LookupDraft`` may follow."""
        raise NotImplementedError

    def new_state(self, seq: SequenceView) -> Any:
        """The initial state of a sequence, for ``states.get_or_make(seq, self.new_state)``."""

    def begin_step(self, slices: Sequence[Slice]) -> None:
        """Called with a step's slices before ``propose_one`` is called for any of them."""

    def lookup(self, slices: Sequence[Slice]) -> list[LookupDraft | None]:
        """An offer for each slice, for the controller to decide on; ``propose`` reuses them."""
        self._offered = {}
        self.begin_step(slices)
        return [self._offer(item) for item in slices]

    def propose(self, plan: Plan) -> list[TokenTree]:
        without_offer = [item for item in plan.slices if not self._has_offered(item)]
        if without_offer:
            self.begin_step(without_offer)
        trees = [self._tree(item) for item in plan.slices]
        self._offered = {}
        return trees

    def _offer(self, item: Slice) -> LookupDraft | None:
        if not (item.draft_length and item.decodes):
            return None
        if not self._has_offered(item):
            offer = LookupDraft(*self.propose_one(item))
            self._offered[item.seq.seq_id] = len(item.seq.tokens), offer if offer.tokens else None
        return self._offered[item.seq.seq_id][1]

    def _has_offered(self, item: Slice) -> bool:
        length, _ = self._offered.get(item.seq.seq_id, (None, None))
        return length == len(item.seq.tokens)

    def _tree(self, item: Slice) -> TokenTree:
        offer = self._offer(item)
        if offer is None:
            return self._empty
        tokens, parents = offer.truncate(item.draft_length)
        # The first levels of a wide tree may have more nodes than were reserved for them.
        most = self.max_nodes(item.draft_length)
        kept = tuple(tokens[:most])
        return TokenTree(to_device(kept, self._device), parents[:most], host_copy=kept)

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        pass

    def warm_up(self, batch_size: int) -> None:
        pass  # a lookup takes microseconds, a forward milliseconds

    def forget(self, seq_id: int) -> None:
        """Drop all state of a sequence; an override calls ``super().forget(seq_id)``."""
        self._offered.pop(seq_id, None)
        self.states.pop(seq_id, None)


class NoDrafter(LookupDrafter):
    """Proposes nothing: plain decoding."""

    name = "none"
    drafts_before_choice = False

    def max_nodes(self, length: int) -> int:
        return 0

    def propose(self, plan: Plan) -> list[TokenTree]:
        return [self._empty] * len(plan.slices)
