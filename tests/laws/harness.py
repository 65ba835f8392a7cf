"""Exact output distributions of speculative decoding, by enumeration of every random outcome.

Fake models are random tables over a tiny vocabulary; the logits after a context depend on its last
two tokens. A drafter here is a function that lists all the drafts it could make, each with its
probability. A step's emissions are a float64 vector over token strings, addressed by ``string
id``: the empty string is 0, and s followed by x is ``1 + V * id(s) + x``.

``step_distribution`` uses the pure functions of ``paceline.verify.rules`` (or a mutated copy of
them); ``verifier_enumeration.py`` runs the whole ``Verifier``. ``joint_distribution`` chains steps,
and ``plain_distribution`` is the target's own answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch

from paceline.core.params import SamplingParams
from paceline.core.sampling import Rows, apply_logits_processors, probabilities
from paceline.core.sequence import Constraint, SequenceState
from paceline.core.tree import Draw, children_of
from paceline.verify import rules as real_rules

Context = tuple[int, ...]
PROMPT: Context = (0, 1)


class Fake:
    """Logits from a random table over the last two tokens."""

    def __init__(self, vocab: int, seed: int, like: Fake | None = None, scale: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab = vocab
        self.table = torch.randn(vocab, vocab, vocab, generator=generator) * scale
        if like is not None:
            self.table = like.table + self.table

    def __call__(self, contexts: Sequence[Context]) -> torch.Tensor:
        index = torch.tensor([context[-2:] for context in contexts])
        return self.table[index[:, 0], index[:, 1]]


@dataclass(frozen=True)
class Setting:
    """A pair of models and a request; ``stop_ids`` matter to min_tokens only."""

    target: Fake
    draft: Fake
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset({1})
    constraint: Callable[[Context], Constraint] | None = None

    @property
    def vocab(self) -> int:
        return self.target.vocab

    def request(self, context: Context) -> SequenceState:
        request = SequenceState(0, list(context), len(PROMPT), self.params, self.stop_ids)
        if self.constraint is not None:
            request.constraint = self.constraint(context)
        return request

    @classmethod
    def random(cls, vocab: int, params: SamplingParams, seed: int = 0) -> Setting:
        target = Fake(vocab, seed)
        return cls(target, Fake(vocab, seed + 1, like=target, scale=0.8), params)


@lru_cache(maxsize=64)
def strings(vocab: int, depth: int) -> tuple[Context, ...]:
    """All strings of up to ``depth`` tokens, in the order of their ids."""
    levels = [itertools.product(range(vocab), repeat=length) for length in range(depth + 1)]
    return tuple(itertools.chain.from_iterable(levels))


def distribution_table(model: Fake, setting: Setting, context: Context, depth: int) -> torch.Tensor:
    """float32 [number of strings, V]: the distribution after ``context`` and each drafted
    string."""
    paths = strings(model.vocab, depth)
    request = setting.request(context)
    padded = torch.tensor([[*path, *[0] * (depth - len(path))] for path in paths]).long()
    rows = Rows((request,) * len(paths), tuple(map(len, paths)), padded.view(len(paths), depth))
    return probabilities(
        apply_logits_processors(model([(*context, *path) for path in paths]), rows), rows
    )


def no_repeats(prompt: Sequence[int], output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor: forbids repeating the last token, and after token 0 prefers token 2."""
    before = [*prompt, *output][-1]
    ids = torch.arange(len(logits))
    scores = logits.masked_fill(ids == before, -torch.inf)
    return scores + 2.0 * (ids == 2) if before == 0 else scores


# --- drafters: every draft they could make -------------------------------------------------------


@dataclass(frozen=True)
class Drafts:
    """B drafts of one shape: ``tokens`` [B, n], ``weights`` float64 [B], ``q`` [B, n, V]."""

    parents: tuple[int, ...]
    draw: Draw
    tokens: torch.Tensor
    weights: torch.Tensor
    vocab: int
    q: torch.Tensor | None = None

    @property
    def row_strings(self) -> torch.Tensor:
        """int64 [B, n + 1]: id of the drafted string before each row."""
        ids = [torch.zeros(len(self.weights), dtype=torch.int64)]
        for node, parent in enumerate(self.parents):
            ids.append(1 + self.vocab * ids[parent + 1] + self.tokens[:, node])
        return torch.stack(ids, dim=1)


