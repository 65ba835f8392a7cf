"""The output distribution of one step without chance: every draft, every decision, by enumeration.

The real verifier judges drafts over the real distributions of target and drafter, cut to a few
likely tokens and renormalised so that everything can be listed. Its uniforms are placed by hand,
one in every interval that can matter, each weighted by the length of the interval. What a step
emits is continued with the target's own distribution; the result must be the target's distribution
of as many tokens. By induction over the steps the whole text then has the right distribution.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline.core.batch import Span
from paceline.core.params import SamplingParams
from paceline.core.sampling import Rows, probabilities
from paceline.core.sequence import SequenceView
from paceline.core.tree import Draw, TokenTree, depths_of
from paceline.lab.certify.cells import String
from paceline.verify.verifier import Verifier, method_of

_TOKENS = 4  # of the small vocabulary
_MOST_OUTCOMES = 30_000
_UNDRAWN = SamplingParams(temperature=1.0, max_tokens=1 << 20)
TOLERANCE = 1e-6  # float32 distributions

Distributions = dict[String, torch.Tensor]
Option = tuple[float, float]  # a uniform and the width of the interval it stands for


@dataclass(frozen=True)
class ExactCheck:
    """``distance``: total variation between what a step emits and the target's distribution.

    Over ``tokens`` tokens of a vocabulary of ``vocabulary``; ``whole`` if no other token has any
    chance, otherwise the distributions were conditioned on these. ``outcomes`` were enumerated.
    """

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
    """A step over a small vocabulary, ids 0 to k - 1.

    ``target`` and ``draft``: float64 [k] distributions after each string; ``tokens`` of a POINT
    tree.
    """

    parents: tuple[int, ...]
    draw: Draw
    target: Distributions
    draft: Distributions
    tokens: tuple[int, ...] = ()

    @property
    def depth(self) -> int:
        return max(depths_of(self.parents))

    @property
    def width(self) -> int:
        return len(self.target[()])


def small_tokens(tree: TokenTree, target: torch.Tensor, distributions: Distributions) -> list[int]:
    """The ids that stand for the vocabulary: likely ones of the drafter, and of the target.

    A token that may be drafted needs to have a known distribution after it, where the tree goes on.
    """
    if tree.draw is Draw.POINT:
        tree_tokens = list(dict.fromkeys(tree.tokens.tolist()))
    else:
        root = distributions[()]
        order = root.argsort(descending=True).tolist()[: 8 * _TOKENS]
        deep = max(tree.depths) > 1
        tree_tokens = [
            t for t in order if float(root[t]) > 0 and (not deep or (t,) in distributions)
        ]
        tree_tokens = tree_tokens[: _TOKENS - 1]
    # At least one that is not drafted: it can only come from the residual.
    likely = [t for t in target.argsort(descending=True).tolist() if t not in tree_tokens]
    return tree_tokens + likely[: max(1, _TOKENS - len(tree_tokens))]


def make_case(
    tree: TokenTree,
    distributions: Distributions,
    target_of: Callable[[Sequence[String]], torch.Tensor],
    tokens: Sequence[int],
) -> Case:
    """Both models' distributions on ``tokens``, for the step that ``tree`` is an example of."""
    index_of = {token: i for i, token in enumerate(tokens)}
    depth = max(tree.depths)
    strings = _strings(len(tokens), depth)
    full = target_of([tuple(tokens[i] for i in string) for string in strings])
    target = {s: _conditioned(probs[list(tokens)]) for s, probs in zip(strings, full, strict=True)}
    if tree.draw is Draw.POINT:
        indices = tuple(index_of[token] for token in tree.tokens.tolist())
        return Case(tree.parents, tree.draw, target, {}, indices)
    width = max(max(tokens) + 1, max(len(probs) for probs in distributions.values()))
    draft: Distributions = {}
    for string in strings:
        probs = distributions.get(tuple(tokens[i] for i in string))
        if probs is None:
            continue
        own_probs = torch.nn.functional.pad(probs, (0, width - len(probs)))[list(tokens)]
        if not string and depth > 1:  # what has no known distribution after it is not drafted
            known = torch.tensor([(token,) in distributions for token in tokens])
            own_probs = own_probs * known
        draft[string] = _conditioned(own_probs)
    return Case(tree.parents, tree.draw, target, draft)


def _conditioned(probs: torch.Tensor) -> torch.Tensor:
    """float64, summing to one; uniform where none of the tokens has a chance."""
    probs = probs.double()
    total = float(probs.sum())
    return probs / total if total > 0 else torch.full_like(probs, 1 / len(probs))


def _strings(width: int, depth: int) -> list[String]:
    """All strings of up to ``depth`` tokens."""
    return [s for n in range(depth + 1) for s in itertools.product(range(width), repeat=n)]


def cut(tree: TokenTree, depth: int) -> TokenTree | None:
    """The first levels of a tree; None if its nodes do not stand level by level."""
    keep = [node for node, node_depth in enumerate(tree.depths) if node_depth <= depth]
    if keep != list(range(len(keep))):
        return None
    q = None if tree.q is None else tree.q[: len(keep)]
    return TokenTree(tree.tokens[: len(keep)], tree.parents[: len(keep)], tree.draw, q)


# -- enumeration ----------------------------------------------------------------------------------


