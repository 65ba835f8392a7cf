"""Drafts that a request brings with it: what its grammar forces, and its predicted output.

Where a grammar leaves one text (keys, quotes and brackets of a schema), that is the draft (jump-
forward decoding, Zheng et al. 2023, arXiv 2312.07104). OpenAI's ``prediction`` (2024), for edited
files, is a text in the request's index (draft/text_index.py); the draft continues it wherever the
answer rejoins it.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.core.batch import Plan, Slice
from paceline.core.sequence import SequenceView
from paceline.core.tree import TokenTree
from paceline.draft.base import Drafter, Guess, LookupDrafter, States, takes_forced
from paceline.draft.text_index import TAKEN_IN, TextIndex, open_index
from paceline.kernels.lookup import Lookup

_CONTEXT = 16  # last tokens of the prompt before it, so that its first token can match
_RULE = Lookup((1, 2, 4, 8, 16), 32, factor=2.0, offset=6.0)


class Predictions(LookupDrafter):
    """Drafts from a request's grammar where that forces tokens, and from
    ``SamplingParams.prediction`` while the answer follows it; elsewhere, and for others, the
    engine's drafter drafts."""

    name = "prediction"
    states: States[TextIndex]

    def beside(self, drafter: Drafter, plan: Plan) -> list[TokenTree]:
        """One tree per slice: the request's own if there is one, else ``drafter``'s. Forced text
        that a drafter takes into its own tree is left to it."""
        predicted = [self._is_asked(item, drafter) for item in plan.slices]
        if not any(predicted):
            return drafter.propose(plan)
        pairs = zip(plan.slices, predicted, strict=True)
        predictions = self.propose(
            Plan(tuple(item if asked else replace(item, draft_length=0) for item, asked in pairs))
        )
        left = zip(plan.slices, predictions, strict=True)
        rest = Plan(tuple(replace(i, draft_length=0) if len(tree) else i for i, tree in left))
        others = drafter.propose(rest)
        return [
            first if len(first) else second
            for first, second in zip(predictions, others, strict=True)
        ]

    def _is_asked(self, item: Slice, drafter: Drafter) -> bool:
        params, constraint = item.seq.params, item.seq.constraint
        if item.drafter is None and not params.prediction and takes_forced(drafter):
            return False
        asked = item.drafter in (None, self.name) and (params.prediction or constraint)
        return bool(item.draft_length and asked)

    def guess(self, item: Slice) -> Guess:
        """What is forced, else how the prediction goes on if the end of the text occurs in it."""
        seq, length = item.seq, item.draft_length
        forced = seq.constraint.forced()[:length] if seq.constraint is not None else ()
        if forced:
            return forced, range(-1, len(forced) - 1), _RULE.depth
        if not seq.params.prediction:
            return (), ()
        index = self.states.of(seq, self.begin)
        taken = index.open_tokens - min(_CONTEXT, seq.prompt_length)
        fresh = seq.params.prediction[taken : taken + TAKEN_IN]
        return index.suffixes(fresh, seq.tokens[-_RULE.depth :], length, length)

    def begin(self, seq: SequenceView) -> TextIndex:
        index = open_index(_RULE)
        index.extend(seq.tokens[max(0, seq.prompt_length - _CONTEXT) : seq.prompt_length])
        return index