# From the drafter's own distribution table (strings up to its depth) to all its drafts.
Drafter = Callable[[torch.Tensor], list[Drafts]]


def tree_parents(branching: Sequence[int]) -> tuple[int, ...]:
    """A full tree, level by level, siblings next to one another."""
    parents: list[int] = []
    level = [-1]
    for width in branching:
        following = []
        for parent in level:
            for _ in range(width):
                following.append(len(parents))
                parents.append(parent)
        level = following
    return tuple(parents)


def empty() -> Drafter:
    def propose(table: torch.Tensor) -> list[Drafts]:
        tokens = torch.empty(1, 0, dtype=torch.int64)
        ones = torch.ones(1, dtype=torch.float64)
        return [Drafts((), Draw.POINT, tokens, ones, table.shape[1])]

    return propose


def point_tree(branching: Sequence[int]) -> Drafter:
    """The likeliest tokens after each node: a single draft, without randomness."""
    parents = tree_parents(branching)

    def propose(table: torch.Tensor) -> list[Drafts]:
        vocab = table.shape[1]
        ids, tokens = [0], []
        children = children_of(parents)
        ranks = {node: rank for nodes in children for rank, node in enumerate(nodes)}
        for node, parent in enumerate(parents):
            order = table[ids[parent + 1]].sort(descending=True, stable=True).indices
            tokens.append(int(order[ranks[node]]))
            ids.append(1 + vocab * ids[parent + 1] + tokens[-1])
        ones = torch.ones(1, dtype=torch.float64)
        return [Drafts(parents, Draw.POINT, torch.tensor([tokens]), ones, vocab)]

    return propose


def dynamic_tree(depth: int, nodes: int) -> Drafter:
    """The ``nodes`` likeliest strings of up to ``depth`` tokens: the shape depends on the
    distribution."""

    def propose(table: torch.Tensor) -> list[Drafts]:
        vocab = table.shape[1]
        known = strings(vocab, depth)
        ids = {path: i for i, path in enumerate(known)}
        chance = {(): 1.0}
        for path in known[1:]:
            chance[path] = chance[path[:-1]] * float(table[ids[path[:-1]], path[-1]])
        # The sort is stable: of equal chances the shorter string, the parent, comes first.
        kept = sorted(sorted(known[1:], key=lambda path: -chance[path])[:nodes], key=len)
        parents = tuple(kept.index(path[:-1]) if path[:-1] else -1 for path in kept)
        tokens = torch.tensor([[path[-1] for path in kept]])
        ones = torch.ones(1, dtype=torch.float64)
        return [Drafts(parents, Draw.POINT, tokens, ones, vocab)]

    return propose


def sampled_tree(branching: Sequence[int], draw: Draw = Draw.WITHOUT_REPLACEMENT) -> Drafter:
    """Every ordered choice of siblings without replacement; branching 1, 1, ... is a chain.

    If q has no tokens left, the next sibling may be any token: the lowest id left is taken.
    """
    parents = tree_parents(branching)
    children = children_of(parents)

    def propose(table: torch.Tensor) -> list[Drafts]:
        vocab = table.shape[1]
        tokens = torch.empty(1, 0, dtype=torch.int64)
        weights = torch.ones(1, dtype=torch.float64)
        strings_of = torch.zeros(1, 1, dtype=torch.int64)
        every = torch.arange(vocab)
        for row, nodes in enumerate(children):
            left = table.double()[strings_of[:, row]] if nodes else table
            used = torch.zeros(len(weights), vocab, dtype=torch.bool)
            for _ in nodes:
                mass = left.sum(-1, keepdim=True)
                arbitrary = torch.nn.functional.one_hot((~used).long().argmax(-1), vocab)
                distribution = torch.where(mass > 0, left / mass, arbitrary.double())
                extended = weights[:, None] * distribution  # [B, V]
                keep = extended.flatten() > 0
                picked = every.repeat(len(weights))[keep]
                source = torch.arange(len(weights)).repeat_interleave(vocab)[keep]
                weights = extended.flatten()[keep]
                tokens = torch.cat((tokens[source], picked[:, None]), 1)
                ids = 1 + vocab * strings_of[source, row] + picked
                strings_of = torch.cat((strings_of[source], ids[:, None]), 1)
                left = left[source].scatter(1, picked[:, None], 0.0)
                used = used[source].scatter(1, picked[:, None], True)
        above = torch.tensor([parent + 1 for parent in parents])
        q = table[strings_of[:, above]]
        return [Drafts(parents, draw, tokens, weights, vocab, q)]

    return propose