def drafts(case: Case) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every draft of the case and its probability."""
    if case.draw is Draw.POINT:
        yield case.tokens, 1.0
        return

    def grown(tokens: tuple[int, ...], weight: float) -> Iterator[tuple[tuple[int, ...], float]]:
        node = len(tokens)
        if node == len(case.parents):
            yield tokens, weight
            return
        parent = case.parents[node]
        probs = case.draft[_path(case.parents, tokens, parent)].clone()
        used = [tokens[i] for i in range(node) if case.parents[i] == parent]
        probs[used] = 0.0
        mass = float(probs.sum())
        if mass <= 0:  # run out: any token will do, as nobody could have drawn it
            unused = next(t for t in range(case.width) if t not in used)
            yield from grown((*tokens, unused), weight)
            return
        for token in (probs > 0).nonzero().flatten().tolist():
            yield from grown((*tokens, token), weight * float(probs[token]) / mass)

    yield from grown((), 1.0)


def _path(parents: tuple[int, ...], tokens: Sequence[int], node: int) -> String:
    path: list[int] = []
    while node >= 0:
        path.insert(0, tokens[node])
        node = parents[node]
    return tuple(path)


def step_error(verifier: Verifier, case: Case) -> tuple[float, int]:
    """Total variation of a step's output from the target's distribution, and outcomes enumerated.

    A step that does not end in a token of the target's own has the distance 1. Raises
    TooManyOutcomes.
    """
    length = case.depth + 1
    strings = list(itertools.product(range(case.width), repeat=length))
    emitted: dict[String, float] = {}
    outcomes = 0
    every = list(itertools.islice(drafts(case), _MOST_OUTCOMES))
    for tokens, weight in every:
        for verdict, chance in _judged(verifier, case, tokens, _MOST_OUTCOMES // len(every)):
            outcomes += 1
            path, emitted_by = verdict
            if len(emitted_by) != len(path) + 1:
                return 1.0, outcomes
            emitted[emitted_by] = emitted.get(emitted_by, 0.0) + weight * chance
    difference = 0.0
    for string in strings:
        total = sum(
            emitted.get(string[:n], 0.0) * _continued(case, string, n) for n in range(1, length + 1)
        )
        difference += abs(total - _continued(case, string, 0))
    return difference / 2, outcomes


def _continued(case: Case, string: String, start: int) -> float:
    """Chance that the target goes on from ``string[:start]`` to the whole string."""
    return math.prod(float(case.target[string[:i]][string[i]]) for i in range(start, len(string)))


def _judged(
    verifier: Verifier, case: Case, tokens: tuple[int, ...], most: int
) -> Iterator[tuple[tuple[tuple[int, ...], String], float]]:
    """(path, tokens) of every verdict on one draft, and its probability."""
    paths = [_path(case.parents, tokens, node) for node in range(-1, len(tokens))]
    logits = torch.stack([case.target[path] for path in paths]).log().float()
    q = None
    if case.draw is not Draw.POINT:
        above = [case.draft[paths[parent + 1]] for parent in case.parents]
        q = torch.stack(above).float()
    tree = TokenTree(torch.tensor(tokens), case.parents, case.draw, q)
    request = SequenceView(0, [0], 1, _UNDRAWN)
    options = _options(verifier, logits, Span.of_request(request, tree).at(0, 0))
    if math.prod(map(len, options)) > most:
        raise TooManyOutcomes
    chosen = list(itertools.product(*options))
    rows, n = len(tokens) + 1, len(chosen)
    placed = torch.tensor([[u for u, _ in c] for c in chosen], dtype=torch.float64)
    matched = method_of(Span.of_request(request, tree).at(0, 0), verifier.rule) == "match"
    choosing = placed if matched else placed[:, :1].expand(-1, rows)
    deciding = placed[:, :0] if matched else placed[:, 1:]
    uniforms = torch.cat((choosing.flatten(), deciding.flatten()))
    spans = [Span.of_request(request, tree).at(0, i * rows) for i in range(n)]
    verdicts = _with_uniforms(verifier, uniforms)(logits.repeat(n, 1), spans)
    for verdict, choice in zip(verdicts, chosen, strict=True):
        yield (verdict.path, verdict.tokens), math.prod(width for _, width in choice)


def _with_uniforms(verifier: Verifier, uniforms: torch.Tensor) -> Verifier:
    """The same verifier, told what it will draw (on the host, where these distributions are)."""

    def given(count: int, device: torch.device) -> torch.Tensor:
        return uniforms[:count]

    placed = copy.copy(verifier)
    vars(placed)["uniforms"] = given
    return placed


def _options(verifier: Verifier, logits: torch.Tensor, span: Span) -> list[list[Option]]:
    """What each uniform of one tree can do: by the verifier's own chances and stop
    distributions."""
    rows = logits.shape[0]
    distributions = probabilities(logits, Rows((span.seq,) * rows, (0, *span.tree.depths)))
    outcome = verifier.rule_probabilities(distributions, [span])
    if outcome is None:
        return [_intervals(row[None]) for row in distributions]
    deciding = [
        [(u, width) for u, width in ((a / 2, a), ((1 + a) / 2, 1 - a)) if width > 0]
        for a in outcome.accept.double().tolist()
    ]
    return [_intervals(outcome.stop), *deciding]


def _intervals(distributions: torch.Tensor) -> list[Option]:
    """The intervals in which none of the rows of distributions [n, V] changes its choice."""
    ends = distributions.double().cumsum(-1)
    cuts = torch.cat((torch.zeros(1), (ends / ends[:, -1:]).flatten())).clamp(max=1.0)
    return [
        ((low + high) / 2, high - low)
        for low, high in itertools.pairwise(sorted(set(cuts.tolist())))
    ]
