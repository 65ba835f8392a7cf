"""Exact check of one speculative step: enumerates every draft and every decision of the verifier in
use, each with its probability, and compares the distribution of the emitted tokens with the
target's. The vocabulary is reduced to a few likely tokens, with their real probabilities."""

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
from paceline.lab.certify.certificate import ResultTable
from paceline.lab.certify.decoding import TokenIds
from paceline.lab.report.document import NOTES, Column
from paceline.verify.verifier import Verifier, rule_for

_MAX_DEPTH, _MAX_SIBLINGS, _MAX_NODES = 2, 3, 4  # of the enumerated tree
_VOCABULARY = 4  # tokens of the reduced vocabulary
TOLERANCE = 1e-5  # of the total variation distance: the distributions are float32
# Distance of a scripted uniform from the end of its interval: far larger than the rounding
# differences between the kernels' thresholds and ours.
_INSET = 1e-5
# Both implementations are checked. On a CPU the kernels decide, unless log-probabilities are asked
# for: then torch does.
_PARAMS = tuple(SamplingParams(temperature=1.0, logprobs=n, max_tokens=1 << 20) for n in (None, 0))

Option = tuple[float, float]  # a uniform, and the width of the interval that it represents


@dataclass(frozen=True)
class ExactCheck:
    """Result for a tree of ``nodes`` nodes. ``distance``: total variation between the tokens that a
    step emits and the target's distribution of the next ``tokens`` tokens. ``vocabulary``: size of
    the reduced vocabulary. ``outcomes``: how many were enumerated."""

    prefix: str
    draw: str
    nodes: int
    tokens: int
    vocabulary: int
    outcomes: int
    distance: float

    @property
    def passed(self) -> bool:
        return self.distance <= TOLERANCE


