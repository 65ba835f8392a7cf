"""Predicted outputs: a request that says what its answer will probably be brings its own draft.

OpenAI's ``prediction`` (2024): of an edited file most is known before. Here the prediction is a
text in a suffix tree of the request's own (draft/suffix_tree.py), continued wherever the answer
rejoins it, so that an insertion costs a few tokens and not the rest.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.core.batch import Plan, Slice
from paceline.core.transfer import to_device
from paceline.core.tree import TokenTree
from paceline.draft.base import TAKEN_IN, Drafter
from paceline.draft.suffix_tree import SuffixTree

_CONTEXT = 16  # last tokens of the prompt that go with it: they match its first token
_DEPTH = 32  # longest match
_FACTOR, _OFFSET, _LEAST = 2.0, 6.0, 0.1  # as SuffixOptions has them
_OTHERWISE = 4  # levels that the drafter may add where the answer has left the prediction


class Predictions:
    """Requests with ``SamplingParams.prediction`` are drafted for by that, while it goes on; where
    the answer has left it, and for all others, the engine's drafter drafts."""

    def __init__(self, device: torch.device | str) -> None:
        """``device`` is the target's."""
        self._device = device
        self._trees: dict[int, SuffixTree] = {}

    def propose(self, plan: Plan, drafter: Drafter) -> list[TokenTree]:
        """One tree per slice, as ``Drafter.propose``."""
        asked = any(item.seq.params.prediction for item in plan.slices)
        if not asked or not drafter.max_nodes(1):
            return drafter.propose(plan)
        found = {
            place: tree
            for place, item in enumerate(plan.slices)
            if item.seq.params.prediction and item.decodes and item.draft_length
            for tree in [self._tree(item, drafter.max_nodes(item.draft_length))]
            if tree is not None
        }
        slices = [
            replace(item, draft_length=0 if place in found else min(item.draft_length, _OTHERWISE))
            if item.seq.params.prediction
            else item
            for place, item in enumerate(plan.slices)
        ]
        trees = drafter.propose(Plan(tuple(slices)))
        return [found.get(place, tree) for place, tree in enumerate(trees)]

    def _tree(self, item: Slice, most: int) -> TokenTree | None:
        """What follows in the prediction, if the end of the text stands in it."""
        seq = item.seq
        own = self._trees.get(seq.seq_id)
        if own is None:
            own = self._trees[seq.seq_id] = SuffixTree(_DEPTH)
            own.extend(seq.tokens[max(0, seq.prompt_length - _CONTEXT) : seq.prompt_length])
        taken = own.open_tokens - min(_CONTEXT, seq.prompt_length)
        own.extend(seq.params.prediction[taken : taken + TAKEN_IN])
        length = min(item.draft_length, most)
        text = seq.tokens[-_DEPTH:]
        guess = own.speculate(text, length, length, _FACTOR, _OFFSET, _LEAST)
        if not guess.tokens:
            return None
        ids = to_device(guess.tokens, self._device)
        return TokenTree(ids, guess.parents, known=tuple(guess.tokens))

    def forget(self, seq_id: int) -> None:
        self._trees.pop(seq_id, None)
