"""One step: does a drafter draw from the distribution that it declares, and what does the verifier
make of every draft and every decision."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice, pairwise, product
from typing import Any

import torch
from torch.nn.functional import pad

from paceline.core.batch import Plan, Span
from paceline.core.params import SamplingParams
from paceline.core.sampling import Rows, probabilities
from paceline.core.sequence import SequenceView
from paceline.core.tree import Draw, TokenTree, children_of, paths_of
from paceline.draft.base import Drafter
from paceline.lab.certify.chisquare import ChiSquare, goodness
from paceline.lab.certify.decoding import String
from paceline.verify.verifier import Verifier, method_of

_BINS = 20
_MOST_DISTRIBUTIONS = 256


@dataclass
class DrawCounts:
    """Draws in each twentieth of the declared distribution; ``impossible``: without a chance."""

    counts: list[int] = field(default_factory=lambda: [0] * _BINS)
    impossible: int = 0

    @property
    def total(self) -> int:
        return sum(self.counts) + self.impossible

    def test(self) -> ChiSquare | None:
        """Whether the draws so far are from the declared distributions; None without any."""
        return goodness(self.counts, [1 / _BINS] * _BINS) if sum(self.counts) else None


class Recorder:
    """Stands in for a drafter and counts what it draws. ``trees`` and ``distributions`` (after the
    root, and after first tokens) were proposed and declared behind the ``watched`` tokens."""

    def __init__(self, drafter: Drafter, draws: DrawCounts, seed: int = 0) -> None:
        self._drafter, self._draws = drafter, draws
        self._generator = torch.Generator().manual_seed(seed)
        self.watch(None)

    def watch(self, tokens: String | None) -> None:
        """From now on keep what is proposed after the tokens of the first request that begins with
        these and is drafted for."""
        self.watched, self._beyond = tokens, True
        self.distributions: dict[String, torch.Tensor] = {}
        self.trees: dict[tuple[tuple[int, ...], Draw], TokenTree] = {}

    def propose(self, plan: Plan) -> list[TokenTree]:
        trees = self._drafter.propose(plan)
        for item, tree in zip(plan.slices, trees, strict=True):
            if self.watched is not None and len(tree):
                self._note(self.watched, tuple(item.seq.tokens), tree)
        sampled = [tree for tree in trees if len(tree) and tree.draw is not Draw.POINT]
        if sampled:
            self._count(sampled)
        return trees

    def __getattr__(self, name: str) -> Any:
        """The rest of the protocol is the drafter's own."""
        return getattr(self._drafter, name)

    def _note(self, watched: String, tokens: String, tree: TokenTree) -> None:
        if self._beyond and tokens[: len(watched)] == watched:
            self.watched = watched = tokens
            self._beyond = False
        if tokens != watched:
            return
        self.trees.setdefault((tree.parents, tree.draw), tree)
        if tree.q is None:
            return
        drafted = tree.tokens.tolist()
        for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True)):
            above = () if parent < 0 else (drafted[parent],)
            # Deeper ones are all different: they would only take memory.
            if depth <= 2 and len(self.distributions) < _MOST_DISTRIBUTIONS:
                self.distributions.setdefault(above, tree.q[node].cpu().clone())

    def _count(self, trees: Sequence[TokenTree]) -> None:
        declared = [tree.q for tree in trees if tree.q is not None]
        width = max(q.shape[1] for q in declared)
        probs = torch.cat([pad(q, (0, width - q.shape[1])) for q in declared])
        probs = probs.to("cpu", torch.float64)
        tokens = torch.cat([tree.tokens for tree in trees]).cpu()
        first = 0
        for tree in trees:  # what a sibling is drawn from no longer holds those drawn before it
            for siblings in children_of(tree.parents):
                for before, node in combinations(siblings, 2):
                    probs[first + node, tokens[first + before]] = 0.0
            first += len(tree)
        mass, token_probs = probs.sum(-1), probs.gather(1, tokens[:, None])
        # A distribution that has run out of tokens says nothing about the next sibling.
        possible, counts = token_probs[:, 0] > 0, mass > 0
        self._draws.impossible += int((counts & ~possible).sum())
        above = (probs * (probs > token_probs)).sum(-1)
        equal = (probs * (probs == token_probs)).sum(-1)
        noise = torch.rand(len(tokens), dtype=torch.float64, generator=self._generator)
        ranks = ((above + noise * equal) / mass)[counts & possible]
        for index in (ranks * _BINS).long().clamp(max=_BINS - 1).tolist():
            self._draws.counts[index] += 1


_TOKENS = 4  # of the small vocabulary
_MOST_OUTCOMES = 30_000
_REQUEST = SequenceView(0, [0], 1, SamplingParams(temperature=1.0, max_tokens=1 << 20))
TOLERANCE = 1e-6  # float32 distributions