def sampled_chain(length: int) -> Drafter:
    return sampled_tree([1] * length, Draw.IID)


def ending_chain(length: int, least: float) -> Drafter:
    """A sampled chain that ends with the first token whose path is less likely than ``least``."""
    whole = sampled_chain(length)

    def propose(table: torch.Tensor) -> list[Drafts]:
        (drafts,) = whole(table)
        assert drafts.q is not None
        chances = drafts.q.gather(2, drafts.tokens.unsqueeze(2)).squeeze(2).cumprod(1)
        ends = torch.where(chances < least, torch.arange(1, length + 1), length).amin(1)
        shorter = []
        for end in ends.unique().tolist():
            rows: dict[tuple[int, ...], list[int]] = {}
            for row in (ends == end).nonzero().squeeze(1).tolist():
                rows.setdefault(tuple(drafts.tokens[row, :end].tolist()), []).append(row)
            firsts = torch.tensor([same[0] for same in rows.values()])
            weights = torch.stack([drafts.weights[same].sum() for same in rows.values()])
            tokens, q = drafts.tokens[firsts, :end], drafts.q[firsts, :end]
            shorter.append(Drafts(drafts.parents[:end], Draw.IID, tokens, weights, drafts.vocab, q))
        return shorter

    return propose


# --- one step: emissions -------------------------------------------------------------------------


def _emissions(drafts: Drafts, depth: int, stopping: torch.Tensor) -> torch.Tensor:
    """Sum by string ``stopping`` [B, n + 1, V]: the chance that the walk ends at a row with a
    token."""
    vocab = drafts.vocab
    emitted = torch.zeros(len(strings(vocab, depth + 1)), dtype=torch.float64)
    ids = 1 + vocab * drafts.row_strings[:, :, None] + torch.arange(vocab)
    return emitted.index_add_(
        0, ids.flatten(), (drafts.weights[:, None, None] * stopping).flatten()
    )


def _matched(drafts: Drafts, p: torch.Tensor) -> torch.Tensor:
    """Stopping chances [B, n + 1, V] of the match rule: draw y ~ p, descend while y is a child."""
    reach = torch.zeros(p.shape[:2], dtype=torch.float64)
    reach[:, 0] = 1.0
    stopping = torch.zeros(p.shape, dtype=torch.float64)
    for row, nodes in enumerate(children_of(drafts.parents)):
        left = p[:, row].double().clone()
        for node in nodes:
            token = drafts.tokens[:, node, None]
            reach[:, node + 1] = reach[:, row] * left.gather(1, token).squeeze(1)
            left = left.scatter(1, token, 0.0)
        stopping[:, row] = reach[:, row, None] * left
    return stopping


