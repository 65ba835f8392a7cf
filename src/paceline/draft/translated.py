"""String-level drafts: a draft model writes in its own vocabulary, the target reads the text.

Timor et al. 2025 (arXiv 2502.05202), "string-level exact match". Any two tokenizers will do that
give a text back as it was. The draft's choices are its likeliest ones, for sampled requests too:
without common ids there is no q that the verifier could use, and then the likeliest token is the
best guess (POINT). Text is a matter of the host: one more synchronisation each time it drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceView
from paceline.core.transfer import to_device
from paceline.core.tree import TokenTree, children_of
from paceline.draft.base import Drafter
from paceline.draft.trees.trie import merge
from paceline.draft.vocabulary.matching import Match
from paceline.draft.vocabulary.retokenise import Retokeniser
from paceline.model.paged.cache import PagedCache


class Inner(Drafter, Protocol):
    """A draft model, as it is translated for."""

    cache: PagedCache
    deliver_to: torch.device

    def warm_up(self, batch_size: int) -> None: ...
    def keep(self, seq_id: int, length: int) -> None: ...


class _Shadow:
    """A sequence as the draft model sees it: its own tokens, and no sampling."""

    def __init__(self, seq_id: int, text: Retokeniser) -> None:
        self.text = text
        self.request = SequenceView(seq_id, (), 0, SamplingParams())

    def slice_of(self, item: Slice) -> Slice:
        """The draft's part in the step: as much of a prompt as the target is given of its own."""
        if item.decodes and not item.draft_length:
            return Slice(self.request, len(self.request.tokens))  # left alone; caught up on later
        self.text.extend(item.seq.tokens)
        tokens = self.text.context()
        self.request = replace(self.request, tokens=tokens)
        if item.decodes:
            return Slice(self.request, len(tokens), 0 if self.text.waits else item.draft_length)
        share = len(tokens) * (item.seq.cached + item.scheduled) // len(item.seq.tokens)
        return Slice(self.request, min(share, len(tokens) - 1))


class StringDrafter:
    """Lets ``inner`` draft for shadows of the sequences and translates its trees by their text.

    A tree's paths are re-tokenised one by one; those that begin alike share nodes again.
    """

    features: tuple[int, ...] = ()
    reads_logits = False
    reads = True  # a prompt, before it drafts

    def __init__(self, inner: Inner, match: Match) -> None:
        """``inner`` drafts in the draft's own ids."""
        self.name = inner.name
        self.vocabulary = f"string-level match, shared tokens {100 * match.share:.0f} % of text"
        self.cache = inner.cache
        self.max_nodes, self.passes = inner.max_nodes, inner.passes
        self.warm_up = inner.warm_up
        self._inner = inner
        self._match = match
        self._shadows: dict[int, _Shadow] = {}
        self._empty = TokenTree.empty(inner.deliver_to)

    def propose(self, plan: Plan) -> list[TokenTree]:
        slices = tuple(self._shadow(item.seq).slice_of(item) for item in plan.slices)
        drafts = self._inner.propose(Plan(slices))
        parts = [draft.tokens for draft in drafts if len(draft)]
        values = torch.cat(parts).tolist() if parts else []
        trees = []
        for item, draft in zip(plan.slices, drafts, strict=True):
            draft_values, values = values[: len(draft)], values[len(draft) :]
            trees.append(self._translated(item, draft, draft_values) if len(draft) else self._empty)
        return trees

    def _shadow(self, seq: SequenceView) -> _Shadow:
        shadow = self._shadows.get(seq.seq_id)
        if shadow is None:
            text = Retokeniser(self._match.target, self._match.draft, self._match.pairs)
            shadow = self._shadows[seq.seq_id] = _Shadow(seq.seq_id, text)
        return shadow

    def _translated(self, item: Slice, draft: TokenTree, tokens: Sequence[int]) -> TokenTree:
        text = self._shadows[item.seq.seq_id].text
        paths = (text.proposal(path)[: item.draft_length] for path in _paths(draft.parents, tokens))
        merged, parents = merge(paths, self.max_nodes(item.draft_length))
        return TokenTree(to_device(merged, draft.tokens.device), parents)

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """The draft keeps what cannot change any more; its drafts it reads again as text."""
        for commit in commits:
            shadow = self._shadows.get(commit.seq_id)
            if shadow is not None:
                self._inner.keep(commit.seq_id, len(shadow.text.settled))

    def forget(self, seq_id: int) -> None:
        self._shadows.pop(seq_id, None)
        self._inner.forget(seq_id)


def _paths(parents: tuple[int, ...], tokens: Sequence[int]) -> list[list[int]]:
    """The tokens from the root to each leaf."""
    paths: list[list[int]] = []
    for parent, token in zip(parents, tokens, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else ()), token])
    return [path for path, below in zip(paths, children_of(parents)[1:], strict=True) if not below]