Distributions = Mapping[String, torch.Tensor]
Option = tuple[float, float]  # a uniform and the width of the interval it stands for


@dataclass(frozen=True)
class ExactCheck:
    """``distance``: total variation between what a step emits and the target's distribution of
    ``tokens`` tokens. ``whole``: no token but those of the ``vocabulary`` has any chance; else the
    distributions are conditioned on these. ``outcomes`` were enumerated."""

    prefix: str
    draw: str
    nodes: int
    tokens: int
    vocabulary: int
    whole: bool
    outcomes: int
    distance: float

    @property
    def passed(self) -> bool:
        return self.distance <= TOLERANCE


class TooManyOutcomes(Exception):
    """More outcomes than can be enumerated in reasonable time."""


@dataclass(frozen=True)
class Case:
    """A step over a small vocabulary, ids 0 to k - 1. ``target`` and ``draft``: float64 [k]
    distributions after each string. ``tokens`` of a POINT tree."""

    parents: tuple[int, ...]
    draw: Draw
    target: Distributions
    draft: Distributions
    tokens: String = ()

    @property
    def width(self) -> int:
        return len(self.target[()])

    def drafted(self, tokens: String, node: int) -> String:
        """The tokens from the root down to a node, -1 being the root."""
        return tuple(tokens[i] for i in paths_of(self.parents)[node + 1])


def enumerate_step(
    verifier: Verifier,
    tree: TokenTree,
    draft: Distributions,
    target: Callable[[Sequence[String]], torch.Tensor],
    prefix: str,
) -> ExactCheck | None:
    """The step that ``tree`` is an example of: its first two levels, or the first alone; None if
    they are too large. ``draft``: the drafter's distributions after strings of its tokens;
    ``target`` gives the target's [n, vocab]."""
    (root,) = target([()])
    for depth in (2, 1):
        nodes = sum(node_depth <= depth for node_depth in tree.depths)
        if max(tree.depths[:nodes]) > depth:
            return None  # its nodes do not stand level by level
        q = None if tree.q is None else tree.q[:nodes]
        part = TokenTree(tree.tokens[:nodes], tree.parents[:nodes], tree.draw, q)
        ids = _small_vocabulary(part, root, draft)
        try:
            distance, outcomes = step_error(verifier, _case(part, draft, target, ids))
        except TooManyOutcomes:
            continue
        whole = float(root[ids].sum()) > 1 - 1e-9
        size = nodes, max(part.depths) + 1, len(ids)
        return ExactCheck(prefix, part.draw.value, *size, whole, outcomes, distance)
    return None


def _small_vocabulary(tree: TokenTree, target: torch.Tensor, draft: Distributions) -> list[int]:
    """The ids that stand for the vocabulary: likely ones of the drafter, with a known distribution
    after them where the tree goes on, and of the target."""
    if tree.draw is Draw.POINT:
        drafted = list(dict.fromkeys(tree.tokens.tolist()))
    else:
        order = draft[()].argsort(descending=True).tolist()[: 8 * _TOKENS]
        possible = [token for token in order if float(draft[()][token]) > 0]
        ends = max(tree.depths) == 1
        drafted = [token for token in possible if ends or (token,) in draft][: _TOKENS - 1]
    # At least one that is not drafted: it can only come from the residual.
    likely = [token for token in target.argsort(descending=True).tolist() if token not in drafted]
    return drafted + likely[: max(1, _TOKENS - len(drafted))]


def _case(
    tree: TokenTree,
    draft: Distributions,
    target: Callable[[Sequence[String]], torch.Tensor],
    ids: list[int],
) -> Case:
    depth = max(tree.depths)
    strings = [s for n in range(depth + 1) for s in product(range(len(ids)), repeat=n)]
    spelt = {string: tuple(ids[i] for i in string) for string in strings}
    probs = target(list(spelt.values()))
    known = {s: _conditioned(row[ids]) for s, row in zip(strings, probs, strict=True)}
    drafted = map(ids.index, tree.tokens.tolist() if tree.draw is Draw.POINT else ())
    cut: dict[String, torch.Tensor] = {}
    for string in strings:
        if (row := draft.get(spelt[string])) is None:
            continue
        weights = torch.tensor([float(row[i]) if i < len(row) else 0.0 for i in ids])
        if not string and depth > 1:  # what has no known distribution after it is not drafted
            weights *= torch.tensor([(token,) in draft for token in ids])
        cut[string] = _conditioned(weights)
    return Case(tree.parents, tree.draw, known, cut, tuple(drafted))


def _conditioned(probs: torch.Tensor) -> torch.Tensor:
    """float64, summing to one; uniform where none of the tokens has a chance."""
    probs = probs.double()
    total = float(probs.sum())
    return probs / total if total > 0 else torch.full_like(probs, 1 / len(probs))


