"""One step by enumeration: every draft and every decision of the verifier in use, each with its
probability. A few likely tokens with their real distributions stand for the vocabulary."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch.nn.functional import pad

from paceline.core.batch import Span
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceView
from paceline.core.tree import Draw, TokenTree, children_of, paths_of
from paceline.lab.certify.decoding import String
from paceline.verify.verifier import Verifier, method_of

_DEPTH, _SIBLINGS, _NODES = 2, 3, 4  # of a tree, at most
_TOKENS = 4  # of the small vocabulary
_MOST_OUTCOMES = 100_000  # of one way, by a bound that is several times too high
TOLERANCE = 1e-5  # float32 distributions
_INSET = 1e-5  # how close to a cut a uniform is; far more than the kernels' cuts differ by rounding
# On a processor the kernels decide, but not where log-probabilities are wanted: that is torch's.
_WAYS = tuple(SamplingParams(temperature=1.0, logprobs=n, max_tokens=1 << 20) for n in (None, 0))

Option = tuple[float, float]  # a uniform and the width of the interval that it stands for


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


@dataclass(frozen=True)
class SmallStep:
    """A step over a small vocabulary, ids 0 to k - 1. ``target``: float64 [k] distributions after
    each string that is no longer than the tree is deep. ``q`` float64 [nodes, k]: what each node is
    drawn from, whatever tokens are above it, as a rule must hold for any q. A POINT tree has
    ``tokens`` instead. ``device``: where the verifier decides."""

    parents: tuple[int, ...]
    draw: Draw
    target: Mapping[String, torch.Tensor]
    q: torch.Tensor | None = None
    tokens: String = ()
    device: str | torch.device = "cpu"

    @property
    def width(self) -> int:
        return len(self.target[()])

    def drafts(self, tokens: String = (), weight: float = 1.0) -> Iterator[tuple[String, float]]:
        """Every draft that begins with ``tokens``, and its probability."""
        node = len(tokens)
        if self.q is None or node == len(self.parents):
            yield tokens if self.q is not None else self.tokens, weight
            return
        probs = self.q[node].clone()
        used = [token for at, token in enumerate(tokens) if self.parents[at] == self.parents[node]]
        probs[used] = 0.0
        mass = float(probs.sum())
        if mass <= 0:  # run out: any token will do, as nobody could have drawn it
            unused = next(token for token in range(self.width) if token not in used)
            yield from self.drafts((*tokens, unused), weight)
            return
        for token in probs.nonzero().flatten().tolist():
            yield from self.drafts((*tokens, token), weight * float(probs[token]) / mass)

    def distance(
        self, verifier: Verifier, params: SamplingParams, upper: bool
    ) -> tuple[float, int]:
        """Total variation of the step's output, continued by the target, from the target's
        distribution, and outcomes enumerated; 1 if a step does not end in a token of the target's.
        ``upper``: each interval of a uniform is tried near its upper end, else near its lower."""
        length, outcomes = max(map(len, self.target)) + 1, 0
        emitted: defaultdict[String, float] = defaultdict(float)
        for tokens, weight in self.drafts():
            for accepted, text, chance in self._judged(verifier, tokens, params, upper):
                outcomes += 1
                if len(text) != accepted + 1:
                    return 1.0, outcomes
                emitted[text] += weight * chance

        def continued(string: String, start: int) -> float:
            """Chance that the target goes on from ``string[:start]`` to the whole string."""
            ends = range(start, length)
            return math.prod(float(self.target[string[:end]][string[end]]) for end in ends)

        distance = 0.0
        for string in product(range(self.width), repeat=length):
            total = sum(emitted[string[:n]] * continued(string, n) for n in range(1, length + 1))
            distance += abs(total - continued(string, 0)) / 2
        return distance, outcomes

    def _judged(
        self, verifier: Verifier, tokens: String, params: SamplingParams, upper: bool
    ) -> Iterator[tuple[int, String, float]]:
        """Of every verdict on one draft: how much is accepted, its tokens, and its probability."""
        paths = [tuple(tokens[node] for node in path) for path in paths_of(self.parents)]
        probs = torch.stack([self.target[path] for path in paths]).float().to(self.device)
        q = None if self.q is None else self.q.float()
        tree = TokenTree(torch.tensor(tokens), self.parents, self.draw, q).on(probs.device)
        span = Span.of_request(SequenceView(0, [0], 1, params), tree)
        rule = verifier.rule_probabilities(probs, [span.at(0, 0)])
        if rule is None:
            options = [_options(_cuts(row[None]), upper) for row in probs]
        else:  # one uniform serves all rows: a step ends at one of them
            options = [_options(_cuts(rule.stop), upper)]
            options += [_options((chance,), upper) for chance in rule.accept.double().tolist()]
        chosen, rows = list(product(*options)), len(probs)
        uniforms = torch.tensor([[u for u, _ in one] for one in chosen], dtype=torch.float64)
        if rule is not None:  # those of all rows come before those of the nodes
            of_rows = uniforms[:, :1].expand(-1, rows).flatten()
            uniforms = torch.cat((of_rows, uniforms[:, 1:].flatten()))
        scripted = copy.copy(verifier)  # the same, but it draws these
        vars(scripted)["uniforms"] = lambda count, device: uniforms.flatten()[:count].to(device)
        spans = [span.at(0, number * rows) for number in range(len(chosen))]
        verdicts = scripted(probs.log().repeat(len(chosen), 1), spans)
        for verdict, one in zip(verdicts, chosen, strict=True):
            yield len(verdict.path), verdict.tokens, math.prod(width for _, width in one)


def _cuts(probs: torch.Tensor) -> list[float]:
    """Where one of the rows of distributions [n, k] changes its choice."""
    ends = probs.double().cumsum(-1)
    return (ends / ends[:, -1:]).flatten().tolist()


def _options(cuts: Iterable[float], upper: bool) -> list[Option]:
    """A uniform for each interval between the cuts. Where both ends of all intervals were tried, a
    rule that cuts elsewhere has decided otherwise."""
    inside = {min(1.0, max(0.0, cut)) for cut in cuts}
    options = []
    for low, high in pairwise(sorted({0.0, 1.0} | inside)):
        inset = min(_INSET, (high - low) / 2)
        options.append((high - inset if upper else low + inset, high - low))
    return options


def enumerate_step(
    verifier: Verifier,
    tree: TokenTree,
    target: Callable[[Sequence[String]], torch.Tensor],
    prefix: str,
    device: torch.device,
) -> ExactCheck:
    """A step with the beginning of this ``tree``. ``target`` gives its distributions [n, vocab]
    after strings of tokens; the verifier decides on ``device``."""
    (root,) = target([()])
    for most in range(_NODES, 0, -1):
        part = _beginning(tree, most)
        ids = _small_vocabulary(part, root)
        if _bound(verifier, part, len(ids)) <= _MOST_OUTCOMES:
            break
    depth = max(part.depths)
    strings = [s for n in range(depth + 1) for s in product(range(len(ids)), repeat=n)]
    probs = target([tuple(ids[i] for i in string) for string in strings])
    known = {s: _conditioned(row[ids]) for s, row in zip(strings, probs, strict=True)}
    tokens, q = tuple(map(ids.index, part.host_tokens())) if part.q is None else (), None
    if part.q is not None:
        q = torch.stack([_conditioned(row[ids]) for row in _as_wide(part.q, root)])
    step = SmallStep(part.parents, part.draw, known, q, tokens, device)
    ways = [step.distance(verifier, *way) for way in product(_WAYS, (False, True))]
    distance, outcomes = max(d for d, _ in ways), sum(n for _, n in ways)
    whole = float(root[ids].sum()) > 1 - 1e-9
    size = len(part), depth + 1, len(ids), whole
    return ExactCheck(prefix, part.draw.value, *size, outcomes, distance)


def _beginning(tree: TokenTree, most: int) -> TokenTree:
    """Its first nodes: what a rule is lossless for, too."""
    families = children_of(tree.parents)
    ranks = {node: rank for siblings in families for rank, node in enumerate(siblings)}
    kept: list[int] = []
    for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True)):
        near = depth <= _DEPTH and ranks[node] < _SIBLINGS and len(kept) < most
        if near and (parent < 0 or parent in kept):
            kept.append(node)
    parents = tuple(-1 if (up := tree.parents[node]) < 0 else kept.index(up) for node in kept)
    return TokenTree(
        tree.tokens[kept], parents, tree.draw, None if tree.q is None else tree.q[kept]
    )


def _bound(verifier: Verifier, tree: TokenTree, width: int) -> int:
    """No fewer than the outcomes of one way."""
    nodes, drafts = len(tree), 1 if tree.q is None else width ** len(tree)
    span = Span.of_request(SequenceView(0, [0], 1, _WAYS[0]), tree)
    if method_of(span, verifier.rule) == "match":
        return int(drafts * width ** (nodes + 1))
    return int(drafts * width * (nodes + 1) * 2**nodes)


def _small_vocabulary(tree: TokenTree, target: torch.Tensor) -> list[int]:
    """The ids that stand for the vocabulary: likely ones of the drafter and of the target."""
    if tree.q is None:
        drafted = list(dict.fromkeys(tree.host_tokens()))
    else:
        mass = _as_wide(tree.q, target).sum(0)
        likely = mass.topk(min(_TOKENS - 1, len(mass))).indices.tolist()
        drafted = [token for token in likely if float(mass[token]) > 0]
    # At least one that is not drafted: it can only come from the residual.
    likely = [token for token in target.argsort(descending=True).tolist() if token not in drafted]
    return drafted + likely[: max(1, _TOKENS - len(drafted))]


def _as_wide(q: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return pad(q.cpu(), (0, len(target) - q.shape[1]))


def _conditioned(probs: torch.Tensor) -> torch.Tensor:
    """float64, summing to one; uniform where none of the tokens has a chance."""
    probs = probs.double()
    total = float(probs.sum())
    return probs / total if total > 0 else torch.full_like(probs, 1 / len(probs))
