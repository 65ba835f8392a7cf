"""Steps of the engine around a fake target, for tests of what a drafter proposes and observes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.core.tree import TokenTree
from paceline.draft.base import Drafter
from paceline.verify.verifier import walk_matching

Scores = Callable[[list[int]], torch.Tensor]  # tokens so far -> scores [vocab] of the next one


def request(tokens: Sequence[int], seq_id: int = 0) -> SequenceState:
    """A greedy request that has its prompt cached but for the last token."""
    params = SamplingParams(max_tokens=10_000)
    return SequenceState(seq_id, list(tokens), len(tokens), params, cached=len(tokens) - 1)


def paths_of(tree: TokenTree) -> list[list[int]]:
    """The tokens from the root to each node."""
    paths: list[list[int]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


@dataclass(frozen=True)
class Step:
    tree: TokenTree
    commit: Commit


def run_step(
    drafter: Drafter, target: Scores, seqs: Sequence[SequenceState], lengths: Sequence[int]
) -> list[Step]:
    """Propose, verify greedily, commit and observe, as the engine does it."""
    slices = [Slice(s, s.num_pending, n) for s, n in zip(seqs, lengths, strict=True)]
    trees = drafter.propose(Plan(tuple(slices)))
    logits: list[torch.Tensor] = []
    commits: list[Commit] = []
    for seq, tree in zip(seqs, trees, strict=True):
        start = len(logits)
        logits += [target(seq.tokens + path) for path in ([], *paths_of(tree))]
        choices = [int(row.argmax()) for row in logits[start:]]
        tokens = tree.tokens.tolist()
        path = walk_matching(tree.parents, tokens, choices)
        emitted = (*(tokens[n] for n in path), choices[path[-1] + 1 if path else 0])
        commits.append(
            Commit(
                seq.seq_id,
                emitted,
                path,
                drafted=len(tree),
                scheduled=seq.num_pending,
                last=seq.tokens[-1],
                position=seq.cached,
                logit_row=start,
                choices=tuple(choices),
            )
        )
        seq.tokens += emitted
        seq.cached = len(seq.tokens) - 1
    drafter.observe(commits, ModelOutput(torch.stack(logits)))
    return [Step(*pair) for pair in zip(trees, commits, strict=True)]