def drafts(case: Case, tokens: String = (), weight: float = 1.0) -> Iterator[tuple[String, float]]:
    """Every draft of the case that begins with ``tokens``, and its probability."""
    node = len(tokens)
    if case.draw is Draw.POINT:
        yield case.tokens, 1.0
        return
    if node == len(case.parents):
        yield tokens, weight
        return
    parent = case.parents[node]
    probs = case.draft[case.drafted(tokens, parent)].clone()
    used = [tokens[i] for i in range(node) if case.parents[i] == parent]
    probs[used] = 0.0
    mass = float(probs.sum())
    if mass <= 0:  # run out: any token will do, as nobody could have drawn it
        unused = next(token for token in range(case.width) if token not in used)
        yield from drafts(case, (*tokens, unused), weight)
        return
    for token in (probs > 0).nonzero().flatten().tolist():
        yield from drafts(case, (*tokens, token), weight * float(probs[token]) / mass)


def step_error(verifier: Verifier, case: Case) -> tuple[float, int]:
    """Total variation of a step's output from the target's distribution, and outcomes enumerated;
    1 if a step does not end in a token of the target's. Raises TooManyOutcomes."""
    length, outcomes = max(map(len, case.target)) + 1, 0
    emitted: defaultdict[String, float] = defaultdict(float)
    weighted = list(islice(drafts(case), _MOST_OUTCOMES))
    most = _MOST_OUTCOMES // len(weighted)
    for tokens, weight in weighted:
        for accepted, text, chance in _judged(verifier, case, tokens, most):
            outcomes += 1
            if len(text) != accepted + 1:
                return 1.0, outcomes
            emitted[text] += weight * chance

    def continued(string: String, start: int) -> float:
        """Chance that the target goes on from ``string[:start]`` to the whole string."""
        return math.prod(float(case.target[string[:i]][string[i]]) for i in range(start, length))

    distance = 0.0
    for string in product(range(case.width), repeat=length):
        total = sum(emitted[string[:n]] * continued(string, n) for n in range(1, length + 1))
        distance += abs(total - continued(string, 0)) / 2
    return distance, outcomes


def _judged(
    verifier: Verifier, case: Case, tokens: String, most: int
) -> Iterator[tuple[int, String, float]]:
    """Of every verdict on one draft: how much is accepted, the step's tokens, the probability."""
    paths = [case.drafted(tokens, node) for node in range(-1, len(tokens))]
    logits = torch.stack([case.target[path] for path in paths]).log().float()
    q = None
    if case.draw is not Draw.POINT:
        q = torch.stack([case.draft[paths[parent + 1]] for parent in case.parents]).float()
    span = Span.of_request(_REQUEST, TokenTree(torch.tensor(tokens), case.parents, case.draw, q))
    options = _options(verifier, logits, span.at(0, 0))
    if math.prod(map(len, options)) > most:
        raise TooManyOutcomes
    chosen = list(product(*options))
    uniforms = torch.tensor([[u for u, _ in option] for option in chosen], dtype=torch.float64)
    rows = len(paths)
    if method_of(span, verifier.rule) != "match":  # one uniform a row, then one a node
        rows_first = uniforms[:, :1].expand(-1, rows).flatten()
        uniforms = torch.cat((rows_first, uniforms[:, 1:].flatten()))
    scripted = copy.copy(verifier)  # the same, but it draws these
    vars(scripted)["uniforms"] = lambda count, device: uniforms.flatten()[:count]
    spans = [span.at(0, i * rows) for i in range(len(chosen))]
    verdicts = scripted(logits.repeat(len(chosen), 1), spans)
    for verdict, option in zip(verdicts, chosen, strict=True):
        yield len(verdict.path), verdict.tokens, math.prod(width for _, width in option)


def _options(verifier: Verifier, logits: torch.Tensor, span: Span) -> list[list[Option]]:
    """What each uniform of one tree can do, by the verifier's own chances."""
    probs = probabilities(logits, Rows((span.seq,) * len(logits), (0, *span.tree.depths)))
    outcome = verifier.rule_probabilities(probs, [span])
    if outcome is None:
        return [_intervals(row[None]) for row in probs]
    deciding = [
        [(u, width) for u, width in ((a / 2, a), ((1 + a) / 2, 1 - a)) if width > 0]
        for a in outcome.accept.double().tolist()
    ]
    return [_intervals(outcome.stop), *deciding]


def _intervals(probs: torch.Tensor) -> list[Option]:
    """The intervals in which none of the rows of distributions [n, V] changes its choice."""
    ends = probs.double().cumsum(-1)
    cuts = torch.cat((torch.zeros(1), (ends / ends[:, -1:]).flatten())).clamp(max=1.0)
    bounds = pairwise(sorted(set(cuts.tolist())))
    return [((low + high) / 2, high - low) for low, high in bounds]
