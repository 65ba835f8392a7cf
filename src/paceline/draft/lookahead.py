"""Lookahead decoding: verification forwards also generate n-grams, by Jacobi iteration.

Fu et al. 2024 (arXiv 2402.02057). Besides the candidates to verify, each forward of the target
carries a window of guesses about later tokens. The token that the target chooses after a guess
improves the guess. After some steps it is an n-gram, which stays in a pool until its first token is
the last committed token: then the n-gram is a candidate.

The window has W columns. Column j is an unfinished n-gram whose first token, its head, stands j
tokens after the last committed token r; column 0 begins with r. As a tree, the heads form a chain
below r, and the other tokens of a column form a chain below its head. This gives the attention mask
of the paper. For W = 3 and n-grams of N = 4 tokens::

    r -- h1 -- h2              the row of r chooses the token after r
    |    |     |
    x    y     z
    |    |     |
    x'   y'    z'              the row of x' chooses the next token of column 0: (r, x, x', new)

After a step the token chosen at its last row is appended to every column, and the column enters the
pool as an n-gram (not column 0 if the target chose another token than x after r). Then each column
drops its head, because r moves on by one token.

Nodes with the same path share a row, so the nodes of the window are candidates, too: a window that
has converged is accepted as it stands. With a seed, a choice uses the noise of its position, so the
columns converge to the text of that seed. Without one, the choices are independent of later draws,
so the rule for ``Draw.POINT`` is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.sequence import PerSequence, SequenceView
from paceline.core.tree import TokenTree
from paceline.draft.base import LookupDrafter
from paceline.draft.spec import DraftSpec, LoadContext, PreparedDraft, option
from paceline.draft.trees.shape import merge

Pool = dict[int, list[tuple[int, ...]]]  # first token -> the rests of its n-grams, latest last


def remember(pool: Pool, ngram: Sequence[int], size: int) -> None:
    """Add an n-gram to the pool, which keeps the ``size`` latest n-grams of each first token."""
    known, rest = pool.setdefault(ngram[0], []), tuple(ngram[1:])
    if rest in known:
        known.remove(rest)
    known.append(rest)
    del known[:-size]


@dataclass
class _State:
    """Window and pool of one sequence. ``columns``: W lists of N - 1 tokens, the head first.
    ``drafted``: for each column in this step's tree of ``nodes`` nodes, its tokens there and the
    row whose choice continues them."""

    columns: list[list[int]]
    pool: Pool = field(default_factory=dict)
    drafted: list[tuple[list[int], int]] = field(default_factory=list)
    nodes: int = 0


@dataclass(frozen=True, kw_only=True)
class Lookahead(DraftSpec):
    """A window of ``window`` columns, n-grams of ``ngram`` tokens, of which up to ``candidates``
    from the pool are verified in a step."""

    kind = "lookahead"
    tune_tries = "real"
    examples = ("lookahead", "lookahead:window=4,ngram=5,candidates=2")

    window: int = option(5, least=2)
    ngram: int = option(3, least=2)
    candidates: int = option(3, least=1)

    def prepare(self, loading: LoadContext) -> PreparedDraft:
        return PreparedDraft(lambda context: LookaheadDrafter(context.target.device, self))


class LookaheadDrafter(LookupDrafter):
    """Proposes trees of candidates from the pool and the window. The whole window has ``window +
    ngram - 3`` levels; in a shorter tree its columns are cut and give shorter n-grams."""

    name = "lookahead"
    drafts_before_choice = False
    states: PerSequence[_State]

    def __init__(self, device: torch.device | str, spec: Lookahead | None = None) -> None:
        super().__init__(device)
        spec = spec or Lookahead()
        self._window, self._ngram, self._candidates = spec.window, spec.ngram, spec.candidates

    def max_nodes(self, length: int) -> int:
        if not length:
            return 0
        columns = range(min(self._window, length + 1))
        window = sum(self._limit(column, length) for column in columns) - 1  # r is not a node
        return self._candidates * min(length, self._ngram - 1) + window

    def _limit(self, column: int, length: int) -> int:
        """The most tokens of a column, whose head has depth ``column``, in ``length`` levels."""
        return min(self._ngram - 1, length - column + 1)

    # -- proposing ---------------------------------------------------------------------------

    def propose(self, plan: Plan) -> list[TokenTree]:
        for item in plan.slices:
            if item.seq.seq_id in self.states:
                self.states[item.seq.seq_id].drafted = []  # that proposal was not verified
        return [replace(tree, wants_choices=True) for tree in super().propose(plan)]

    def propose_one(self, item: Slice) -> tuple[Sequence[int], Sequence[int]]:
        seq, length = item.seq, item.draft_length
        state, last = self.states.get_or_make(seq, self.new_state), seq.tokens[-1]
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

    def new_state(self, seq: SequenceView) -> _State:
        """Any tokens serve as first guesses: here the text's first tokens."""
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
            # The token after r is known now; an n-gram of column 0 without it is wrong.
            if j or ngram[1] == commit.choices[0]:
                remember(state.pool, ngram, self._candidates)
            # A column of which only a part was in the tree keeps its other guesses.
            guesses = [*ngram[1:], *state.columns[j][len(ngram) :]]
            guesses += guesses[-1:] * (self._ngram - 1 - len(guesses))
            state.columns[j] = guesses
        # The columns have moved by one token. For each further committed token the first column
        # moves to the end of the window and keeps its tokens, which is better than random tokens or
        # those of its neighbour (docs/drafters/lookahead.md).
        shift = (len(commit.tokens) - 1) % self._window
        state.columns = state.columns[shift:] + state.columns[:shift]