def _decided(
    drafts: Drafts, p: torch.Tensor, method: str, rules: ModuleType = real_rules
) -> torch.Tensor:
    """Stopping chances [B, n + 1, V] of ``siblings`` or ``block``."""
    count, rows, vocab = p.shape
    assert drafts.q is not None
    outcome = getattr(rules, method)(
        p.reshape(-1, vocab),
        drafts.q.reshape(-1, vocab),
        drafts.tokens.flatten(),
        (drafts.parents,) * count,
    )
    accept = outcome.accept.view(count, rows - 1).double()
    reach = torch.zeros(count, rows, dtype=torch.float64)
    stop = torch.zeros(count, rows, dtype=torch.float64)
    if method == "block":
        missed = torch.ones(count, dtype=torch.float64)
        for node in reversed(range(rows - 1)):  # the last accepted node ends the walk
            stop[:, node + 1] = missed * accept[:, node]
            missed = missed * (1 - accept[:, node])
        stop[:, 0] = missed
    else:
        reach[:, 0] = 1.0
        for row, nodes in enumerate(children_of(drafts.parents)):
            left = reach[:, row]
            for node in nodes:
                reach[:, node + 1] = left * accept[:, node]
                left = left * (1 - accept[:, node])
            stop[:, row] = left
    return stop[:, :, None] * outcome.stop.view(count, rows, vocab).double()


Step = Callable[[Context], torch.Tensor]


def step_distribution(
    setting: Setting, drafter: Drafter, depth: int, method: str, rules: ModuleType = real_rules
) -> Step:
    """Emissions of one step, by enumerating drafts and decisions over the pure functions."""

    def step(context: Context) -> torch.Tensor:
        target = distribution_table(setting.target, setting, context, depth)
        emitted = torch.zeros(len(strings(setting.vocab, depth + 1)), dtype=torch.float64)
        for drafts in drafter(distribution_table(setting.draft, setting, context, depth)):
            p = target[drafts.row_strings]
            if method == "match" or drafts.draw is Draw.POINT:
                stopping = _matched(drafts, p)
            else:
                stopping = _decided(drafts, p, method, rules)
            emitted += _emissions(drafts, depth, stopping)
        return emitted

    return step


# --- several steps -------------------------------------------------------------------------------


def joint_distribution(setting: Setting, step: Step, length: int) -> torch.Tensor:
    """float64 [V ** length]: distribution of the first ``length`` tokens over as many steps as they
    take."""
    vocab = setting.vocab
    known: dict[tuple[Context, int], torch.Tensor] = {}

    def joint(context: Context, left: int) -> torch.Tensor:
        if left == 0:
            return torch.ones(1, dtype=torch.float64)
        if (context, left) in known:
            return known[context, left]
        distribution = torch.zeros(vocab**left, dtype=torch.float64)
        emitted = step(context)
        assert float(emitted[0]) == 0.0, "a step must emit at least one token"
        begin, length = 1, 1
        while begin < len(emitted):  # the strings of each length stand together, in order
            weights = emitted[begin : begin + vocab**length]
            if length >= left:  # what goes beyond does not matter
                distribution += weights.view(vocab**left, -1).sum(1)
            else:
                tails = distribution.view(vocab**length, -1)
                for at in weights.nonzero().flatten().tolist():
                    string = strings(vocab, length)[begin + at]
                    tails[at] += weights[at] * joint((*context, *string), left - length)
            begin, length = begin + vocab**length, length + 1
        known[context, left] = distribution
        return distribution

    return joint(PROMPT, length)


def plain_distribution(setting: Setting, length: int) -> torch.Tensor:
    """The target alone: one committed token after another, no draft."""

    def step(context: Context) -> torch.Tensor:
        distribution = distribution_table(setting.target, setting, context, 0)[0].double()
        return torch.cat((torch.zeros(1, dtype=torch.float64), distribution))

    return joint_distribution(setting, step, length)


def distance(distribution: torch.Tensor, other: torch.Tensor) -> float:
    """Total variation; infinite if either is not even a vector of numbers."""
    value = float((distribution - other).abs().sum() / 2)
    return value if value == value else float("inf")


def error(
    setting: Setting,
    drafter: Drafter,
    depth: int,
    method: str,
    length: int = 3,
    rules: ModuleType = real_rules,
) -> float:
    """Total variation between speculative and plain decoding of ``length`` tokens."""
    step = step_distribution(setting, drafter, depth, method, rules)
    return distance(joint_distribution(setting, step, length), plain_distribution(setting, length))
