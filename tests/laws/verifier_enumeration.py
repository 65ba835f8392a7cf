"""Exact output distributions of the whole ``Verifier``, by enumeration of its random numbers.

The verifier gets one uniform from every interval in which its decisions stay the same, weighted by
the length of the interval. This also covers the tree walk, the indexing and the transfer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from harness import (
    Context,
    Drafter,
    Drafts,
    Setting,
    Step,
    distance,
    distribution_table,
    joint_distribution,
    plain_distribution,
    strings,
)

from paceline.core.batch import Verdict
from paceline.core.tree import TokenTree
from paceline.verify import rules as real_rules
from paceline.verify.verifier import Verifier
from support.spans import judged

Option = tuple[float, float]  # a uniform and the width of the interval it stands for


class FixedUniforms(Verifier):
    """A verifier whose uniform random numbers are ``fixed``."""

    fixed: torch.Tensor

    def uniforms(self, count: int, device: torch.device) -> torch.Tensor:
        assert self.fixed.shape == (count,)
        return self.fixed


def _intervals(probs: torch.Tensor) -> list[Option]:
    """The intervals in which none of the rows of distributions [n, V] changes its choice."""
    ends = probs.double().cumsum(-1)
    cuts = torch.cat((torch.zeros(1), (ends / ends[:, -1:]).flatten())).clamp(max=1.0)
    return [
        ((low + high) / 2, high - low) for low, high in itertools.pairwise(cuts.unique().tolist())
    ]


def _options(p: torch.Tensor, drafts: Drafts, index: int, method: str) -> list[list[Option]]:
    """The intervals of each uniform of one tree: one entry per row, then one per node if nodes are
    accepted by uniforms. Then only one row's choice is used, so all rows may share one uniform."""
    if method == "match":
        return [_intervals(row.unsqueeze(0)) for row in p]
    assert drafts.q is not None
    parents, tokens = drafts.parents, drafts.tokens[index]
    outcome = getattr(real_rules, method)(p, drafts.q[index], tokens, (parents,))
    deciding = [
        [(chance / 2, chance), ((1 + chance) / 2, 1 - chance)]
        for chance in outcome.accept.double().tolist()
    ]
    return [_intervals(outcome.stop), *deciding]


def _judged(
    setting: Setting,
    drafts: Drafts,
    index: int,
    context: Context,
    verifier: FixedUniforms,
    method: str,
) -> Iterator[tuple[Verdict, float]]:
    """Verdicts on one draft and their probabilities, all from one call of the verifier."""
    rows = len(drafts.parents) + 1
    ids = drafts.row_strings[index]
    paths = strings(setting.vocab, len(drafts.parents))
    logits = setting.target([(*context, *paths[i]) for i in ids.tolist()])
    request = setting.request(context)
    p = distribution_table(setting.target, setting, context, len(drafts.parents))[ids]
    combinations = [
        combination
        for combination in itertools.product(*_options(p, drafts, index, method))
        if all(width > 0 for _, width in combination)
    ]
    uniforms = torch.tensor([[u for u, _ in c] for c in combinations], dtype=torch.float64)
    choosing = uniforms if method == "match" else uniforms[:, :1].expand(-1, rows)
    deciding = uniforms[:, :0] if method == "match" else uniforms[:, 1:]
    verifier.fixed = torch.cat((choosing.flatten(), deciding.flatten()))
    q = None if drafts.q is None else drafts.q[index]
    tree = TokenTree(drafts.tokens[index], drafts.parents, drafts.draw, q)
    checks = [judged(request, i * rows, tree) for i in range(len(combinations))]
    verdicts = verifier(logits.repeat(len(checks), 1), checks)
    for verdict, combination in zip(verdicts, combinations, strict=True):
        yield verdict, math.prod(width for _, width in combination)


def verifier_distribution(
    setting: Setting, drafter: Drafter, depth: int, verifier: FixedUniforms, method: str
) -> Step:
    """Emissions of one step through the whole ``Verifier``, each weighted by its interval.

    ``method`` is what the verifier should use here; it says which uniforms can matter.
    """

    def step(context: Context) -> torch.Tensor:
        emitted = torch.zeros(len(strings(setting.vocab, depth + 1)), dtype=torch.float64)
        for drafts in drafter(distribution_table(setting.draft, setting, context, depth)):
            for index, weight in enumerate(drafts.weights.tolist()):
                judged = _judged(setting, drafts, index, context, verifier, method)
                for verdict, chance in judged:
                    if len(verdict.tokens) != len(verdict.path) + 1:
                        raise MissingToken(f"path {verdict.path}, tokens {verdict.tokens}")
                    string = 0
                    for token in verdict.tokens:
                        string = 1 + setting.vocab * string + token
                    emitted[string] += weight * chance
        return emitted

    return step


class MissingToken(Exception):
    """A step did not end in a token of the target's own."""


def verifier_error(
    setting: Setting,
    drafter: Drafter,
    depth: int,
    verifier: FixedUniforms,
    method: str,
    length: int = 2,
) -> float:
    """Total variation from plain decoding; 1 if a step lacks the target's own token."""
    step = verifier_distribution(setting, drafter, depth, verifier, method)
    try:
        return distance(
            joint_distribution(setting, step, length), plain_distribution(setting, length)
        )
    except MissingToken:
        return 1.0