@dataclass(frozen=True)
class SmallStep:
    """A step over a reduced vocabulary with ids 0 to k - 1.

    ``target``: float64 [k] distributions after each token string up to the depth of the tree.
    ``q``: float64 [nodes, k] draft distributions, one per node; they do not depend on the tokens of
    the node's ancestors, because a rule must be lossless for any q. A POINT tree has ``tokens``
    instead. ``device``: where the verifier decides."""

    parents: tuple[int, ...]
    draw: Draw
    target: Mapping[TokenIds, torch.Tensor]
    q: torch.Tensor | None = None
    tokens: TokenIds = ()
    device: str | torch.device = "cpu"

    @property
    def vocab_size(self) -> int:
        return len(self.target[()])

    def drafts(self, tokens: TokenIds = (), prob: float = 1.0) -> Iterator[tuple[TokenIds, float]]:
        """Every draft that begins with ``tokens`` (of probability ``prob``), and its probability.
        Siblings are drawn without replacement."""
        node = len(tokens)
        if self.q is None or node == len(self.parents):
            yield tokens if self.q is not None else self.tokens, prob
            return
        probs = self.q[node].clone()
        parent = self.parents[node]
        used = [token for other, token in enumerate(tokens) if self.parents[other] == parent]
        probs[used] = 0.0
        mass = float(probs.sum())
        if mass <= 0:  # the siblings used up q: which token follows does not matter
            unused = next(token for token in range(self.vocab_size) if token not in used)
            yield from self.drafts((*tokens, unused), prob)
            return
        for token in probs.nonzero().flatten().tolist():
            yield from self.drafts((*tokens, token), prob * float(probs[token]) / mass)

    def distance(
        self, verifier: Verifier, params: SamplingParams, upper: bool
    ) -> tuple[float, int]:
        """The total variation distance, and how many outcomes were enumerated. Compared are the
        target's distribution and the step's output, continued by the target to the same length. The
        distance is 1 if a verdict is not the accepted path and exactly one more token.

        ``upper``: uniforms are taken near the upper ends of their intervals, else the lower ends.
        """
        length, outcomes = max(map(len, self.target)) + 1, 0
        emitted: defaultdict[TokenIds, float] = defaultdict(float)
        for tokens, draft_prob in self.drafts():
            for accepted, text, prob in self._verdicts(verifier, tokens, params, upper):
                outcomes += 1
                if len(text) != accepted + 1:
                    return 1.0, outcomes
                emitted[text] += draft_prob * prob

        def target_prob(string: TokenIds, start: int) -> float:
            """Probability that the target continues ``string[:start]`` to ``string``."""
            ends = range(start, length)
            return math.prod(float(self.target[string[:end]][string[end]]) for end in ends)

        distance = 0.0
        for string in product(range(self.vocab_size), repeat=length):
            total = sum(emitted[string[:n]] * target_prob(string, n) for n in range(1, length + 1))
            distance += abs(total - target_prob(string, 0)) / 2
        return distance, outcomes

    def _verdicts(
        self, verifier: Verifier, tokens: TokenIds, params: SamplingParams, upper: bool
    ) -> Iterator[tuple[int, TokenIds, float]]:
        """Every verdict on one draft: accepted nodes, emitted tokens, probability. The verifier
        runs once over a batch of copies, one for each combination of intervals of its uniforms."""
        paths = [tuple(tokens[node] for node in path) for path in paths_of(self.parents)]
        probs = torch.stack([self.target[path] for path in paths]).float().to(self.device)
        q = None if self.q is None else self.q.float()
        tree = TokenTree(torch.tensor(tokens), self.parents, self.draw, q).on(probs.device)
        span = Span.of_request(SequenceView(0, [0], 1, params), tree)
        rule = verifier.rule_probabilities(probs, [span.placed(0, 0)])
        if rule is None:
            options = [_options(_thresholds(row[None]), upper) for row in probs]
        else:  # one uniform serves all rows, because a step ends at exactly one of them
            options = [_options(_thresholds(rule.stop), upper)]
            options += [_options((accept,), upper) for accept in rule.accept.double().tolist()]
        combinations, rows = list(product(*options)), len(probs)
        uniforms = torch.tensor([[u for u, _ in c] for c in combinations], dtype=torch.float64)
        if rule is not None:  # the verifier draws for all rows first, then for the nodes
            row_uniforms = uniforms[:, :1].expand(-1, rows).flatten()
            uniforms = torch.cat((row_uniforms, uniforms[:, 1:].flatten()))
        scripted = copy.copy(verifier)  # the same verifier with these uniforms
        vars(scripted)["uniforms"] = lambda count, device: uniforms.flatten()[:count].to(device)
        spans = [span.placed(0, number * rows) for number in range(len(combinations))]
        verdicts = scripted(probs.log().repeat(len(combinations), 1), spans)
        for verdict, combination in zip(verdicts, combinations, strict=True):
            yield len(verdict.path), verdict.tokens, math.prod(width for _, width in combination)


def _thresholds(probs: torch.Tensor) -> list[float]:
    """The uniforms at which sampling from one of the distributions [n, k] changes its token."""
    ends = probs.double().cumsum(-1)
    return (ends / ends[:, -1:]).flatten().tolist()


def _options(thresholds: Iterable[float], upper: bool) -> list[Option]:
    """One uniform for each interval between the thresholds, near its upper or its lower end. A rule
    with a wrong threshold decides differently at one of the two ends."""
    inside = {min(1.0, max(0.0, threshold)) for threshold in thresholds}
    options = []
    for low, high in pairwise(sorted({0.0, 1.0} | inside)):
        inset = min(_INSET, (high - low) / 2)
        options.append((high - inset if upper else low + inset, high - low))
    return options


