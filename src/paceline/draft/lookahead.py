"""Lookahead decoding: the target makes n-grams by Jacobi iteration beside verification.

Fu et al. 2024 (arXiv 2402.02057). Each forward of the target carries, besides candidates to verify,
a window of guesses about later tokens. The target's choice after a guess is a better guess; after
some steps a guess is an n-gram, kept in a pool until its first token comes up.

The window of W columns is a tree. Column j is an n-gram in the making whose first token, its head,
stands j tokens behind the last committed token r; column 0 begins with r. The heads are one chain,
and each column's later tokens hang below its head: the mask of the paper. For W = 3 and n-grams of
N = 4 tokens::

    r -- h1 -- h2              the row of r chooses the token after r, ...
    |    |     |
    x    y     z
    |    |     |
    x'   y'    z'              ... that of x' a new token for column 0, (r, x, x', new)

After a step every column takes the choice at its last row and enters the pool as an n-gram, unless
it begins with r and the target has chosen another token after r. Then it loses its head, as r moves
on by one.

Nodes with the same path share a row, so all nodes are candidates: a window that has converged is
accepted as it stands. With a seed columns converge to the text of that seed, as choices use their
positions' noise. Choices without a seed are independent of later draws, so POINT's rule is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.sequence import SequenceView
from paceline.core.tree import TokenTree
from paceline.draft.base import LookupDrafter, States
from paceline.draft.spec import DraftSpec, Loading, Prepared, option
from paceline.draft.trees.shape import merge

Pool = dict[int, list[tuple[int, ...]]]  # by first token, what followed it; the latest last


def remember(pool: Pool, ngram: Sequence[int], size: int) -> None:
    """Add an n-gram to a pool, which keeps the ``size`` latest of each first token."""
    known, rest = pool.setdefault(ngram[0], []), tuple(ngram[1:])
    if rest in known:
        known.remove(rest)
    known.append(rest)
    del known[:-size]


@dataclass
class _State:
    """Window and pool of one sequence. ``columns``: W lists of N - 1 tokens, the head first. Of
    this step's tree: the number of ``nodes``, and ``drafted``: each column's tokens in it and the
    row whose choice continues them."""

    columns: list[list[int]]
    pool: Pool = field(default_factory=dict)
    drafted: list[tuple[list[int], int]] = field(default_factory=list)
    nodes: int = 0


@dataclass(frozen=True, kw_only=True)
class Lookahead(DraftSpec):
    """A window of ``window`` columns, n-grams of ``ngram`` tokens, ``candidates`` to verify."""

    kind = "lookahead"
    page = "lookahead.md"
    tried = "real"
    examples = ("lookahead", "lookahead:window=4,ngram=5,candidates=2")

    window: int = option(5, least=2)
    ngram: int = option(3, least=2)
    candidates: int = option(3, least=1)

    def prepare(self, loading: Loading) -> Prepared:
        return Prepared(lambda context: LookaheadDrafter(context.target.device, self))


class LookaheadDrafter(LookupDrafter):
    """A tree of ``length`` levels holds the candidates and the window down to that depth; columns
    cut there become shorter n-grams. The whole window is ``window + ngram - 3`` levels deep."""

    name = "lookahead"
    offers = False
    states: States[_State]

    def __init__(self, device: torch.device | str, spec: Lookahead | None = None) -> None:
        super().__init__(device)
        spec = spec or Lookahead()
        self._window, self._ngram, self._candidates = spec.window, spec.ngram, spec.candidates

    def max_nodes(self, length: int) -> int:
        if not length:
            return 0
        columns = range(min(self._window, length + 1))
        window = sum(self._limit(column, length) for column in columns) - 1  # r is no node
        return self._candidates * min(length, self._ngram - 1) + window

    def _limit(self, column: int, length: int) -> int:
        """Tokens of a column in a tree of ``length`` levels; its head is at depth ``column``."""
        return min(self._ngram - 1, length - column + 1)

    # -- proposing ---------------------------------------------------------------------------

    def propose(self, plan: Plan) -> list[TokenTree]:
        for item in plan.slices:
            if item.seq.seq_id in self.states:
                self.states[item.seq.seq_id].drafted = []  # of a withdrawn proposal
        return [replace(tree, wants_choices=True) for tree in super().propose(plan)]

    def guess(self, item: Slice) -> tuple[Sequence[int], Sequence[int]]:
        seq, length = item.seq, item.draft_length
        state, last = self.states.of(seq, self.begin), seq.tokens[-1]
        state.columns[0][0] = last
        used = [
            column[: self._limit(j, length)] for j, column in enumerate(state.columns[: length + 1])
        ]
        heads = [column[0] for column in used[1:]]
        paths = [[*heads[:j], *column[1:]] for j, column in enumerate(used)]
        known = reversed(state.pool.get(last, ()))
        candidates = [rest[:length] for rest in known]
        tokens, parents = merge([*candidates, *paths])
        node_of = {index: node for node, index in enumerate(zip(parents, tokens, strict=True))}
        state.nodes = len(tokens)
        state.drafted = []
        for column, path in zip(used, paths, strict=True):
            node = -1
            for token in path:
                node = node_of[node, token]
            state.drafted.append((column, node + 1))
        return tokens, parents

    def begin(self, seq: SequenceView) -> _State:
        """Any tokens will do to begin with: those the text begins with, one for each place."""
        guesses = [seq.tokens[n % len(seq.tokens)] for n in range(self._window + self._ngram)]
        columns = [guesses[j : j + self._ngram - 1] for j in range(self._window)]
        return _State(columns)

    # -- the Jacobi update -------------------------------------------------------------------

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        for commit in commits:
            state = self.states.get(commit.seq_id)
            if state is not None and state.drafted:
                if commit.drafted == state.nodes:
                    self._advance(state, commit)
                state.drafted = []

    def _advance(self, state: _State, commit: Commit) -> None:
        for j, (tokens, row) in enumerate(state.drafted):
            ngram = [*tokens, commit.choices[row]]
            # The token after the last committed one is known by now: wrong n-grams are dropped.
            if j or ngram[1] == commit.choices[0]:
                remember(state.pool, ngram, self._candidates)
            # A column that the tree cut short keeps its later guesses.
            guesses = [*ngram[1:], *state.columns[j][len(ngram) :]]
            guesses += guesses[-1:] * (self._ngram - 1 - len(guesses))
            state.columns[j] = guesses
        # The columns have moved by one token. Each further committed token passes a column, which
        # starts again at the far end with its old tokens: better than random ones or its
        # neighbour's (docs/drafters/lookahead.md).
        passed = (len(commit.tokens) - 1) % self._window
        state.columns = state.columns[passed:] + state.columns[:passed]