def enumerate_step(
    verifier: Verifier,
    tree: TokenTree,
    target: Callable[[Sequence[TokenIds]], torch.Tensor],
    prefix: str,
    device: torch.device,
) -> ExactCheck:
    """Check a step with ``tree``, cut down to as many nodes as can be enumerated, at most 4.
    ``target`` returns the target's distributions [n, vocab] after n token strings that follow the
    ``prefix`` (its name, for the report); the verifier decides on ``device``."""
    (root,) = target([()])
    span = Span.of_request(SequenceView(0, [0], 1, _PARAMS[0]), tree)
    # The matching rule has a uniform for each row: with four sampled nodes 262,144 outcomes.
    fewer = tree.q is not None and rule_for(span, verifier.rule) == "match"
    part = _truncated_tree(tree, _MAX_NODES - fewer)
    ids = _reduced_vocabulary(part, root)
    depth = max(part.depths)
    strings = [s for n in range(depth + 1) for s in product(range(len(ids)), repeat=n)]
    probs = target([tuple(ids[i] for i in string) for string in strings])
    reduced = {s: _normalized(row[ids]) for s, row in zip(strings, probs, strict=True)}
    tokens, q = tuple(map(ids.index, part.host_tokens())) if part.q is None else (), None
    if part.q is not None:
        q = torch.stack([_normalized(row[ids]) for row in _pad_vocabulary(part.q, root)])
    step = SmallStep(part.parents, part.draw, reduced, q, tokens, device)
    results = [step.distance(verifier, *how) for how in product(_PARAMS, (False, True))]
    distance, outcomes = max(d for d, _ in results), sum(n for _, n in results)
    size = len(part), depth + 1, len(ids)
    return ExactCheck(prefix, part.draw.value, *size, outcomes, distance)


def exact_table(checks: Sequence[ExactCheck]) -> ResultTable:
    counts = ("nodes", "tokens", "vocabulary", "outcomes")
    columns = (
        Column("prefix", "prefix"),
        Column("draw", "draft", shown=lambda draw: draw.replace("_", " ")),
        *(Column(name, name) for name in counts),
        Column("distance", "distance", shown="{:.1e}".format),
        Column("passed"),
    )
    return ResultTable("exact", "The rule, enumerated", columns, checks, NOTES["certify"]["exact"])


def _truncated_tree(tree: TokenTree, max_nodes: int) -> TokenTree:
    """The first nodes of a tree. A lossless rule is lossless for them, too."""
    families = children_of(tree.parents)
    ranks = {node: rank for siblings in families for rank, node in enumerate(siblings)}
    kept: list[int] = []
    for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True)):
        fits = depth <= _MAX_DEPTH and ranks[node] < _MAX_SIBLINGS and len(kept) < max_nodes
        if fits and (parent < 0 or parent in kept):
            kept.append(node)
    parents = tuple(-1 if (up := tree.parents[node]) < 0 else kept.index(up) for node in kept)
    return TokenTree(
        tree.tokens[kept], parents, tree.draw, None if tree.q is None else tree.q[kept]
    )


def _reduced_vocabulary(tree: TokenTree, target: torch.Tensor) -> list[int]:
    """Ids of the reduced vocabulary: likely tokens of the drafter and of the target."""
    if tree.q is None:
        drafted = list(dict.fromkeys(tree.host_tokens()))
    else:
        mass = _pad_vocabulary(tree.q, target).sum(0)
        likely = mass.topk(min(_VOCABULARY - 1, len(mass))).indices.tolist()
        drafted = [token for token in likely if float(mass[token]) > 0]
    # At least one token that is never drafted: it can only come from the residual distribution.
    likely = [token for token in target.argsort(descending=True).tolist() if token not in drafted]
    return drafted + likely[: max(1, _VOCABULARY - len(drafted))]


def _pad_vocabulary(q: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``q`` in the target's vocabulary size (padded, or cut if the draft's is larger)."""
    return pad(q.cpu(), (0, len(target) - q.shape[1]))


def _normalized(probs: torch.Tensor) -> torch.Tensor:
    """float64, summing to 1; uniform if all are 0."""
    probs = probs.double()
    total = float(probs.sum())
    return probs / total if total > 0 else torch.full_like(probs, 1 / len(probs))
